//! Attention on codes agrees with `pq_core::attend_into` and `pq_core::attend_exact_into`.

mod case;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::f16;
use kv_gpu::pq::{Addends, Attend, AttendArguments, AttendShape, CodeLayout, Norms, Paging, Side, TILE};
use kv_gpu::{Device, DevicePtr, Element, Error, Limit};
use pq_core::PqShape;

use crate::common::{Buffer, Random, device, from_element, to_element};
use case::{Case, adjusted, plain, quantizers};

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..60 {
        let mut random = Random(seed);
        Case::random(&mut random, &[1, 2, 5]).run(&device, &mut random, |_| ());
    }
}

#[test]
fn many_ragged_sequences_agree() {
    let Some(device) = device("many_ragged_sequences_agree") else { return };
    for seed in 100..104 {
        let mut random = Random(seed);
        Case::random(&mut random, &[33, 70, 200]).run(&device, &mut random, |_| ());
    }
}

/// Numbers of heads for which blocks take several of them, with their tables, one after another.
#[test]
fn many_heads_agree() {
    let Some(device) = device("many_heads_agree") else { return };
    for (seed, heads) in [(4000, 40), (4001, 67), (4002, 133), (4003, 300)] {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random, &[1, 3]);
        (case.heads, case.shape.group) = (heads, 1 + random.below(8));
        case.run(&device, &mut random, |_| ());
    }
}

/// A sequence that all blocks share and a short one, with every quantizer for keys, and for values another one
/// than for keys. Groups take turns. Quantizers whose tables do not fit a block of the device are refused;
/// returns the number of the others.
fn every_quantizer(device: &Device) -> usize {
    let (batch, heads, capacity, exact_capacity) = (2, 2, 3000, 40);
    let quantizers = quantizers();
    let mut agreed = 0;
    for (i, &keys) in quantizers.iter().enumerate() {
        let of_dim: Vec<_> = quantizers.iter().filter(|other| other.dim() == keys.dim()).collect();
        let mut random = Random(4100 + i as u64);
        let shape = plain(keys, [1, 2, 4, 8, 3, 7, 16][i % 7], Element::F16, Paging::Contiguous);
        let shape = adjusted(&random, AttendShape { values: *of_dim[(i + 1) % of_dim.len()], ..shape });
        if shape.program(device.shared_memory()).is_err() {
            let refused = Attend::new(device, shape).err();
            assert!(matches!(refused, Some(Error::Unsupported { .. })), "{shape:?}: {refused:?}");
            continue;
        }
        let case = Case {
            shape,
            batch,
            heads,
            capacity,
            lengths: vec![2999, 33],
            exact_capacity,
            exact_lengths: vec![17, 40],
            page_tiles: capacity.div_ceil(TILE),
        };
        case.run(device, &mut random, |_| ());
        agreed += 1;
    }
    agreed
}

#[test]
fn every_quantizer_agrees() {
    let Some(device) = device("every_quantizer_agrees") else { return };
    let agreed = every_quantizer(&device);
    assert!(device.shared_memory() < 163 << 10 || agreed == 21, "{agreed}");
}

/// Blocks of 99 KiB, as consumer devices have them: tables of codes of 8 bits for both sides do not fit.
#[test]
fn blocks_of_99_kib_agree_or_are_refused() {
    let Some(mut device) = device("blocks_of_99_kib_agree_or_are_refused") else { return };
    device.limit_to(Limit { capability: (8, 0), shared_memory: 99 << 10 }).unwrap();
    let agreed = every_quantizer(&device);
    assert!((1..21).contains(&agreed), "{agreed}");
}

