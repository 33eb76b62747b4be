//! Operations of `svd-core`.

mod attend;
mod project;

pub use attend::{Attend, AttendArguments, AttendShape};
pub use project::{Project, ProjectArguments, ProjectShape};
