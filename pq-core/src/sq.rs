//! Scalar codes of transformed keys and values, attended to as they are.
//!
//! A scalar quantizer has no codebook: each component of a transformed row becomes a level of a uniform
//! quantizer. Nothing is trained but the transform of the keys, so the codes hold on any text.
//!
//! * **Keys** are coded in blocks of 32 to 256 tokens. The caller subtracts the mean before RoPE (its part of
//!   the scores is that of [`RopeMean`](crate::RopeMean)), rotates the rest relative to the middle of the
//!   block ([`rotate_by`]) and multiplies it by the basis of the query-weighted KLT. Components get bits by
//!   their variance ([`allot`]), and each component of a block has a step of its own. A query is rotated by
//!   the block's middle and multiplied by the dual basis once a block, not once a token.
//! * **Values** are rotated by a Hadamard matrix, which spreads every row evenly over its components: all get
//!   the same bits, and a token needs its norm alone.
//!
//! Scores and weighted sums are integer dot products, with queries and weights of 15 bits, so they are the same
//! on every machine.
//!
//! # Levels
//! A code `c` of `b` bits is the level `(c + 1/2 - 2^(b - 1)) step`: uniform and symmetric, without a zero
//! (midrise). Keys: the step of a component in a block is a byte `s`, `step = 2^((s - 128) / 8)`. Values: the
//! step of a token is its norm (a byte of [`encode_norm`](crate::encode_norm)) over `sqrt(dim)` times the
//! optimal step of a Gaussian. The upper `a` bits of a code are the code of `a` bits of the step
//! `2^(b - a) step`.
//!
//! # Layout
//! Codes are words of 32 bits, little-endian in files, in tiles of 32 tokens. A tile of `slots` bits per byte
//! lane has `slots` vectors of 16 words:
//!
//! ```text
//! word      lane 0 .. 15 of a vector        byte j of the word
//! keys      token 16 h + lane               component 4 q + j of quad q
//! values    component 16 p + lane           token 4 u + j
//! ```
//!
//! A row of the tile has 8 slots, so that its 8 vectors fill the bytes: a slot is one bit of every byte of all
//! 8. The 8 vectors are the units of the row: `unit = 2 (q % 4) + h` for keys, the token quad `u` for values.
//! So `(word >> shift) & mask` with a mask for each byte turns a word into codes of four components (keys) or
//! four tokens (values): a register of an int8 tensor-core fragment, or operands of a dot product of 16-bit
//! halves. If `slots % 8` is not 0, the last rows have 4, 2 and 1 slots, as the bits of `slots % 8` say: unit
//! `u` of a row of `s` slots is in vector `u % s`, `s (u / s)` bits up in each byte.
//!
//! The codes of keys fill the slots of column `c` (the quads `c`, `c + 4`, ...) in the order of the quads, those
//! of values in the order of groups of 16 components, from bit 0 upwards. A code that crosses the end of a row
//! is split: its leading bits are at the end of the row, the others at the start of the next. Heads whose length
//! is not a multiple of 16 have codes 0 after their components, which nothing reads.
//!
//! An embedded shape ([`Shape::embedded`]) fills the first rows with the leading bits of all codes: these rows
//! of every tile are a shape of their own ([`Shape::prefix`]), the code at fewer bits.
//!
//! # Source
//! Transform coding with bits by variance: Huang, Schultheiss, "Block Quantization of Correlated Gaussian
//! Random Variables", IEEE Trans. Comm. 1963; uniform steps: Max, "Quantizing for Minimum Distortion", IRE
//! Trans. 1960; random rotation before scalar codes: QuaRot (arXiv 2404.00456), TurboQuant (arXiv 2504.19874).

mod allot;
mod attend;
#[allow(unsafe_code)]
mod dot;
mod exp2;
mod field;
#[cfg(feature = "alloc")]
mod head_cache;
#[cfg(feature = "alloc")]
mod head_codes;
#[cfg(feature = "alloc")]
mod head_transform;
mod keys;
mod level;
mod plan;
#[cfg(feature = "alloc")]
#[allow(unsafe_code)]
mod product;
mod query;
#[cfg(feature = "alloc")]
mod relative;
mod rotate;
mod shape;
mod values;

pub use allot::allot;
pub use attend::{Block, attend_into, attend_into_with, attend_scratch_len};
pub use field::Field;
#[cfg(feature = "alloc")]
pub use head_cache::{HeadCache, LayerCache};
#[cfg(feature = "alloc")]
pub use head_codes::HeadCodes;
#[cfg(feature = "alloc")]
pub use head_transform::{HeadTransform, TransformParts};
pub use keys::{Keys, decode_keys_into, encode_keys_into, encode_keys_into_with};
pub use level::STEPS;
pub use query::{scores_into, scores_into_with, scores_scratch_len};
pub use rotate::rotate_by;
pub use shape::{MAX_BLOCK, MAX_DIM, Shape, TILE};
pub use values::{Values, decode_values_into, encode_values_into, encode_values_into_with, mean_error_into};
