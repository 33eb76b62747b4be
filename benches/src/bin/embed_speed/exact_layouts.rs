//! Exact attention on interleaved heads.

use std::cell::RefCell;

use half::f16;
use pq_core::*;

use crate::{DIM, HEADS, backends, least};

/// Exact attention over rows of 8 interleaved heads, in one call and head by head, against contiguous heads.
pub fn measure(rows: &[f32]) {
    println!(
        "\n## Exact attention, tokens first (NHD) against heads first (HND)\n\n8 heads of 4 queries each: microseconds with HND, one call per head, and the factors of NHD.\n"
    );
    println!("| elements, tokens, backend | HND | NHD, all heads in one call | NHD, one call per head |");
    println!("| --- | --- | --- | --- |");
    for n in [512, 4096, 16_384] {
        let rows: Vec<f32> = rows.iter().cycle().take(n * HEADS * DIM).copied().collect();
        let halves: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
        of_elements("f32", &rows);
        of_elements("f16", &halves);
    }
}

fn of_elements<E: Element>(name: &str, rows: &[E]) {
    const GROUP: usize = 4;
    let n = rows.len() / (HEADS * DIM);
    let interleaved = Rows::contiguous(rows, HEADS * DIM).unwrap();
    let of_head = |head: usize| interleaved.columns(head * DIM, DIM).unwrap();
    // Keys and values each have their own memory, as in a cache.
    let gathered: Vec<E> = (0..HEADS).flat_map(|head| of_head(head).iter().flatten().copied()).collect();
    let (values, gathered_values) = (rows.to_vec(), gathered.clone());
    let queries: Vec<f32> = rows[..HEADS * GROUP * DIM].iter().map(|x| x.to_f32() / 16.0).collect();
    let mut scratch = vec![0.0; attend_exact_scratch_len(HEADS * GROUP, DIM)];
    for backend in backends() {
        let outs = RefCell::new(vec![vec![0.0; HEADS * GROUP * DIM]; 3]);
        let scratch = RefCell::new(&mut scratch);
        let attend = |case: usize, head: usize, heads: usize, tokens: ExactTokens<'_, E>| {
            let (mut outs, mut scratch) = (outs.borrow_mut(), scratch.borrow_mut());
            let out = &mut outs[case][head * GROUP * DIM..][..heads * GROUP * DIM];
            let mut stats = [SoftmaxStats::EMPTY; HEADS * GROUP];
            let stats = &mut stats[..heads * GROUP];
            out.fill(0.0);
            let queries = Rows::from(&queries[head * GROUP * DIM..][..heads * GROUP * DIM]);
            let attention = Attention::default();
            attend_exact_into_with(backend, &attention, queries, &tokens, &mut scratch, out, stats).unwrap();
            normalize_all(stats, out).unwrap();
        };
        let in_layout =
            |rows, head: usize| Rows::contiguous(rows, HEADS * DIM).unwrap().columns(head * DIM, DIM);
        let mut cases: Vec<Box<dyn FnMut()>> = vec![
            Box::new(|| {
                for (head, (keys, values)) in
                    gathered.chunks_exact(n * DIM).zip(gathered_values.chunks_exact(n * DIM)).enumerate()
                {
                    attend(0, head, 1, ExactTokens::contiguous(keys, DIM, values, DIM).unwrap());
                }
            }),
            Box::new(|| {
                let keys = Rows::contiguous(rows, HEADS * DIM).unwrap();
                let values = Rows::contiguous(&values[..], HEADS * DIM).unwrap();
                attend(1, 0, HEADS, ExactTokens::new(keys, values).unwrap().heads(HEADS).unwrap());
            }),
            Box::new(|| {
                for head in 0..HEADS {
                    let (keys, values) = (in_layout(rows, head).unwrap(), in_layout(&values, head).unwrap());
                    attend(2, head, 1, ExactTokens::new(keys, values).unwrap());
                }
            }),
        ];
        let seconds = least(20, &mut cases);
        drop(cases);
        let outs = outs.into_inner();
        for out in &outs[1..] {
            assert!(outs[0].iter().zip(out).all(|(a, b)| (a - b).abs() < 1e-4));
        }
        println!(
            "| {name}, {n}, {backend:?} | {:.0} | {:.2}x | {:.2}x |",
            seconds[0] * 1e6,
            seconds[1] / seconds[0],
            seconds[2] / seconds[0]
        );
    }
}
