//! Where a command runs.

use std::fmt;
use std::str::FromStr;

use clap::Args;
#[cfg(feature = "cuda")]
use kv_reference::device::{Gpu, unsupported};
use kv_reference::{Error, Result};

/// Which device.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to run: auto takes the first GPU, or the CPU where there is none
    #[arg(long, value_name = "auto|cpu|cuda[:N]", default_value_t = Choice::Auto)]
    device: Choice,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Choice {
    Auto,
    Cpu,
    Cuda(usize),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let ordinal = |text: &str| text.parse().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(ordinal)
                .map(Self::Cuda)
                .ok_or_else(|| "must be auto, cpu, cuda or cuda:N".into()),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl DeviceArgs {
    /// The GPU to run on; none for the CPU.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Result<Option<Gpu>> {
        match self.device {
            Choice::Auto => Ok(Gpu::open(0).ok()),
            Choice::Cpu => Ok(None),
            Choice::Cuda(ordinal) => Gpu::open(ordinal).map(Some),
        }
    }

    /// Whether to run on the CPU after this error: the GPU does not take the model or the method, and nobody
    /// has asked for it.
    #[cfg(feature = "cuda")]
    pub fn falls_back(&self, error: &Error) -> bool {
        self.is_auto() && unsupported(error)
    }

    /// Whether what the GPU does not take runs on the CPU.
    #[cfg(feature = "cuda")]
    pub fn is_auto(&self) -> bool {
        self.device == Choice::Auto
    }

    /// Refuses a GPU.
    #[cfg(not(feature = "cuda"))]
    pub fn check(&self) -> Result<()> {
        match self.device {
            Choice::Auto | Choice::Cpu => Ok(()),
            Choice::Cuda(_) => Err(Error::argument("this `kv` was built without the feature `cuda`")),
        }
    }
}
