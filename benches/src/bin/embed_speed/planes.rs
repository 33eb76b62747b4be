//! The cost of borrowing an owned plane of the codec, once per frame in an engine.

use std::hint::black_box;
use std::sync::Arc;

use codec_core::{FitOptions, ModelKind, PlaneBuf, TransformBuf};

use crate::{DIM, HEADS, least};

/// Views of planes of 8 heads with each kind of model.
pub fn views(rows: &[f32]) {
    const VIEWS: usize = 1000;
    println!("\n## codec-core: a view of an owned plane\n\n{} channels; nanoseconds.\n", HEADS * DIM);
    println!("| models | view |\n| --- | --- |");
    let identity: Vec<f32> =
        (0..HEADS * DIM * DIM).map(|i| f32::from(u8::from(i / DIM % DIM == i % DIM))).collect();
    let transform = Arc::new(TransformBuf::new(DIM, identity.clone(), identity).unwrap());
    for (name, models, transform) in [
        ("families", ModelKind::Families, None),
        ("tables, transform", ModelKind::Tables, Some(transform.clone())),
        ("context tables, transform", ModelKind::ContextTables, Some(transform)),
    ] {
        let options = FitOptions { models, ..Default::default() };
        let plane = PlaneBuf::fit(rows, HEADS * DIM, transform, &options).unwrap();
        let mut cases: Vec<Box<dyn FnMut()>> = vec![Box::new(|| {
            for _ in 0..VIEWS {
                let _ = black_box(black_box(&plane).view());
            }
        })];
        println!("| {name} | {:.0} |", least(40, &mut cases)[0] / VIEWS as f64 * 1e9);
    }
}
