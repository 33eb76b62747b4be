//! Operations of `pq-core`.

mod attend;
mod encode;
mod gather;
mod layout;

pub use attend::{Attend, AttendArguments, AttendShape, ExactTokens, Pages};
pub use encode::{Encode, EncodeArguments, EncodeShape, VectorElement};
pub use gather::{Gather, GatherArguments};
pub use layout::{CodeLayout, Side, TILE};
