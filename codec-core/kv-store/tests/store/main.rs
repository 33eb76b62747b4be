//! Stores that fail, and stores on a real S3 server.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "../support"]
mod support {
    pub mod faulty;
    #[cfg(feature = "s3")]
    pub mod weed;
}

mod faults;
mod pages;
#[cfg(feature = "s3")]
mod s3;
