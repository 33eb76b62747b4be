//! Operations of `pq-core`.

mod attend;
mod layout;

pub use attend::{Attend, AttendArguments, AttendShape, ExactTokens, Pages};
pub use layout::{CodeLayout, Side, TILE};
