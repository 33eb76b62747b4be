//! Shared by the device tests.

#![allow(clippy::unwrap_used, dead_code, unused_imports, unused_macros)] // not every test uses all helpers

pub mod selection;

use std::io::Write;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr as _, DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
pub use kv_gpu::pq::Side;
use kv_gpu::{Device, DevicePtr, Element, Error, VectorElement};

/// The sides of a cache, in the order of pairs `[keys, values]`.
pub const SIDES: [Side; 2] = [Side::Keys, Side::Values];

/// Reports that a test was skipped; with `GPU_TESTS=require` this is a failure.
pub fn skip(what: &str, error: &Error) {
    assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "{what}: {error}");
    // Not println!, which the test harness would swallow.
    let _ = writeln!(std::io::stderr(), "SKIPPED {what}: {error}");
}

/// The device, or `None` after reporting that the test is skipped. `GPU_LIMIT` sets a
/// [`Limit`](kv_gpu::Limit).
pub fn device(test: &str) -> Option<Device> {
    let mut device = Device::open(0).map_err(|error| skip(test, &error)).ok()?;
    if let Ok(limit) = std::env::var("GPU_LIMIT") {
        device.limit_to(limit.parse().unwrap()).unwrap();
    }
    Some(device)
}

/// A kernel, or `None` where the device has less shared memory than an A100 and refuses the shape for that.
pub fn where_it_fits<T>(device: &Device, kernel: Result<T, Error>) -> Option<T> {
    match kernel {
        Err(Error::Unsupported { .. }) if device.shared_memory() < 163 << 10 => None,
        kernel => Some(kernel.unwrap()),
    }
}

/// Launches an operation on the stream of a device.
macro_rules! launch {
    ($device:expr, $operation:expr, $($arguments:expr),+) => {{
        // SAFETY: the buffers of a test live until their contents have been read, and have the lengths that
        // the shape requires.
        #[allow(unsafe_code)]
        let launched = unsafe { $operation.launch($device.stream().cu_stream(), $($arguments),+) };
        launched.unwrap();
    }};
}
pub(crate) use launch;

/// A buffer on the device.
pub struct Buffer<T> {
    slice: CudaSlice<T>,
    device: Arc<cudarc::driver::CudaStream>,
}

impl<T: DeviceRepr + ValidAsZeroBits + Clone + Default> Buffer<T> {
    pub fn new(device: &Device, data: &[T]) -> Self {
        let stream = device.stream();
        // An empty buffer has no address.
        let slice =
            if data.is_empty() { stream.clone_htod(&[T::default()]) } else { stream.clone_htod(data) };
        Self { slice: slice.unwrap(), device: stream.clone() }
    }

    pub fn pointer(&self) -> DevicePtr<T> {
        DevicePtr::new(self.slice.device_ptr(&self.device).0).unwrap()
    }

    pub fn write(&mut self, data: &[T]) {
        self.device.memcpy_htod(data, &mut self.slice).unwrap();
        self.device.synchronize().unwrap();
    }

    pub fn read(&self) -> Vec<T> {
        let read = self.device.clone_dtoh(&self.slice).unwrap();
        self.device.synchronize().unwrap();
        read
    }
}

impl Buffer<u8> {
    /// Memory that a kernel must write before it reads it. It holds large numbers of any type, or, with
    /// `GPU_SCRATCH=unwritten`, nothing, so that initcheck finds what a kernel reads too early.
    pub fn scratch(device: &Device, bytes: usize) -> Self {
        if std::env::var("GPU_SCRATCH").as_deref() != Ok("unwritten") {
            return Self::new(device, &vec![0xdd; bytes]);
        }
        let stream = device.stream().clone();
        // SAFETY: any bytes are numbers.
        #[allow(unsafe_code)]
        let slice = unsafe { stream.alloc(bytes.max(1)) }.unwrap();
        Self { slice, device: stream }
    }
}

/// A random number generator (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Approximately normal, with variance 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).sum();
        sum * 3.0_f32.sqrt()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// The bits of a value in an element type.
pub fn to_element(element: Element, x: f32) -> u16 {
    match element {
        Element::F16 => f16::from_f32(x).to_bits(),
        Element::Bf16 => bf16::from_f32(x).to_bits(),
    }
}

/// The value of an element from its bits.
pub fn from_element(element: Element, bits: u16) -> f32 {
    match element {
        Element::F16 => f16::from_bits(bits).to_f32(),
        Element::Bf16 => bf16::from_bits(bits).to_f32(),
    }
}

/// A value rounded to an element type of vectors.
pub fn rounded(element: VectorElement, x: f32) -> f32 {
    match element {
        VectorElement::F32 => x,
        VectorElement::F16 => f16::from_f32(x).to_f32(),
        VectorElement::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// The bytes of values in an element type of vectors.
pub fn bytes_of(element: VectorElement, numbers: &[f32]) -> Vec<u8> {
    match element {
        VectorElement::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        VectorElement::F16 => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        VectorElement::Bf16 => numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// `|a - b| / |b|`; infinite if the error is NaN.
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    if error == 0.0 {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        (error / norm).sqrt()
    }
}
