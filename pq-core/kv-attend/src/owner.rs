//! For crates that own caches: exact rows of a window, working memory, attention of many heads, and the bytes
//! of what is saved.

mod bytes;
mod heads;
mod window_rows;
mod workspace;

pub use bytes::{Reader, Writer};
pub use heads::{Heads, attend_heads};
pub use window_rows::{Moves, WindowRows};
pub use workspace::Workspace;
