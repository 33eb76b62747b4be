//! The kernels of the decode loop, as programs that `kv-gpu` compiles. They may include its headers.

use kv_gpu::pq::{CodeLayout, TILE};
use kv_gpu::{Element, Program};

use crate::side::Side;

const HEADERS: &[(&str, &str)] = &[
    ("int8_rows.cuh", include_str!("../../../gpu/kv-device/src/kernels/int8_rows.cuh")),
    ("picks.cuh", include_str!("kernels/picks.cuh")),
    ("random.cuh", include_str!("../../../gpu/kv-device/src/kernels/random.cuh")),
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
pub(crate) fn evict() -> Program {
    Program::own("evict.cu", include_str!("../../../gpu/kv-device/src/kernels/evict.cu"), HEADERS, &[])
}

/// `copy` of the rows of pages.
pub(crate) fn pages() -> Program {
    Program::own("pages.cu", include_str!("../../../gpu/kv-device/src/kernels/pages.cu"), HEADERS, &[])
}

/// `embed`, `normalize`, `append`, `rotate` and `swiglu`.
pub(crate) fn prompt(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("prompt.cu", include_str!("kernels/prompt.cu"), HEADERS, &defines)
}

/// `decode` of codes in a layout.
pub(crate) fn decode_prefix(element: Element, layout: &CodeLayout, side: Side) -> Program {
    let dim = layout.shape().dim();
    let bits = (layout.table_len() / dim).ilog2() as usize;
    let defines = [
        ("ELEMENT", element as usize),
        ("HEAD_DIM", dim),
        ("KEPT_M", 8 * layout.tile_len() / TILE / bits),
        ("KEPT_BITS", bits),
    ];
    Program::own(
        "decode_prefix.cu",
        include_str!("../../../gpu/kv-device/src/kernels/decode_prefix.cu"),
        HEADERS,
        &defines,
    )
    .define_if(side == Side::Keys, "KEYS")
}

/// `eviction` of queries and keys; without queries (a group of 0) of keys or values alone.
pub(crate) fn bases(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("bases.cu", include_str!("../../../gpu/kv-device/src/kernels/bases.cu"), HEADERS, &defines)
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
    Program::own(
        "coded_rows.cu",
        include_str!("../../../gpu/kv-device/src/kernels/coded_rows.cu"),
        HEADERS,
        &defines,
    )
}

/// `cut`, `restore` and `merge` of `zack`.
pub(crate) fn zack(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("zack.cu", include_str!("../../../gpu/kv-device/src/kernels/zack.cu"), HEADERS, &defines)
}

/// `encode`, `decode`, `attend` and `merge` of `int4`.
pub(crate) fn int4(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("int4.cu", include_str!("../../../gpu/kv-device/src/kernels/int4.cu"), HEADERS, &defines)
}

/// `tabulate`, `budget`, `evict` and `copy`.
pub(crate) fn retrieval() -> Program {
    Program::own(
        "retrieval.cu",
        include_str!("../../../gpu/kv-device/src/kernels/retrieval.cu"),
        HEADERS,
        &[],
    )
}

/// `residency`, for short lists or for any.
pub(crate) fn residency(short: bool) -> Program {
    Program::own(
        "residency.cu",
        include_str!("../../../gpu/kv-device/src/kernels/residency.cu"),
        HEADERS,
        &[],
    )
    .define_if(short, "SHORT")
}

/// `store` and `load` of rows in 8 bits.
pub(crate) fn int8_rows(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own(
        "int8_rows.cu",
        include_str!("../../../gpu/kv-device/src/kernels/int8_rows.cu"),
        HEADERS,
        &defines,
    )
}

/// `load` of rows in 8 bits by bulk copies, for compute capability 9.0 and later.
pub(crate) fn int8_load_sm90(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own(
        "int8_load_sm90.cu",
        include_str!("../../../gpu/kv-device/src/kernels/int8_load_sm90.cu"),
        HEADERS,
        &defines,
    )
}
