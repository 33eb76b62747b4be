//! Every kernel of the decode loop, to be compiled by a test.

use kv_gpu::pq::CodeLayout;
use kv_gpu::{Element, Program};
use pq_core::PqShape;

use super::gemv::{GemvShape, Input, Output};
use super::programs::{
    bases, coded_rows, decode_prefix, draw, evict, int4, int8_load_sm90, int8_rows, pages, prompt, residency,
    retrieval, step, weights, zack,
};
use crate::side::Side;

/// Every kernel of the loop for a compute capability and blocks of up to `shared_memory` bytes, to be
/// compiled without a device: the products of models with 384 and with 4,096 components for one, six and 32
/// sequences, and codes of all layouts.
#[must_use]
pub fn programs(capability: (i32, i32), shared_memory: usize) -> Vec<Program> {
    let mut programs = vec![weights(0), weights(1), draw(), evict(), pages(), retrieval()];
    programs.extend([residency(true), residency(false)]);
    for element in [Element::F16, Element::Bf16] {
        programs.extend([step(element), prompt(element, 64), prompt(element, 128)]);
        programs.extend([int8_rows(element, 64), int8_rows(element, 128)]);
        if capability.0 >= 9 {
            programs.extend([int8_load_sm90(element, 64), int8_load_sm90(element, 128)]);
        }
        let heads = [(64, 3), (128, 1), (128, 4), (128, 16)];
        programs.extend(heads.map(|(dim, group)| zack(element, dim, group)));
        programs.extend(heads.map(|(dim, group)| int4(element, dim, group)));
        programs.extend(heads.map(|(dim, group)| bases(element, dim, group)));
        programs.extend([bases(element, 64, 0), bases(element, 128, 0)]);
        for (mean, norms) in [(true, false), (false, true), (true, true)] {
            programs.extend([64, 128].map(|dim| coded_rows(element, dim, mean, norms)));
        }
        let shapes = [(128, 64, 8), (128, 64, 6), (128, 32, 8), (128, 128, 4), (64, 16, 4), (64, 32, 8)];
        let shapes = shapes.into_iter().filter_map(|(dim, m, nbits)| PqShape::new(dim, m, nbits).ok());
        programs.extend(shapes.flat_map(|shape| {
            let layout = move |side: Side| CodeLayout::new(shape, side.into()).ok();
            Side::ALL.into_iter().filter_map(move |side| Some(decode_prefix(element, &layout(side)?, side)))
        }));
        for (n_in, columns) in [(408, 1), (4096, 1), (4096, 6), (11008, 16), (4096, 32)] {
            let outputs = [
                (Input::Elements, Output::Add),
                (Input::Residual, Output::SwiGlu),
                (Input::Residual, Output::Rope),
                (Input::Residual, Output::Store),
            ];
            programs.extend(outputs.map(|(input, output)| {
                GemvShape { n_in, columns, element, head_dim: 128, input, output }.program(shared_memory)
            }));
        }
    }
    programs
}
