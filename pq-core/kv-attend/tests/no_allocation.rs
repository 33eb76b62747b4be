//! A decode step allocates nothing.

#![allow(clippy::unwrap_used)]

use allocation_counter::measure;
use kv_attend::*;

#[test]
fn a_decode_step_allocates_nothing() {
    let (n, group, dim, heads) = (1000, 4, 64, 3);
    let attention = Attention { softcap: Some(30.0), window: Some(800), ..Attention::scaled(0.125) };
    let queries = vec![half::f16::ONE; group * dim];
    let cache = vec![half::bf16::ONE; n * heads * dim];
    let chosen: Vec<u32> = (0..n as u32).step_by(3).collect();
    let mut scratch = vec![0.0; attend_exact_scratch_len(group, dim)];
    let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let allocated = measure(|| {
            let head = Rows::contiguous(&cache, heads * dim).unwrap().columns(dim, dim).unwrap();
            let tokens = ExactTokens::new(head, head).unwrap();
            for tokens in [tokens, tokens.chosen(&chosen).unwrap()] {
                let queries = Rows::from(&queries[..]);
                attend_exact_into_with(
                    backend,
                    &attention,
                    queries,
                    &tokens,
                    &mut scratch,
                    &mut out,
                    &mut stats,
                )
                .unwrap();
            }
            normalize_all(&stats, &mut out).unwrap();
        });
        assert_eq!(allocated.count_total, 0, "{backend:?}");
    }
}
