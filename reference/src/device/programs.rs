//! The kernels of the loop as programs that `kv-gpu` compiles. They may include its headers.

use kv_gpu::{Element, Program};

use super::gemv::{GemvShape, Input, Output};

const HEADERS: &[(&str, &str)] = &[("random.cuh", include_str!("kernels/random.cuh"))];

pub(crate) fn gemv(defines: &[(&str, usize)]) -> Program {
    Program::own("gemv.cu", include_str!("kernels/gemv.cu"), HEADERS, defines)
}

/// `begin` and `pick`.
pub(crate) fn step(element: Element) -> Program {
    Program::own("step.cu", include_str!("kernels/step.cu"), HEADERS, &[("ELEMENT", element as usize)])
}

/// `fill`, `fill_words` and `pack`; element 0 is `f32`.
pub(crate) fn weights(element: usize) -> Program {
    Program::own("weights.cu", include_str!("kernels/weights.cu"), HEADERS, &[("ELEMENT", element)])
}

/// `plan` and `stage`.
pub(crate) fn leaving() -> Program {
    Program::own("leaving.cu", include_str!("kernels/leaving.cu"), HEADERS, &[])
}

/// Every kernel of the loop for blocks of up to `shared_memory` bytes, to be compiled without a device: the
/// products of models with 384 and with 4,096 components for one, six and 32 sequences.
#[must_use]
pub fn programs(shared_memory: usize) -> Vec<Program> {
    let mut programs = vec![weights(0), weights(1), leaving()];
    for element in [Element::F16, Element::Bf16] {
        programs.push(step(element));
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
