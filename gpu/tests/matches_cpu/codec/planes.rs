//! Planes that the kernels do not take are refused.

use std::sync::Arc;

use codec_core::{Coder, FitOptions, ModelKind, PlaneBuf, PredictorKind, Steps, TransformBuf};
use kv_gpu::codec::Planes;

use super::Case;
use crate::common::Random;

#[test]
fn planes_without_a_kernel_are_errors() {
    let random = &mut Random(1);
    let case = Case { page_tokens: None, ..Case::random(random) };
    let rows = random.normals(case.info.channels() * 40);
    for (predictor, coder) in
        [(PredictorKind::Anchor { group: 4 }, Coder::InterleavedRans), (PredictorKind::Mean, Coder::Range)]
    {
        let options =
            FitOptions { predictor, steps: Steps::Deviations(0.5), models: ModelKind::Families, coder };
        let plane = PlaneBuf::fit(&rows, case.info.channels(), None, &options).unwrap();
        let packed = Planes::pack(&[plane.view()], case.info.head_dim);
        assert!(matches!(packed, Err(kv_gpu::Error::Unsupported { .. })));
    }
    assert!(matches!(Planes::pack(&[], 4), Err(kv_gpu::Error::Argument { .. })));
    // Only one of the planes has a transform.
    let channels = case.info.channels();
    let maps = vec![0.5; channels * channels];
    let transform = Arc::new(TransformBuf::new(channels, maps.clone(), maps).unwrap());
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let planes =
        [Some(transform), None].map(|transform| PlaneBuf::fit(&rows, channels, transform, &options).unwrap());
    let views = planes.each_ref().map(|plane| plane.view());
    assert!(matches!(Planes::pack(&views, case.info.head_dim), Err(kv_gpu::Error::Unsupported { .. })));
    // A transform to the leading coefficients, fewer than the channels.
    let leading = TransformBuf::leading(8, 5, vec![0.5; 40], vec![0.5; 40]).unwrap();
    let plane = PlaneBuf::fit(&random.normals(8 * 40), 8, Some(leading.into()), &options).unwrap();
    assert!(matches!(Planes::pack(&[plane.view()], 4), Err(kv_gpu::Error::Unsupported { .. })));
}
