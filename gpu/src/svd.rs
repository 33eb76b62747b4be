//! Operations of `svd-core`.

mod project;

pub use project::{Project, ProjectArguments, ProjectShape};