/// Sequences so long that a warp looks up the pages of its tiles several times.
#[test]
fn many_pages_agree() {
    let Some(device) = device("many_pages_agree") else { return };
    let quantizer = PqShape::new(64, 16, 4).unwrap();
    for (seed, group, paging, page_tiles) in [
        (5000, 1, Paging::Tiles, 1),
        (5001, 4, Paging::Tiles, 3),
        (5002, 8, Paging::Tiles, 8),
        (5003, 1, Paging::HalfTiles, 1),
        (5004, 4, Paging::HalfTiles, 1),
        (5005, 8, Paging::HalfTiles, 3),
    ] {
        let mut random = Random(seed);
        let shape = adjusted(&random, plain(quantizer, group, Element::F16, paging));
        let (heads, capacity) = (8, 280_000);
        let case = Case {
            shape,
            batch: 1,
            heads,
            capacity,
            lengths: vec![capacity as u32 - 17],
            exact_capacity: 0,
            exact_lengths: vec![0],
            page_tiles,
        };
        case.run(&device, &mut random, |_| ());
    }
}

/// Every group size with the shape of the benchmark, with and without addends and norms. The sequence is long
/// enough that all blocks share it.
#[test]
fn every_group_agrees() {
    let Some(device) = device("every_group_agrees") else { return };
    let quantizer = PqShape::new(128, 64, 8).unwrap();
    for (group, heads) in (1..=16).map(|group| (group, 2)).chain([(3, 1), (8, 1), (12, 1)]) {
        for (addends, norms) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut random = Random(1000 + group as u64);
            let shape = plain(quantizer, group, Element::F16, Paging::Contiguous);
            let (capacity, page_tiles) = (9000, 9000_usize.div_ceil(TILE));
            let (lengths, exact_lengths) = (vec![8999], vec![100]);
            let case = Case {
                shape: AttendShape { addends, norms, ..shape },
                batch: 1,
                heads,
                capacity,
                lengths,
                exact_capacity: 100,
                exact_lengths,
                page_tiles,
            };
            case.run(&device, &mut random, |_| ());
        }
    }
}

/// Pages of 16 tokens or a few times as many, in a random order: ragged lengths that end in either half of a
/// tile, with exact tokens beside them.
fn pages_of_half_tiles(device: &Device, seed: u64, quantizer: PqShape, group: usize) {
    let mut random = Random(seed);
    let element = random.pick(&[Element::F16, Element::Bf16]);
    let shape = adjusted(&random, plain(quantizer, group, element, Paging::HalfTiles));
    if shape.check().is_err() {
        return; // a quantizer without half tiles
    }
    let lengths = [1, 15, 16, 17, 31, 33, 47, 48, 2000, 2999].map(|most| random.below(most + 1) as u32);
    let exact_lengths = lengths.map(|_| random.below(101) as u32);
    let case = Case {
        shape,
        batch: lengths.len(),
        heads: 1 + random.below(3),
        capacity: 3000,
        lengths: lengths.to_vec(),
        exact_capacity: 100,
        exact_lengths: exact_lengths.to_vec(),
        page_tiles: random.pick(&[1, 1, 2, 5]),
    };
    case.run(device, &mut random, |_| ());
}

#[test]
fn half_tiles_of_every_group_agree() {
    let Some(device) = device("half_tiles_of_every_group_agree") else { return };
    let quantizer = PqShape::new(128, 64, 8).unwrap();
    (1..=8).for_each(|group| pages_of_half_tiles(&device, 6000 + group as u64, quantizer, group));
}

#[test]
fn half_tiles_of_every_quantizer_agree() {
    let Some(device) = device("half_tiles_of_every_quantizer_agree") else { return };
    for (i, quantizer) in quantizers().into_iter().enumerate() {
        pages_of_half_tiles(&device, 6100 + i as u64, quantizer, 1 + i % 8);
    }
}

