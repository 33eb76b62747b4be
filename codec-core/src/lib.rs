#![doc = include_str!("../README.md")]
#![no_std]
// Only the modules of the instruction sets, in `simd`, use unsafe code.
#![deny(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod backend;
mod block;
mod chunk;
mod element;
mod error;
mod frame;
mod lossless;
mod model;
mod place;
mod plane;
#[cfg(feature = "alloc")]
mod profile;
// Without `alloc` there is no encoder, and some functions are unused.
#[cfg_attr(not(feature = "alloc"), allow(dead_code))]
mod quant;
mod range;
mod rans;
#[cfg(feature = "alloc")]
mod reader;
#[allow(unsafe_code)]
#[cfg_attr(not(feature = "alloc"), allow(dead_code))]
mod simd;
mod stream;
mod symbols;
mod tile;
mod transform;

pub use backend::Backend;
pub use block::MAX_BLOCK_TOKENS;
pub use chunk::{Chunk, ChunkEntry};
#[cfg(feature = "alloc")]
pub use chunk::{chunk_head, write_chunk};
pub use element::Element;
pub use error::Error;
pub use frame::{BlockIndex, ElementType, Frame, FrameInfo, Side};
#[cfg(feature = "alloc")]
pub use frame::{
    assemble_frame, encode_frame, encode_frame_into, encode_frame_into_with, encode_frame_with,
    encode_lossless_frame, encode_lossless_frame_into, encode_lossless_frame_into_with,
    encode_lossless_frame_with,
};
pub use lossless::LosslessPlane;
#[cfg(feature = "alloc")]
pub use lossless::owned::LosslessPlaneBuf;
pub use model::slots::{MAX_SYMBOLS, PRECISION};
pub use model::tables::{ESCAPE, LANES, Row};
pub use model::{Models, TABLE_LEN, family_table};
pub use place::{Place, TokenPages};
#[cfg(feature = "alloc")]
pub use plane::fit::{FitOptions, ModelKind, PredictorKind, Steps};
#[cfg(feature = "alloc")]
pub use plane::owned::{PlaneBuf, TransformBuf};
pub use plane::{Plane, PlaneParts, Predictor, Scaling};
#[cfg(feature = "alloc")]
pub use profile::{LayerRows, ModelInfo, Profile};
pub use stream::{
    CHUNK_TOKENS, ChunkSizes, Decision, Encoding, MAX_LEVELS, Plans, Progress, Reason, StreamPolicy,
    Throughput,
};
pub use symbols::{decode_symbols_into, decode_symbols_into_with};
#[cfg(feature = "alloc")]
pub use symbols::{encode_symbols, encode_symbols_with};
pub use tile::Coder;
pub use transform::{MAX_HEAD_DIM, RopeTable, Transform};
