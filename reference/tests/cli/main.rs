//! The program `kv`: what it prints, what it leaves behind, and how it refuses.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "../support"]
mod support {
    #[path = "../../kv-model/tests/support/gguf.rs"]
    pub mod gguf;
    pub mod kv;
    #[cfg(feature = "s3")]
    pub mod s3;
}

mod answers;
mod any_checkpoint;
#[cfg(all(unix, feature = "fetch"))]
mod fetch;
mod hostile;
mod outputs;
mod refusals;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "store")]
mod store_command;
#[cfg(feature = "s3")]
mod store_servers;
mod usage;