/// From so few tokens that not all blocks work to some more, with few and with many exact tokens.
#[test]
fn few_tokens_agree() {
    let Some(device) = device("few_tokens_agree") else { return };
    let quantizer = PqShape::new(128, 64, 8).unwrap();
    let lengths = [0, 1, 32, 200, 256, 257, 1024, 2500, 4096];
    for (seed, length) in (7000..).zip(lengths.iter().cycle().take(2 * lengths.len()).copied()) {
        let mut random = Random(seed);
        let group = random.pick(&[1, 2, 4, 6, 8]);
        let paging = random.pick(&[Paging::Contiguous, Paging::HalfTiles]);
        let shape = adjusted(&random, plain(quantizer, group, Element::F16, paging));
        let exact = random.pick(&[0, 1, 16, 17, 1024, 3000]);
        let capacity = length.max(1) as usize;
        let case = Case {
            shape,
            batch: 1,
            heads: random.pick(&[1, 4, 8]),
            capacity,
            lengths: vec![length],
            exact_capacity: exact,
            exact_lengths: vec![exact as u32],
            page_tiles: if paging == Paging::Contiguous { capacity.div_ceil(TILE) } else { 1 },
        };
        case.run(&device, &mut random, |_| ());
    }
}

#[test]
fn numbers_that_are_none_stay_with_their_query() {
    let Some(device) = device("numbers_that_are_none_stay_with_their_query") else { return };
    for (seed, spoiler) in
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(6).enumerate()
    {
        let mut random = Random(2000 + seed as u64);
        let case = Case::random(&mut random, &[2]);
        case.run(&device, &mut random, |queries| queries[5] = spoiler);
    }
}

/// A NaN in FP8 stays one: in a value it reaches its component of its head's outputs, and no other number.
#[test]
fn nan_in_fp8_reaches_its_component() {
    let Some(device) = device("nan_in_fp8_reaches_its_component") else { return };
    for (seed, element) in (2200..).zip([Element::F16, Element::Bf16]) {
        let (dim, group, component) = (64, 2, 5);
        let shape = plain(PqShape::new(dim, 32, 6).unwrap(), group, element, Paging::Contiguous);
        let case = Case {
            shape: AttendShape { exact_fp8: true, ..shape },
            batch: 1,
            heads: 2,
            capacity: 100,
            lengths: vec![100],
            exact_capacity: 20,
            exact_lengths: vec![20],
            page_tiles: 4,
        };
        let mut inputs = case.inputs(&mut Random(seed), |_| ());
        inputs.exact[Side::Values as usize][3 * dim + component] = f32::NAN;
        let outputs = case.run_on_device(&device, &inputs).unwrap();
        for (i, &bits) in outputs.out.iter().enumerate() {
            let spoiled = i % dim == component && i / dim < group;
            assert_eq!(from_element(element, bits).is_nan(), spoiled, "{element:?}, output {i}");
        }
    }
}

/// Norms of values up to the largest, of keys as small, and weights of tokens that rise all along.
#[test]
fn large_norms_agree() {
    let Some(device) = device("large_norms_agree") else { return };
    for (seed, group) in (2100..).zip([1, 2, 4, 8]) {
        let mut random = Random(seed);
        let shape = plain(PqShape::new(128, 64, 8).unwrap(), group, Element::Bf16, Paging::Contiguous);
        let (capacity, lengths) = (4000, vec![4000, 77]);
        let case = Case {
            shape: AttendShape { addends: true, norms: true, ..shape },
            batch: lengths.len(),
            heads: 2,
            capacity,
            lengths,
            exact_capacity: 0,
            exact_lengths: vec![0; 2],
            page_tiles: capacity.div_ceil(TILE),
        };
        let mut inputs = case.inputs(&mut random, |_| ());
        inputs.norms[0].iter_mut().for_each(|norm| *norm /= 1024.0);
        inputs.norms[1].iter_mut().step_by(3).for_each(|norm| *norm = 4094.0);
        for (i, addend) in inputs.addends.iter_mut().enumerate() {
            *addend = f16::from_f32((i % capacity) as f32 / 64.0).to_f32();
        }
        case.run_with(&device, &inputs);
    }
}

