//! The device opens, computes, and reports errors.

#![allow(clippy::unwrap_used)]

mod common;

use kv_gpu::pq::{Attend, AttendShape, CodeLayout, Lut, LutArguments, LutShape, Paging, Side};
use kv_gpu::{Device, DevicePtr, Element, Error, Grid, Limit, Program, VectorElement, self_test};
use pq_core::PqShape;

#[test]
fn the_device_computes() {
    let Some(device) = common::device("the_device_computes") else { return };
    assert!(device.capability() >= (8, 0), "sm_80 is the floor");
    self_test(&device).unwrap();
    self_test(&device).unwrap(); // from the cache in memory
}

#[test]
fn kernels_come_from_the_disk_cache_or_are_compiled_again() {
    if common::device("kernels_come_from_the_disk_cache_or_are_compiled_again").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = || {
        let mut device = Device::open(0).unwrap();
        device.use_disk_cache(folder.path()).unwrap();
        self_test(&device).unwrap();
        let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> = files.collect();
        assert_eq!(files.len(), 1, "{files:?}");
        let kept = std::fs::read(&files[0]).unwrap();
        (files[0].clone(), kept)
    };
    let (file, kept) = run();
    assert!(run().1 == kept);
    // Damaged files: foreign contents, a truncated file, and one with a valid checksum but zeros instead of
    // machine code after the key.
    let body = kept.len() - 12;
    let key = kept.iter().position(|&byte| byte == 0).unwrap() + 1;
    let mut no_code = [&kept[..key], &vec![0; body - key]].concat();
    let checksum = crc32fast::hash(&no_code);
    no_code.extend_from_slice(&kept[body..body + 8]);
    no_code.extend_from_slice(&checksum.to_le_bytes());
    for damaged in [&b"something else"[..], &kept[..17], &no_code] {
        std::fs::write(&file, damaged).unwrap();
        assert!(run().1 == kept, "the file is written anew");
    }
}

#[test]
fn the_device_runs_kernels_of_older_ones() {
    let Some(mut device) = common::device("the_device_runs_kernels_of_older_ones") else { return };
    let (capability, shared_memory) = (device.capability(), device.shared_memory());
    for (capability, shared_memory) in
        [((7, 5), 64 << 10), ((capability.0 + 1, 0), 99 << 10), ((8, 0), shared_memory + 1)]
    {
        let refused = device.limit_to(Limit { capability, shared_memory });
        assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    }
    assert_eq!((device.capability(), device.shared_memory()), (capability, shared_memory));
    device.limit_to(Limit { capability: (8, 0), shared_memory: 99 << 10 }).unwrap();
    assert_eq!((device.capability(), device.shared_memory()), ((8, 0), 99 << 10));
    self_test(&device).unwrap();
}

#[test]
fn threads_load_kernels_at_the_same_time() {
    let Some(device) = common::device("threads_load_kernels_at_the_same_time") else { return };
    let shape =
        |group| LutShape { quantizer: PqShape::new(64, 2, 6).unwrap(), group, element: VectorElement::F16 };
    std::thread::scope(|scope| {
        for group in [1, 2, 1, 3, 2, 1] {
            let device = &device;
            scope.spawn(move || Lut::new(device, shape(group)).unwrap());
        }
    });
}

