use cudarc::driver::{LaunchConfig, PushKernelArg};

use crate::{Device, Error};

/// Compiles, launches and reads back one small kernel: whether driver, NVRTC and device work together.
///
/// # Errors
/// Whatever fails first, by name; [`Error::WrongResult`] when the device answers wrongly.
pub fn self_test(device: &Device) -> Result<(), Error> {
    const N: u32 = 1000; // not a multiple of the block
    let function = device.function("self_test", "squares")?;
    let stream = device.stream();
    let mut out = stream.alloc_zeros::<u32>(N as usize).map_err(Error::of("allocate"))?;
    let mut launch = stream.launch_builder(&function);
    launch.arg(&mut out).arg(&N);
    // SAFETY: `squares` takes a pointer to n numbers and n; `out` has N of them and the kernel writes none past n.
    unsafe { launch.launch(LaunchConfig::for_num_elems(N)) }.map_err(Error::of("launch squares"))?;
    let squares = stream.clone_dtoh(&out).map_err(Error::of("copy to host"))?;
    match squares.iter().zip(0_u32..).position(|(&square, i)| square != i * i) {
        Some(index) => Err(Error::WrongResult { operation: "squares", index }),
        None => Ok(()),
    }
}
