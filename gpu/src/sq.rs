//! Operations of `pq_core::sq`: scalar codes.

mod attend;
mod blocks;
mod decode;
mod encode;
mod key_table;
mod side;

pub use attend::{Attend, AttendArguments, AttendShape};
pub use blocks::CodedBlocks;
pub use decode::{Decode, DecodeShape};
pub use encode::{Encode, EncodeShape};
pub use key_table::KeyTable;
pub use side::Side;
