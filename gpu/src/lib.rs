#![doc = include_str!("../README.md")]

pub mod codec;
mod compile;
mod device;
mod disk_cache;
mod error;
mod launch;
mod pointer;
pub mod pq;
mod self_test;
pub mod svd;
mod tensor_map;

pub use compile::{Image, Program, compile};
pub use device::Device;
pub use error::Error;
pub use pointer::{AnyElement, DevicePtr};
pub use self_test::{self_test, self_test_program};

/// Element type of queries, keys, values and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// Element type of vectors that may also be in single precision. The discriminants are those of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VectorElement {
    /// Single precision.
    F32 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

/// Texts of the kernel files.
struct Kernels {
    self_test: &'static str,
    pq_attend: &'static str,
    pq_attend_any: &'static str,
    pq_encode: &'static str,
    pq_encode_any: &'static str,
    pq_train: &'static str,
    pq_lut: &'static str,
    pq_scan: &'static str,
    pq_search: &'static str,
    pq_search_joint: &'static str,
    gather: &'static str,
    svd_attend: &'static str,
    svd_project_registers: &'static str,
    svd_project_boxes: &'static str,
    svd_gram_strips: &'static str,
    svd_gram_squares: &'static str,
    svd_prefill: &'static str,
    codec_decode: &'static str,
    codec_encode: &'static str,
    codec_join: &'static str,
    codec_transform: &'static str,
}

const KERNELS: Kernels = Kernels {
    self_test: include_str!("kernels/self_test.cu"),
    pq_attend: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/work.cuh"),
        include_str!("kernels/reduce.cuh"),
        include_str!("kernels/pq_attend/shape.cuh"),
        include_str!("kernels/pq_attend/codes.cuh"),
        include_str!("kernels/pq_attend/tables.cuh"),
        include_str!("kernels/pq_attend/plan.cuh"),
        include_str!("kernels/pq_attend/scores.cuh"),
        include_str!("kernels/pq_attend/sums.cuh"),
        include_str!("kernels/pq_attend/exact.cuh"),
        include_str!("kernels/pq_attend/finish.cuh"),
        include_str!("kernels/pq_attend/attend.cu"),
    ),
    pq_attend_any: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/pq_runs.cuh"),
        include_str!("kernels/pq_attend_any.cu"),
    ),
    pq_encode: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/pq_encode.cu"),
    ),
    pq_encode_any: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/pq_runs.cuh"),
        include_str!("kernels/pq_nearest.cuh"),
        include_str!("kernels/pq_encode_any.cu"),
    ),
    pq_train: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/pq_nearest.cuh"),
        include_str!("kernels/pq_train.cu"),
    ),
    pq_lut: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/pq_lut.cu"),
    ),
    pq_scan: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/pq_runs.cuh"),
        include_str!("kernels/pq_search/tables.cuh"),
        include_str!("kernels/pq_search/scan.cu"),
    ),
    pq_search: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/pq_runs.cuh"),
        include_str!("kernels/pq_search/tables.cuh"),
        include_str!("kernels/pq_search/select.cuh"),
        include_str!("kernels/pq_search/search.cu"),
    ),
    pq_search_joint: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/pq_runs.cuh"),
        include_str!("kernels/pq_search/select.cuh"),
        include_str!("kernels/pq_search/joint.cu"),
    ),
    gather: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/gather.cu")),
    svd_attend: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/work.cuh"),
        include_str!("kernels/reduce.cuh"),
        include_str!("kernels/svd_attend.cu"),
    ),
    svd_project_registers: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/svd_project/registers.cu"),
    ),
    svd_project_boxes: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/hopper.cuh"),
        include_str!("kernels/svd_project/boxes.cu"),
    ),
    svd_gram_strips: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/svd_gram/gram.cuh"),
        include_str!("kernels/svd_gram/strips.cu"),
        include_str!("kernels/svd_gram/join.cu"),
    ),
    svd_gram_squares: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/hopper.cuh"),
        include_str!("kernels/svd_gram/gram.cuh"),
        include_str!("kernels/svd_gram/squares.cu"),
        include_str!("kernels/svd_gram/join.cu"),
    ),
    svd_prefill: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/svd_prefill.cu")),
    codec_decode: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/codec/place.cuh"),
        include_str!("kernels/codec/tile.cuh"),
        include_str!("kernels/codec/decode.cu"),
    ),
    codec_encode: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/codec/place.cuh"),
        include_str!("kernels/codec/tile.cuh"),
        include_str!("kernels/codec/encode.cu"),
    ),
    codec_transform: concat!(
        include_str!("kernels/common.cuh"),
        include_str!("kernels/number.cuh"),
        include_str!("kernels/codec/place.cuh"),
        include_str!("kernels/codec/transform.cu"),
    ),
    codec_join: concat!(include_str!("kernels/common.cuh"), include_str!("kernels/codec/join.cu")),
};
