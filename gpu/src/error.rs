//! What can fail between a shape and a finished launch.

use std::fmt;
use std::path::PathBuf;

use cudarc::driver::DriverError;

/// An error of compilation, of the driver, or of an argument.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// There is no CUDA driver library on this machine.
    NoDriver,
    /// There is no NVRTC library on this machine.
    NoNvrtc,
    /// A kernel does not compile.
    Compile {
        /// The kernel, its shape and the architecture.
        program: String,
        /// The compiler's messages.
        log: String,
    },
    /// The driver refused an operation.
    Driver {
        /// The operation and its shape.
        operation: String,
        /// The driver's error.
        source: DriverError,
    },
    /// No kernel supports a shape.
    Unsupported {
        /// The operation and the shape.
        operation: String,
        /// Which shapes the kernels support.
        supported: &'static str,
    },
    /// An argument is out of range, or does not fit the shape or the other arguments.
    Argument {
        /// The operation.
        operation: &'static str,
        /// Which argument is wrong, and why.
        problem: String,
    },
    /// A folder cannot hold compiled kernels.
    CacheFolder {
        /// The folder.
        folder: PathBuf,
        /// Why it cannot: it is not private, or the system's error.
        problem: String,
    },
    /// The device computed a wrong result.
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
            Self::Compile { program, log } => write!(f, "{program} does not compile: {log}"),
            Self::Driver { operation, source } => write!(f, "{operation}: {source}"),
            Self::Unsupported { operation, supported } => write!(f, "{operation}: only {supported}"),
            Self::Argument { operation, problem } => write!(f, "{operation}: {problem}"),
            Self::CacheFolder { folder, problem } => {
                write!(f, "kernel cache {}: {problem}", folder.display())
            }
            Self::WrongResult { operation, index } => write!(f, "{operation}: element {index} is wrong"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Names the operation that a driver error came from.
    pub(crate) fn of(operation: impl fmt::Display) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Driver { operation: operation.to_string(), source }
    }
}