/// Dynamic shared memory next to static, in amounts around the default limit, on threads that use the driver
/// for the first time.
#[test]
fn kernels_keep_their_shared_memory() {
    let Some(device) = common::device("kernels_keep_their_shared_memory") else { return };
    let source = "struct Arguments { unsigned *out, n; };
        extern __shared__ volatile unsigned words[];
        extern \"C\" __global__ void last_word(const Arguments a) {
            __shared__ volatile unsigned fixed[1024];
            fixed[a.n % 1024] = 7, words[a.n - 1] = 5;
            *a.out = fixed[a.n % 1024] + words[a.n - 1];
        }";
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Arguments {
        out: DevicePtr<u32>,
        n: u32,
    }
    let program = Program::own("last_word.cu", source, &[], &[]);
    let kernel = |kib: usize| {
        let make = || device.kernel(&program, "last_word", kib << 10).unwrap();
        (std::thread::scope(|scope| scope.spawn(make).join().unwrap()), kib << 8)
    };
    for (kernel, words) in [90, 46, 60, 44].map(kernel) {
        let out = common::Buffer::new(&device, &[0_u32]);
        let arguments = Arguments { out: out.pointer(), n: words as u32 };
        let grid = Grid::new([1, 1, 1]).unwrap();
        let stream = device.stream().cu_stream();
        // SAFETY: the structure is the kernel's argument; the kernel writes one word of the output.
        unsafe { kernel.launch(stream, grid, 1, false, &arguments) }.unwrap();
        assert_eq!(out.read(), [12], "{words} words");
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = Device::open(4096).err().unwrap();
    let named = matches!(&error, Error::Driver { operation, .. } if operation == "open device");
    assert!(error == Error::NoDriver || named, "{error}");
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let good = PqShape::new(128, 64, 8).unwrap();
    for (keys, values, group) in [
        (PqShape::new(96, 48, 8).unwrap(), PqShape::new(96, 48, 8).unwrap(), 1),
        (PqShape::new(128, 64, 12).unwrap(), good, 1),
        (good, PqShape::new(64, 32, 8).unwrap(), 1),
        (good, good, 0),
        (good, good, 17),
    ] {
        let (element, paging) = (Element::F16, Paging::Contiguous);
        let (addends, norms, exact_fp8) = (false, false, false);
        let shape = AttendShape { keys, values, group, element, paging, addends, norms, exact_fp8 };
        assert!(matches!(shape.check(), Err(Error::Unsupported { .. })), "{shape:?}");
        if let Ok(device) = Device::open(0) {
            assert!(Attend::new(&device, shape).is_err());
        }
    }
}

/// Pages of 16 tokens need a whole number of words for each lane.
#[test]
fn half_tiles_of_odd_sizes_are_errors() {
    let element = Element::F16;
    for (dim, m, nbits, fits) in
        [(128, 64, 8, true), (128, 32, 6, true), (64, 16, 4, true), (128, 16, 6, false), (64, 8, 4, false)]
    {
        let keys = PqShape::new(dim, m, nbits).unwrap();
        let half = CodeLayout::new(keys, Side::Values).unwrap().half_tiles();
        assert!(if fits { half.is_ok() } else { matches!(half, Err(Error::Unsupported { .. })) }, "{keys:?}");
        let (paging, addends, norms, exact_fp8) = (Paging::HalfTiles, false, false, false);
        let shape = AttendShape { keys, values: keys, group: 4, element, paging, addends, norms, exact_fp8 };
        assert!(if fits {
            shape.check().is_ok()
        } else {
            matches!(shape.check(), Err(Error::Unsupported { .. }))
        });
    }
}

#[test]
fn launches_of_nothing_succeed_and_too_large_ones_are_errors() {
    let Some(device) = common::device("launches_of_nothing_succeed_and_too_large_ones_are_errors") else {
        return;
    };
    let quantizer = PqShape::new(64, 2, 6).unwrap();
    let lut = Lut::new(&device, LutShape { quantizer, group: 4, element: VectorElement::F16 }).unwrap();
    let launch = |batch, heads| {
        let (queries, centroids) = (DevicePtr::dangling(), DevicePtr::dangling());
        let luts = DevicePtr::dangling();
        let arguments = LutArguments { batch, heads, queries, scale: 1.0, centroids, luts };
        // SAFETY: nothing is accessed, since no kernel runs.
        #[allow(unsafe_code)]
        unsafe {
            lut.launch(device.stream().cu_stream(), &arguments)
        }
    };
    assert_eq!(launch(0, 2), Ok(()));
    assert_eq!(launch(2, 0), Ok(()));
    for many in [65_536, 1 << 32, usize::MAX] {
        for error in [launch(many, 2), launch(2, many)].map(Result::unwrap_err) {
            assert!(matches!(error, Error::Argument { operation: "pq::Lut", .. }), "{error}");
        }
    }
}