#[test]
fn options_without_their_arguments_are_errors() {
    let Some(device) = device("options_without_their_arguments_are_errors") else { return };
    let shape = plain(PqShape::new(64, 32, 6).unwrap(), 1, Element::F16, Paging::Contiguous);
    let attend = |shape: AttendShape| Attend::new(&device, shape).unwrap();
    let (bytes, halves, floats) = (DevicePtr::dangling(), DevicePtr::dangling(), DevicePtr::dangling());
    let arguments = AttendArguments {
        batch: 1,
        heads: 1,
        tiles: 1,
        key_codes: bytes,
        value_codes: bytes,
        key_table: halves,
        value_table: halves,
        queries: floats.cast(),
        lengths: floats.cast(),
        pages: None,
        addends: None,
        norms: None,
        exact: None,
        exact_factors: None,
        scale: 1.0,
        out: floats.cast(),
        log_sum_exp: Some(floats),
        pdl: false,
        workspace: bytes,
    };
    let (addends, norms) = (Addends { values: halves, tiles: 1 }, Norms { keys: halves, values: halves });
    for (attend, arguments) in [
        (attend(AttendShape { addends: true, ..shape }), arguments),
        (attend(AttendShape { norms: true, ..shape }), arguments),
        (attend(AttendShape { exact_fp8: true, ..shape }), arguments),
        (attend(shape), AttendArguments { exact_factors: Some(floats), ..arguments }),
        (attend(shape), AttendArguments { addends: Some(addends), ..arguments }),
        (attend(shape), AttendArguments { norms: Some(norms), ..arguments }),
    ] {
        // SAFETY: the launch fails before it reads anything.
        #[allow(unsafe_code)]
        let launched = unsafe { attend.launch(device.stream().cu_stream(), &arguments) };
        assert!(matches!(launched, Err(Error::Argument { .. })), "{launched:?}");
    }
}

#[test]
fn a_captured_graph_follows_the_lengths() {
    let Some(device) = device("a_captured_graph_follows_the_lengths") else { return };
    let mut random = Random(3000);
    let quantizer = PqShape::new(64, 32, 6).unwrap();
    let shape = plain(quantizer, 4, Element::F16, Paging::Contiguous);
    let (batch, heads, tiles) = (3, 2, 40);
    let layout = CodeLayout::new(quantizer, Side::Keys).unwrap();
    let codes = Buffer::new(&device, &random.bytes(batch * heads * tiles * layout.tile_len()));
    let halves = |x: Vec<f32>| x.iter().map(|&x| to_element(Element::F16, x)).collect::<Vec<u16>>();
    let table = Buffer::new(&device, &halves(random.normals(heads * layout.table_len())));
    let queries = Buffer::new(&device, &halves(random.normals(batch * heads * 4 * 64)));
    let mut lengths = Buffer::new(&device, &[100_u32, 0, 1280]);
    let attend = Attend::new(&device, shape).unwrap();
    let workspace = Buffer::new(&device, &vec![0_u8; attend.workspace_len(batch, heads)]);
    let out = Buffer::new(&device, &vec![0_u16; batch * heads * 4 * 64]);
    let arguments = AttendArguments {
        batch,
        heads,
        tiles,
        key_codes: codes.pointer(),
        value_codes: codes.pointer(),
        key_table: table.pointer().cast(),
        value_table: table.pointer().cast(),
        queries: queries.pointer().cast(),
        lengths: lengths.pointer(),
        pages: None,
        addends: None,
        norms: None,
        exact: None,
        exact_factors: None,
        scale: 0.125,
        out: out.pointer().cast(),
        log_sum_exp: None,
        pdl: false,
        workspace: workspace.pointer(),
    };
    let stream = device.stream();
    // SAFETY: the buffers outlive the graph, and have the lengths that the shape requires.
    #[allow(unsafe_code)]
    let launch = || unsafe { attend.launch(stream.cu_stream(), &arguments) }.unwrap();
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    launch();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    let mut before = Vec::new();
    for new_lengths in [[100, 0, 1280], [101, 32, 1], [1280, 1280, 1280]] {
        lengths.write(&new_lengths);
        graph.launch().unwrap();
        let by_graph = out.read();
        launch();
        assert!(by_graph == out.read(), "{new_lengths:?}");
        assert!(by_graph != before, "{new_lengths:?}: as with the lengths before");
        before = by_graph;
    }
}
