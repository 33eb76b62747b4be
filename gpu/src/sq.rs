//! Operations of `pq_core::sq`: scalar codes.

mod attend;
mod decode;
mod encode;
mod key_table;
mod side;

pub use attend::{Attend, AttendArguments, AttendShape};
pub use decode::{Decode, DecodeArguments, DecodeShape};
pub use encode::{Encode, EncodeArguments, EncodeShape};
pub use key_table::KeyTable;
pub use side::Side;
