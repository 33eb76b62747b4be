//! The copy rate of a device: the floor of what reads memory.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use kv_device::Gpu;
use kv_reference::{Error, Result};

/// Copy rate within device memory in bytes per second, reads and writes both counted.
pub fn copy_rate(gpu: &Gpu) -> Result<f64> {
    const BYTES: usize = 1 << 30;
    let named = |operation: &'static str| {
        move |source: DriverError| {
            Error::from(kv_gpu::Error::Driver { operation: operation.to_owned(), source })
        }
    };
    let stream = gpu.device().stream();
    let from = stream.alloc_zeros::<u8>(BYTES).map_err(named("allocate"))?;
    let mut to = stream.alloc_zeros::<u8>(BYTES).map_err(named("allocate"))?;
    let event = || stream.record_event(Some(CU_EVENT_DEFAULT)).map_err(named("record an event"));
    let times = (0..9).map(|_| {
        let start = event()?;
        stream.memcpy_dtod(&from, &mut to).map_err(named("copy"))?;
        start.elapsed_ms(&event()?).map_err(named("time a copy"))
    });
    let mut times = times.collect::<Result<Vec<f32>>>()?;
    times.sort_by(f32::total_cmp);
    Ok(2e3 * BYTES as f64 / f64::from(times[times.len() / 2]))
}
