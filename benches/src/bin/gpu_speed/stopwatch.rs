//! Measures time on the device.

use std::time::{Duration, Instant};

use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};
use cudarc::driver::{CudaSlice, DevicePtr as _, DeviceRepr, ValidAsZeroBits};
use kv_gpu::{Device, DevicePtr};

/// A size in bytes that exceeds L2.
pub const BEYOND_CACHE: usize = 200 << 20;
const REPLAYS: usize = 25;
/// Pause before a measurement, so that earlier work does not keep the clocks low, then a warm-up until the
/// clocks have risen. The peers get the same times.
const REST: Duration = Duration::from_millis(150);
const WARM_UP: Duration = Duration::from_millis(20);

/// A device and its copy bandwidth, which is the floor of memory-bound kernels.
pub struct Stopwatch {
    pub gpu: Device,
    bytes_per_us: f64,
    only: Vec<String>, // or all measurements
}

impl Stopwatch {
    pub fn new(only: Vec<String>) -> Self {
        let mut device = Device::open(0).unwrap();
        if let Ok(limit) = std::env::var("GPU_LIMIT") {
            device.limit_to(limit.parse().unwrap()).unwrap();
        }
        if let Ok(folder) = std::env::var("GPU_CACHE") {
            device.use_disk_cache(folder).unwrap();
        }
        let mut watch = Self { gpu: device, bytes_per_us: 0.0, only };
        const COPIED: usize = 2 << 30;
        let (from, to) = (watch.zeros::<u8>(COPIED), watch.zeros::<u8>(COPIED));
        let (from, to) = (watch.pointer(&from).address(), watch.pointer(&to).address());
        // Not in a graph: copies in a graph are slower (2.8 TB/s instead of 4.3 on an H200).
        let stream = watch.gpu.stream().cu_stream();
        // SAFETY: both buffers have `COPIED` bytes.
        let us = watch.replay(|| unsafe { memcpy_dtod_async(to, from, COPIED, stream) }.unwrap());
        watch.bytes_per_us = 2.0 * COPIED as f64 / us;
        let name = watch.gpu.context().name().unwrap();
        let bandwidth = watch.bytes_per_us / 1e6;
        println!("{{\"kernel\":\"copy\",\"device\":\"{name}\",\"tb_s\":{bandwidth:.3}}}");
        watch
    }

    /// Whether the command line selects a measurement.
    pub fn wants(&self, kernel: &str, shape: &str) -> bool {
        let name = format!("{kernel}, {shape}");
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only))
    }

    /// Microseconds of one launch: the median of replays of a graph of `launches` numbered launches. A launch
    /// must not ask buffers for their pointers: that may synchronize, which is not allowed during capture.
    pub fn time<E: std::fmt::Debug>(
        &self,
        launches: usize,
        launch: impl Fn(usize, CUstream) -> Result<(), E>,
    ) -> f64 {
        let stream = self.gpu.stream();
        launch(0, stream.cu_stream()).unwrap();
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        (0..launches).for_each(|i| launch(i, stream.cu_stream()).unwrap());
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        self.replay(|| graph.launch().unwrap()) / launches as f64
    }

    /// Median time in microseconds of the work that `run` submits to the device's stream, after a warm-up.
    pub fn replay(&self, run: impl Fn()) -> f64 {
        let stream = self.gpu.stream();
        std::thread::sleep(REST);
        let start = Instant::now();
        while start.elapsed() < WARM_UP {
            run();
            stream.synchronize().unwrap();
        }
        let event = || self.gpu.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        let mut times: Vec<f32> = (0..REPLAYS)
            .map(|_| {
                let (start, end) = (event(), event());
                start.record(stream).unwrap();
                run();
                end.record(stream).unwrap();
                start.elapsed_ms(&end).unwrap()
            })
            .collect();
        times.sort_by(f32::total_cmp);
        f64::from(times[REPLAYS / 2]) * 1e3
    }

    /// Prints the time of a kernel and its floor: the time to copy its bytes.
    pub fn report(&self, kernel: &str, shape: &str, bytes: f64, us: f64) {
        self.report_with_floor(kernel, shape, bytes, us, bytes / self.bytes_per_us);
    }

    /// As [`Self::report`], with the number of elements of a launch.
    pub fn report_rate(&self, kernel: &str, shape: &str, bytes: f64, elements: f64, us: f64) {
        let more = format!(",\"elements\":{elements}");
        print(kernel, shape, bytes, us, bytes / self.bytes_per_us, &more);
    }

    /// As [`Self::report`], with a floor other than the copy bandwidth.
    pub fn report_with_floor(&self, kernel: &str, shape: &str, bytes: f64, us: f64, floor: f64) {
        print(kernel, shape, bytes, us, floor, "");
    }

    /// The rate of one operation per lane and clock.
    pub fn operations_per_us(&self) -> f64 {
        let khz = self.gpu.context().attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE).unwrap();
        self.gpu.sm_count() as f64 * 128.0 * f64::from(khz) / 1e3
    }

    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, n: usize) -> CudaSlice<T> {
        self.gpu.stream().alloc_zeros(n).unwrap()
    }

    pub fn upload<T: DeviceRepr>(&self, data: &[T]) -> CudaSlice<T> {
        self.gpu.stream().clone_htod(data).unwrap()
    }

    pub fn download<T: DeviceRepr>(&self, slice: &CudaSlice<T>) -> Vec<T> {
        let data = self.gpu.stream().clone_dtoh(slice).unwrap();
        self.gpu.stream().synchronize().unwrap();
        data
    }

    pub fn pointer<T>(&self, slice: &CudaSlice<T>) -> DevicePtr<T> {
        let address = slice.device_ptr(self.gpu.stream()).0; // 0 for no elements
        DevicePtr::new(address).unwrap_or(DevicePtr::dangling())
    }
}

/// Prints the JSON line of a measurement, with `more` members.
fn print(kernel: &str, shape: &str, bytes: f64, us: f64, floor: f64, more: &str) {
    println!(
        "{{\"kernel\":\"{kernel}\",\"shape\":\"{shape}\",\"bytes\":{bytes},\"floor_us\":{floor:.3},\"us\":{us:.3},\
         \"to_floor\":{:.3}{more}}}",
        us / floor
    );
}
