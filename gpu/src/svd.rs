//! Operations of `svd-core`: low-rank keys and values.

mod attend;
mod gram;
mod prefill;
mod project;

pub use attend::{Attend, AttendArguments, AttendShape};
pub use gram::{Gram, GramArguments, GramShape};
pub use prefill::{Prefill, PrefillArguments};
pub use project::{Project, ProjectArguments, ProjectShape};
