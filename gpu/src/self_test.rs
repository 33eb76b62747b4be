use cudarc::driver::DevicePtr as _;

use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, KERNELS, Program};

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    squares: DevicePtr<u32>,
    n: u32,
}

/// The program of [`self_test`]: to see without a device whether NVRTC works.
#[must_use]
pub fn self_test_program() -> Program {
    Program::new("self_test", KERNELS.self_test, &[])
}

/// Compiles, launches and reads back one small kernel: whether driver, NVRTC and device work together.
///
/// # Errors
/// Whatever fails first, by name; [`Error::WrongResult`] when the device answers wrongly.
pub fn self_test(device: &Device) -> Result<(), Error> {
    const N: u32 = 1000; // not a multiple of the block
    let kernel = device.kernel(&self_test_program(), "squares", 0)?;
    let stream = device.stream();
    let out = stream.alloc_zeros::<u32>(N as usize).map_err(Error::of("allocate"))?;
    let (address, _order) = out.device_ptr(stream);
    let squares = DevicePtr::new(address).unwrap_or(DevicePtr::dangling());
    let grid = Operation("self test").grid(&[("blocks", N.div_ceil(128) as usize)])?;
    // SAFETY: `squares` writes n numbers, for which `out` has room.
    unsafe { kernel.launch(stream.cu_stream(), grid, 128, false, &Arguments { squares, n: N }) }?;
    let squares = stream.clone_dtoh(&out).map_err(Error::of("copy to host"))?;
    match squares.iter().zip(0_u32..).position(|(&square, i)| square != i * i) {
        Some(index) => Err(Error::WrongResult { operation: "squares", index }),
        None => Ok(()),
    }
}
