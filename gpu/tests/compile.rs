//! Every kernel compiles for every architecture, without a device, and the hot ones spill no registers.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
#[path = "common/kernels.rs"]
mod kernels;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use codec_core::{FitOptions, ModelKind, PlaneBuf, PredictorKind, Steps, TransformBuf};
use kernels::compiled;
use kv_gpu::codec::{self, Planes};
use kv_gpu::pq::{
    AppendShape, AttendGenericShape, AttendShape, CodeLayout, EncodeGenericShape, EncodeShape, Gather,
    GatherAttendShape, HybridShape, LutShape, MeanErrorsShape, Paging, RopeMeanScoresShape, ScanShape,
    SearchShape, Side, TrainShape,
};
use kv_gpu::sq;
use kv_gpu::svd::{self, ProjectShape};
use kv_gpu::{Element, Error, Program, VectorElement, self_test_program};
use pq_core::{GroupRule, PqShape};

/// Architectures, and the bytes of shared memory of their blocks.
const ARCHITECTURES: [(&str, usize); 2] = [("sm_80", 163 << 10), ("sm_90", 227 << 10)];

/// Architectures for programs that ask for the compute capability.
const CAPABILITIES: [(&str, (i32, i32)); 2] = [("sm_80", (8, 0)), ("sm_90", (9, 0))];

