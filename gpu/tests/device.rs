//! Tests that need a device or a compiler say that they skipped where there is none; with `GPU_TESTS=require` that is a
//! failure.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use std::io::Write;

use kv_gpu::{Device, Error, KERNELS, compile, self_test};

fn skip(what: &str, error: &Error) {
    assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "{what}: {error}");
    // Not println!, which the test harness would swallow.
    let _ = writeln!(std::io::stderr(), "SKIPPED {what}: {error}");
}

#[test]
fn the_device_computes() {
    match Device::open(0) {
        Ok(device) => {
            assert!(device.capability() >= (8, 0), "sm_80 is the floor");
            self_test(&device).unwrap();
            self_test(&device).unwrap(); // from the module cache
        }
        Err(error) => skip("the_device_computes", &error),
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    for (kernel, _) in KERNELS {
        for architecture in ["compute_80", "compute_90"] {
            match compile(kernel, architecture) {
                Ok(ptx) => assert!(
                    ptx.to_src().contains(".visible .entry"),
                    "{kernel} for {architecture} has no entry"
                ),
                Err(error @ Error::NoNvrtc) => {
                    return skip("every_kernel_compiles_for_every_architecture", &error);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = Device::open(4096).err().unwrap();
    assert!(matches!(error, Error::NoDriver | Error::Driver { operation: "open device", .. }), "{error}");
}
