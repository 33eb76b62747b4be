//! Every kernel of the decode loop, to be compiled by a test.

use kv_gpu::{Element, Program};

use super::gemv::{GemvShape, Input, Output};
use super::step::picks;
use super::{products, weights};

/// Every kernel of the loop for blocks of up to `shared_memory` bytes, to be compiled without a device: the
/// products of models with 384 and with 4,096 components for one, six and 32 sequences. Those of caches are
/// [`kv_device::programs`].
#[must_use]
pub fn programs(shared_memory: usize) -> Vec<Program> {
    let mut programs = vec![picks::draw_program()];
    for element in [Element::F16, Element::Bf16] {
        programs.extend([weights::program(element), picks::step_program(element)]);
        programs.extend([64, 128].map(|head_dim| products::program(element, head_dim)));
        for (n_in, columns) in [(408, 1), (4096, 1), (4096, 6), (11008, 16), (4096, 32)] {
            let outputs = [
                (Input::Elements, Output::Add),
                (Input::Elements, Output::Store),
                (Input::Residual, Output::SwiGlu),
                (Input::Residual, Output::Rope),
                (Input::Residual, Output::Heads),
                (Input::Residual, Output::Store),
            ];
            programs.extend(outputs.map(|(input, output)| {
                GemvShape { n_in, columns, element, head_dim: 128, input, output }.program(shared_memory)
            }));
        }
    }
    programs
}
