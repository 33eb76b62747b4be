//! Operations of `pq_core::sq`: scalar codes.

mod attend;
mod encode;
mod key_table;

pub use attend::{Attend, AttendArguments, AttendShape};
pub use encode::{Encode, EncodeArguments, EncodeShape, Side};
pub use key_table::KeyTable;
