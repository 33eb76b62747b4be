//! A small kernel that shows whether compiler, driver and device work together.

use cudarc::driver::DevicePtr as _;

use crate::compile::source;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::{Device, Error, Program};

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    squares: DevicePtr<u32>,
    n: u32,
}

/// The kernel of [`self_test`], for [`compile`](crate::compile): it shows without a device whether NVRTC
/// works.
#[must_use]
pub fn self_test_program() -> Program {
    Program::new(source!("self_test.cu"), &[])
}

/// Compiles and launches a small kernel and reads its result, to check that driver, NVRTC and device work
/// together.
///
/// # Errors
/// The first failure; [`Error::WrongResult`] if the device computes a wrong result.
pub fn self_test(device: &Device) -> Result<(), Error> {
    const N: u32 = 1000; // not a multiple of the block
    let kernel = device.kernel(&self_test_program(), "squares", 0)?;
    let stream = device.stream();
    let out = stream.alloc_zeros::<u32>(N as usize).map_err(Error::of("allocate"))?;
    let (address, _order) = out.device_ptr(stream);
    let squares = DevicePtr::new(address).unwrap_or(DevicePtr::dangling());
    let grid = Operation("self test").grid(&[("blocks", N.div_ceil(128) as usize)])?;
    // SAFETY: `squares` writes n elements, which `out` has.
    unsafe { kernel.launch(stream.cu_stream(), grid, 128, false, &Arguments { squares, n: N }) }?;
    let squares = stream.clone_dtoh(&out).map_err(Error::of("copy to host"))?;
    match squares.iter().zip(0_u32..).position(|(&square, i)| square != i * i) {
        Some(index) => Err(Error::WrongResult { operation: "squares", index }),
        None => Ok(()),
    }
}
