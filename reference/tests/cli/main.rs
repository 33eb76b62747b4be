//! The program `kv`: what it prints, what it leaves behind, and how it refuses.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "../support"]
mod support {
    pub mod kv;
    #[cfg(feature = "store")]
    pub mod s3;
}

mod any_checkpoint;
#[cfg(unix)]
mod fetch;
mod hostile;
mod outputs;
#[cfg(feature = "store")]
mod store_command;
mod usage;
