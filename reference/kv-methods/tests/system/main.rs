//! Methods in the loop: prompts in chunks, and arguments that do not fit.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod chunks;
mod settings;
mod shapes;
mod sizes;
