//! The bitstream: round trips, committed vectors, damage, and the edges of sizes and values.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod containers;
mod extremes;
mod mutations;
mod places;
mod profiles;
mod properties;
mod support;
mod vectors;
