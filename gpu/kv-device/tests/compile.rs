//! Every kernel of the caches compiles and keeps its registers, wherever NVRTC is installed.

#![allow(clippy::panic)]

#[path = "../../tests/common/kernels.rs"]
mod kernels;

use std::io::Write;

use kernels::compiled;
use kv_device::programs;

fn compile_and_keep_their_registers(capability: (i32, i32)) {
    let architecture = &format!("sm_{}{}", capability.0, capability.1);
    for program in programs(capability) {
        match compiled(&program, architecture) {
            Ok(image) => assert_eq!(image.spilled_bytes(), 0, "{program} for {architecture}"),
            Err(error @ kv_gpu::Error::NoNvrtc) => {
                assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "{error}");
                // Not println!, which the test harness would swallow.
                let _ = writeln!(std::io::stderr(), "SKIPPED compilation: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn kernels_of_sm_80() {
    compile_and_keep_their_registers((8, 0));
}

#[test]
fn kernels_of_sm_90() {
    compile_and_keep_their_registers((9, 0));
}
