//! The kernels of the decode loop, as programs that `kv-gpu` compiles. They may include its headers.

use kv_gpu::pq::{CodeLayout, TILE};
use kv_gpu::{Element, Program};
use pq_core::PqShape;

use super::gemv::{GemvShape, Input, Output};
use crate::side::Side;

const HEADERS: &[(&str, &str)] = &[
    ("int8_rows.cuh", include_str!("kernels/int8_rows.cuh")),
    ("picks.cuh", include_str!("kernels/picks.cuh")),
    ("random.cuh", include_str!("kernels/random.cuh")),
];

pub(crate) fn gemv(defines: &[(&str, usize)]) -> Program {
    Program::own("gemv.cu", include_str!("kernels/gemv.cu"), HEADERS, defines)
}

/// `begin` and `pick`.
pub(crate) fn step(element: Element) -> Program {
    Program::own("step.cu", include_str!("kernels/step.cu"), HEADERS, &[("ELEMENT", element as usize)])
}

/// `draw`.
pub(crate) fn draw() -> Program {
    Program::own("draw.cu", include_str!("kernels/draw.cu"), HEADERS, &[])
}

/// `fill`, `fill_words` and `pack`; element 0 is `f32`.
pub(crate) fn weights(element: usize) -> Program {
    Program::own("weights.cu", include_str!("kernels/weights.cu"), HEADERS, &[("ELEMENT", element)])
}

/// `plan`, `stage` and `exact`.
pub(crate) fn leaving() -> Program {
    Program::own("leaving.cu", include_str!("kernels/leaving.cu"), HEADERS, &[])
}

/// `copy` of the rows of pages.
pub(crate) fn pages() -> Program {
    Program::own("pages.cu", include_str!("kernels/pages.cu"), HEADERS, &[])
}

/// `embed`, `normalize`, `append`, `rotate` and `swiglu`.
pub(crate) fn prompt(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("prompt.cu", include_str!("kernels/prompt.cu"), HEADERS, &defines)
}

/// `decode` of codes in a layout.
pub(crate) fn past(element: Element, layout: &CodeLayout, side: Side) -> Program {
    let dim = layout.shape().dim();
    let bits = (layout.table_len() / dim).ilog2() as usize;
    let defines = [
        ("ELEMENT", element as usize),
        ("HEAD_DIM", dim),
        ("KEPT_M", 8 * layout.tile_len() / TILE / bits),
        ("KEPT_BITS", bits),
    ];
    Program::own("past.cu", include_str!("kernels/past.cu"), HEADERS, &defines)
        .define_if(side == Side::Keys, "KEYS")
}

/// `turn` of queries and keys; without queries (a group of 0) of keys or values alone.
pub(crate) fn bases(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("bases.cu", include_str!("kernels/bases.cu"), HEADERS, &defines)
}

/// `prepare` and `restore` of rows in another basis: keys with or without subtraction of their rotated mean,
/// rows with or without division by their norms.
pub(crate) fn coded_rows(element: Element, head_dim: usize, mean: bool, norms: bool) -> Program {
    let defines = [
        ("ELEMENT", element as usize),
        ("HEAD_DIM", head_dim),
        ("MEAN", mean.into()),
        ("NORMS", norms.into()),
    ];
    Program::own("coded_rows.cu", include_str!("kernels/coded_rows.cu"), HEADERS, &defines)
}

/// `cut`, `restore` and `merge` of `zack`.
pub(crate) fn zack(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("zack.cu", include_str!("kernels/zack.cu"), HEADERS, &defines)
}

/// `encode`, `decode`, `attend` and `merge` of `int4`.
pub(crate) fn int4(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("int4.cu", include_str!("kernels/int4.cu"), HEADERS, &defines)
}

/// `tabulate`, `budget`, `leave` and `copy`.
pub(crate) fn retrieval() -> Program {
    Program::own("retrieval.cu", include_str!("kernels/retrieval.cu"), HEADERS, &[])
}

/// `reuse`, for short lists or for any.
pub(crate) fn reuse(short: bool) -> Program {
    Program::own("reuse.cu", include_str!("kernels/reuse.cu"), HEADERS, &[]).define_if(short, "SHORT")
}

/// `store` and `load` of rows in 8 bits.
pub(crate) fn int8_rows(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("int8_rows.cu", include_str!("kernels/int8_rows.cu"), HEADERS, &defines)
}

/// `load` of rows in 8 bits by bulk copies, for compute capability 9.0 and later.
pub(crate) fn int8_load_sm90(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("int8_load_sm90.cu", include_str!("kernels/int8_load_sm90.cu"), HEADERS, &defines)
}

/// Every kernel of the loop for a compute capability and blocks of up to `shared_memory` bytes, to be
/// compiled without a device: the products of models with 384 and with 4,096 components for one, six and 32
/// sequences, and codes of all layouts.
#[must_use]
pub fn programs(capability: (i32, i32), shared_memory: usize) -> Vec<Program> {
    let mut programs = vec![weights(0), weights(1), draw(), leaving(), pages(), retrieval()];
    programs.extend([reuse(true), reuse(false)]);
    for element in [Element::F16, Element::Bf16] {
        programs.extend([step(element), prompt(element, 64), prompt(element, 128)]);
        programs.extend([int8_rows(element, 64), int8_rows(element, 128)]);
        if capability.0 >= 9 {
            programs.extend([int8_load_sm90(element, 64), int8_load_sm90(element, 128)]);
        }
        let heads = [(64, 3), (128, 1), (128, 4), (128, 16)];
        programs.extend(heads.map(|(dim, group)| zack(element, dim, group)));
        programs.extend(heads.map(|(dim, group)| bases(element, dim, group)));
        programs.extend([bases(element, 64, 0), bases(element, 128, 0)]);
        for (mean, norms) in [(true, false), (false, true), (true, true)] {
            programs.extend([64, 128].map(|dim| coded_rows(element, dim, mean, norms)));
        }
        let shapes = [(128, 64, 8), (128, 64, 6), (128, 32, 8), (128, 128, 4), (64, 16, 4), (64, 32, 8)];
        let shapes = shapes.into_iter().filter_map(|(dim, m, nbits)| PqShape::new(dim, m, nbits).ok());
        programs.extend(shapes.flat_map(|shape| {
            let layout = move |side: Side| CodeLayout::new(shape, side.into()).ok();
            Side::ALL.into_iter().filter_map(move |side| Some(past(element, &layout(side)?, side)))
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
