//! Operations of `pq_core::sq`: scalar codes.

mod attend;
mod blocks;
mod decode;
mod dual_table;
mod encode;
mod key_table;
mod queries;
mod side;

pub use attend::{Attend, AttendArguments, AttendShape};
pub use blocks::CodedBlocks;
pub use decode::{Decode, DecodeShape};
pub use dual_table::DualTable;
pub use encode::{Encode, EncodeShape};
pub use key_table::KeyTable;
pub use queries::{IntegerQueries, Queries, QueriesArguments};
pub use side::Side;
