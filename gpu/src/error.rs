use std::fmt;

use cudarc::driver::DriverError;

/// What went wrong on the way to the device.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// There is no CUDA driver library on this machine.
    NoDriver,
    /// There is no NVRTC library on this machine.
    NoNvrtc,
    /// A kernel does not compile.
    Compile {
        /// The kernel.
        kernel: &'static str,
        /// What the compiler said.
        log: String,
    },
    /// The driver refused an operation.
    Driver {
        /// The operation.
        operation: &'static str,
        /// What the driver said.
        source: DriverError,
    },
    /// The device computed something wrong.
    WrongResult {
        /// The operation.
        operation: &'static str,
        /// Index of the first wrong element.
        index: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver => write!(f, "no CUDA driver here: install an NVIDIA driver (libcuda)"),
            Self::NoNvrtc => {
                write!(f, "no NVRTC here: install the CUDA toolkit, or the wheel nvidia-cuda-nvrtc")
            }
            Self::Compile { kernel, log } => write!(f, "kernel {kernel} does not compile: {log}"),
            Self::Driver { operation, source } => write!(f, "{operation}: {source}"),
            Self::WrongResult { operation, index } => write!(f, "{operation}: element {index} is wrong"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Names the operation that a driver error came from.
    pub(crate) fn of(operation: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Driver { operation, source }
    }
}