/// Bytes that `program` spills on an architecture; `None` if there is no compiler.
fn spilled(program: &Program, architecture: &str) -> Option<usize> {
    match compiled(program, architecture) {
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

/// Every program compiles for every architecture; with `hot`, without a spill.
fn check(programs: impl Fn(usize) -> Vec<Program>, hot: bool) {
    let of_architecture = |(architecture, shared_memory)| {
        programs(shared_memory).into_iter().map(move |program| (program, architecture))
    };
    let all: Vec<_> = ARCHITECTURES.into_iter().flat_map(of_architecture).collect();
    let (next, spilling) = (AtomicUsize::new(0), Mutex::new(String::new()));
    let work = || {
        while let Some((program, architecture)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(spilled) = spilled(program, architecture) else { return };
            if hot && spilled > 0 {
                *spilling.lock().unwrap() +=
                    &format!("{program} for {architecture} spills {spilled} bytes\n");
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let spilling = spilling.into_inner().unwrap();
    assert!(spilling.is_empty(), "{spilling}");
}

/// Quantizers of 128 and 64 components with every number of bits and of components per code.
const QUANTIZERS: [(usize, usize, u32); 9] = [
    (128, 64, 8),
    (128, 64, 6),
    (128, 64, 4),
    (128, 128, 4),
    (128, 32, 8),
    (128, 16, 8),
    (64, 32, 8),
    (64, 32, 6),
    (64, 16, 8),
];

/// The quantizers that have a layout for the paging.
fn quantizers(paging: Paging) -> Vec<PqShape> {
    let all = QUANTIZERS.map(|(dim, m, nbits)| PqShape::new(dim, m, nbits).unwrap());
    let layout = |quantizer| CodeLayout::new(quantizer, Side::Keys).unwrap();
    all.into_iter()
        .filter(|&quantizer| paging != Paging::HalfTiles || layout(quantizer).half_tiles().is_ok())
        .collect()
}

/// Variants of attention: groups of queries, element of exact rows, pages of codes, and whether there are
/// addends, norms, and exact rows in FP8.
const VARIANTS: [(&[usize], Element, Paging, [bool; 3]); 10] = [
    (&[1, 2, 4, 8], Element::F16, Paging::Contiguous, [false, false, false]),
    (&[1, 2, 3, 8], Element::Bf16, Paging::Tiles, [false, false, false]),
    (&[1, 3, 8], Element::Bf16, Paging::HalfTiles, [false, false, false]),
    (&[2, 4], Element::F16, Paging::HalfTiles, [false, false, false]),
    (&[1, 2, 4, 8], Element::F16, Paging::Contiguous, [true, true, false]),
    (&[2, 4], Element::Bf16, Paging::HalfTiles, [true, true, true]),
    (&[1, 2, 4], Element::F16, Paging::Contiguous, [true, false, false]),
    (&[2, 8], Element::Bf16, Paging::Contiguous, [false, true, false]),
    (&[1, 2, 4, 8], Element::F16, Paging::Contiguous, [false, false, true]),
    (&[1, 4], Element::Bf16, Paging::Tiles, [false, false, true]),
];

/// Whether the environment variable `EVERY_KERNEL` asks for every combination of options, which takes many
/// minutes. Without it each value of each option is compiled at least once.
fn every_kernel() -> bool {
    std::env::var_os("EVERY_KERNEL").is_some()
}

/// Every group of every variant, with the quantizers in turn: 30 of 280 shapes.
#[test]
fn attention_of_every_variant() {
    let mut shapes = vec![];
    for (v, (groups, element, paging, [addends, norms, exact_fp8])) in VARIANTS.into_iter().enumerate() {
        let quantizers = quantizers(paging);
        for (i, &quantizer) in quantizers.iter().enumerate() {
            for (j, &group) in groups.iter().enumerate() {
                if every_kernel() || (4 * v + j) % quantizers.len() == i {
                    let (keys, values) = (quantizer, quantizer);
                    shapes.push(AttendShape {
                        keys,
                        values,
                        group,
                        element,
                        paging,
                        addends,
                        norms,
                        exact_fp8,
                    });
                }
            }
        }
    }
    check(|shared_memory| shapes.iter().map(|shape| shape.program(shared_memory).unwrap()).collect(), true);
}

/// Blocks of 99 KiB, as consumer devices have them, hold both tables of codes of 8 bits for 64 components.
#[test]
fn attention_in_small_blocks() {
    let quantizer = PqShape::new(64, 32, 8).unwrap();
    for (group, addends, norms, exact_fp8) in
        [(1, false, false, false), (2, false, false, true), (4, true, true, false), (8, false, true, false)]
    {
        let (keys, values, element, paging) = (quantizer, quantizer, Element::Bf16, Paging::HalfTiles);
        let shape = AttendShape { keys, values, group, element, paging, addends, norms, exact_fp8 };
        let Some(spilled) = spilled(&shape.program(99 << 10).unwrap(), "sm_80") else { return };
        assert_eq!(spilled, 0, "{shape:?}");
    }
}

#[test]
fn scores_of_a_rotated_mean() {
    let shapes =
        [(64, 1, Element::F16), (64, 5, Element::Bf16), (128, 4, Element::F16), (128, 16, Element::Bf16)];
    let programs =
        shapes.map(|(dim, group, element)| RopeMeanScoresShape { dim, group, element }.program().unwrap());
    check(|_| programs.to_vec(), true);
}

/// Each shape with half of the options.
#[test]
fn attention_on_codes_and_exact_rows() {
    // The one of eight queries may spill: these need many registers. The attention kernel that runs after the
    // selection may spill around its exact rows, which are not in a loop: it leaves registers for blocks that
    // fetch rows.
    let shapes = [
        (128, (16, 8), (16, 8), 4, false),
        (128, (16, 8), (8, 8), 1, true),
        (128, (16, 8), (16, 8), 2, false),
        (128, (32, 4), (32, 4), 4, true),
        (128, (32, 8), (32, 8), 4, true),
        (64, (32, 8), (8, 8), 1, false),
        (64, (8, 8), (16, 4), 3, false),
        (128, (16, 8), (8, 8), 8, false),
        (128, (32, 6), (8, 8), 4, false),
        (64, (16, 6), (8, 8), 5, true),
    ];
    let small = ("sm_80", 99 << 10); // as consumer devices
    let mut compiled = HashSet::new(); // the memory of a block does not change all programs
    for (architecture, shared_memory) in ARCHITECTURES.into_iter().chain([small]) {
        let capability = if architecture == "sm_90" { (9, 0) } else { (8, 0) };
        for (i, (dim, keys, values, group, paged)) in shapes.into_iter().enumerate() {
            let quantizer = |(m, nbits)| PqShape::new(dim, m, nbits).unwrap();
            let (keys, values) = (quantizer(keys), quantizer(values));
            let (element, rule) = (Element::Bf16, GroupRule::SumOfSoftmax);
            // Addends, norms of keys and of values, and a bound.
            let options = [
                [false, false, false, false],
                [false, true, false, true],
                [true, true, true, false],
                [true, false, true, true],
            ];
            for (o, [addends, key_norms, value_norms, adaptive]) in options.into_iter().enumerate() {
                if !every_kernel() && o % 2 != i % 2 {
                    continue;
                }
                let shape = HybridShape {
                    keys,
                    values,
                    group,
                    element,
                    rule,
                    paged,
                    addends,
                    key_norms,
                    value_norms,
                    mean_errors: addends,
                    adaptive,
                };
                let programs = shape.programs(capability, shared_memory).unwrap();
                for (program, most) in programs.iter().zip([0, 0, 128, 0, 0]) {
                    if !compiled.insert((program.clone(), architecture)) {
                        continue;
                    }
                    let Some(spilled) = spilled(program, architecture) else { return };
                    let name = format!("{program} for {architecture}");
                    assert!(spilled <= most || group == 8, "{name} spills {spilled} bytes");
                }
            }
        }
    }
}

#[test]
fn encoding() {
    check(
        |_| {
            let shape = |side, element, paging| {
                quantizers(paging).into_iter().map(move |quantizer| EncodeShape {
                    quantizer,
                    side,
                    element,
                    paging,
                })
            };
            let shapes = shape(Side::Keys, VectorElement::F16, Paging::Contiguous)
                .chain(shape(Side::Values, VectorElement::F32, Paging::Tiles))
                .chain(shape(Side::Values, VectorElement::Bf16, Paging::HalfTiles));
            shapes.map(|shape| shape.program().unwrap()).collect()
        },
        true,
    );
}

#[test]
fn mean_errors_of_values() {
    check(
        |_| {
            let shape = |(quantizer, element)| MeanErrorsShape { quantizer, element };
            let elements = [Element::F16, Element::Bf16].into_iter().cycle();
            let coarse = PqShape::new(128, 8, 8).unwrap();
            let quantizers = quantizers(Paging::Contiguous).into_iter().chain([coarse]);
            quantizers.zip(elements).map(|pair| shape(pair).program().unwrap()).collect()
        },
        true,
    );
}

#[test]
fn appending() {
    check(
        |_| {
            let element = VectorElement::Bf16;
            let shape = |paging| {
                quantizers(paging).into_iter().map(move |quantizer| AppendShape {
                    keys: quantizer,
                    values: quantizer,
                    element,
                    paging,
                })
            };
            let shapes = shape(Paging::Tiles).chain(shape(Paging::HalfTiles));
            shapes.map(|shape| shape.program().unwrap()).collect()
        },
        true,
    );
}

#[test]
fn gathering() {
    for (architecture, capability) in CAPABILITIES {
        for row_bytes in [16, 128, 256, 592] {
            let program = Gather::program(row_bytes, capability).unwrap();
            let Some(spilled) = spilled(&program, architecture) else { return };
            assert_eq!(spilled, 0, "{program} for {architecture}");
        }
    }
    let shapes = [64, 128]
        .into_iter()
        .flat_map(|dim| [Element::F16, Element::Bf16].map(|element| GatherAttendShape { dim, element }));
    check(|_| shapes.clone().map(|shape| shape.program().unwrap()).collect(), true);
}

#[test]
fn projection_and_second_moments() {
    let elements = || [Element::F16, Element::Bf16].into_iter();
    for (architecture, capability) in CAPABILITIES {
        let project =
            [(128, 128), (128, 72), (128, 64), (64, 40), (96, 8)].into_iter().flat_map(|(dim, rank)| {
                elements().map(move |element| ProjectShape { dim, rank, element }.program(capability))
            });
        let gram = [16, 64, 96, 128].into_iter().flat_map(|dim| {
            elements().map(move |element| svd::GramShape { dim, element }.program(capability))
        });
        for program in project.chain(gram).map(Result::unwrap) {
            let Some(spilled) = spilled(&program, architecture) else { return };
            assert_eq!(spilled, 0, "{program} for {architecture}");
        }
    }
}

/// Groups of one and two MMAs, rows of every size, and every width of values, with the options in turn.
#[test]
fn attention_on_scalar_codes() {
    let shapes = [
        (128, 16, 2, 4, false, false),
        (128, 24, 3, 4, false, true),
        (128, 32, 4, 4, true, false),
        (128, 23, 1, 8, true, true),
        (128, 32, 4, 16, false, false),
        (64, 15, 3, 1, true, false),
        (64, 8, 2, 7, false, true),
        (96, 18, 3, 3, false, false),
        (256, 64, 4, 4, false, false),
        (256, 32, 2, 8, true, true),
    ];
    let of_shape = |(i, (dim, key_slots, value_bits, group, mean_errors, paged))| {
        let mut options = vec![(false, false), (false, true)];
        options.extend((16 * key_slots % dim == 0).then_some((true, false)));
        let options = if every_kernel() { options } else { vec![options[i % options.len()]] };
        options.into_iter().map(move |(uniform_keys, addends)| sq::AttendShape {
            dim,
            key_slots,
            uniform_keys,
            value_bits,
            block: 256,
            group,
            element: if paged { Element::Bf16 } else { Element::F16 },
            mean_errors,
            addends,
            paged,
        })
    };
    let shapes = || shapes.into_iter().enumerate().flat_map(of_shape);
    let programs = |shape: sq::AttendShape, shared_memory| {
        let [few, many] = shape.programs(shared_memory).unwrap();
        [few, many, shape.queries_program(shared_memory).unwrap()]
    };
    check(|shared_memory| shapes().flat_map(|shape| programs(shape, shared_memory)).collect(), true);
}

#[test]
fn scalar_encoding_and_decoding() {
    let sides = [
        (128, sq::Side::Keys { slots: 23 }),
        (96, sq::Side::Keys { slots: 48 }),
        (256, sq::Side::Values { bits: 3 }),
        (64, sq::Side::Values { bits: 1 }),
    ];
    let elements = [VectorElement::F16, VectorElement::F32, VectorElement::Bf16];
    let programs = sides.into_iter().zip(elements.into_iter().cycle()).map(|((dim, side), element)| {
        let (block, paged) = (256, dim == 256);
        let encode = sq::EncodeShape { dim, side, block, paged };
        let decode = sq::DecodeShape { coded: encode, element };
        [encode.program().unwrap(), decode.program().unwrap()]
    });
    let programs: Vec<_> = programs.flatten().collect();
    check(|_| programs.clone(), true);
}

#[test]
fn attention_on_ragged_ranks() {
    let shapes =
        [64, 128].map(|dim| [Element::F16, Element::Bf16].map(|element| svd::AttendShape { dim, element }));
    let shapes = shapes.concat();
    let both = |shape: &svd::AttendShape| [shape.program().unwrap(), shape.paged_program().unwrap()];
    check(|_| shapes.iter().flat_map(both).collect(), true);
    for (architecture, capability) in CAPABILITIES {
        for &shape in &shapes {
            for program in [svd::Prefill::program, svd::Prefill::paged_program] {
                let program = program(shape, capability).unwrap();
                let Ok(image) = compiled(&program, architecture) else { return };
                assert_eq!(image.spilled_bytes(), 0, "{program} for {architecture}");
                assert!(!image.log.contains("serialized"), "wgmma waits after each product: {}", image.log);
            }
        }
    }
}

#[test]
fn attention_on_any_shape() {
    let shapes = [(128, 32, 12, 4), (64, 2, 6, 16), (80, 5, 7, 1)].map(|(dim, m, nbits, group)| {
        let quantizer = PqShape::new(dim, m, nbits).unwrap();
        AttendGenericShape { keys: quantizer, values: quantizer, group }.program().unwrap()
    });
    check(|_| shapes.to_vec(), false);
}

#[test]
fn searching() {
    let shapes =
        [(128, 2, 6, 4), (64, 2, 6, 16), (8, 2, 1, 1), (128, 4, 8, 4), (128, 2, 8, 1), (64, 16, 4, 16)];
    let devices = [("sm_80", (8, 0), 163 << 10), ("sm_89", (8, 9), 99 << 10), ("sm_90", (9, 0), 227 << 10)];
    for (architecture, capability, shared_memory) in devices {
        for (dim, m, nbits, group) in shapes {
            let quantizer = PqShape::new(dim, m, nbits).unwrap();
            let (scan, rule) = (ScanShape { quantizer, group }, GroupRule::SumOfSoftmax);
            let lut = LutShape { quantizer, group, element: VectorElement::F16 };
            let search = SearchShape { quantizer, group, rule };
            let programs =
                [scan.program(shared_memory), lut.program(), search.program(capability, shared_memory)];
            for program in programs.map(Result::unwrap) {
                let Some(spilled) = spilled(&program, architecture) else { return };
                assert_eq!(spilled, 0, "{program} for {architecture}");
            }
        }
    }
}

#[test]
fn training_and_encoding_of_any_shape() {
    let shapes = [(128, 2, 6), (128, 64, 8), (128, 4, 8), (12, 4, 10)].map(|(dim, m, nbits)| {
        let (quantizer, element) = (PqShape::new(dim, m, nbits).unwrap(), VectorElement::F16);
        let (train, encode) = (TrainShape { quantizer, element }, EncodeGenericShape { quantizer, element });
        [train.program().unwrap(), encode.program().unwrap()]
    });
    check(|_| shapes.concat(), true);
}

#[test]
fn coding() {
    let rows: Vec<f32> = (0..64 * 1024).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32).collect();
    let maps = |dim| vec![0.5; 1024 * dim];
    let transform = |dim| Some(Arc::new(TransformBuf::new(dim, maps(dim), maps(dim)).unwrap()));
    let kinds = [
        (ModelKind::Families, PredictorKind::Mean, VectorElement::Bf16, false, None),
        (ModelKind::ContextTables, PredictorKind::Previous, VectorElement::F16, true, None),
        (ModelKind::Tables, PredictorKind::Mean, VectorElement::Bf16, false, transform(128)),
        (ModelKind::Tables, PredictorKind::Mean, VectorElement::F16, true, transform(64)),
        (ModelKind::ContextTables, PredictorKind::Mean, VectorElement::F32, false, transform(128)),
        (ModelKind::Families, PredictorKind::Previous, VectorElement::Bf16, false, transform(128)),
    ];
    let shapes = kinds.map(|(models, predictor, element, paged, transform)| {
        let options = FitOptions {
            predictor,
            steps: Steps::Deviations(0.5),
            models,
            coder: codec_core::Coder::InterleavedRans,
        };
        let plane = PlaneBuf::fit(&rows, 1024, transform, &options).unwrap();
        Planes::pack(&[plane.view()], 128).unwrap().shape(element, paged)
    });
    let programs = |shared_memory| {
        let of_shape = |shape: &codec::CodecShape| {
            let tiles = [shape.decode_program(), shape.encode_program()];
            let transforms = [
                shape.transform_program(),
                shape.points_program(),
                shape.tensor_core_program(shared_memory),
                shape.tensor_core_program(99 << 10),
                shape.rotating_program(shared_memory),
                shape.quantize_program(),
            ];
            tiles.into_iter().chain(transforms.into_iter().flatten()).collect::<Vec<_>>()
        };
        let programs = shapes.iter().flat_map(of_shape);
        let others = [codec::Encode::join_program(), codec::Index::program(), codec::Check::program()];
        programs.chain(others).collect()
    };
    check(programs, true);
}

#[test]
fn the_self_test() {
    check(|_| vec![self_test_program()], true);
}
