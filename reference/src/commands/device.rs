//! The options that select the device of a command.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use bytesize::ByteSize;
use clap::Args;
use kv_reference::compare::OnGpu;
#[cfg(feature = "cuda")]
use kv_reference::device::{Gpu, unsupported};
use kv_reference::{Error, Result};

/// The options that select the device.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to run: auto takes the first GPU, or the CPU if there is none
    #[arg(long, value_name = "auto|cpu|cuda[:N]", default_value_t = Choice::Auto)]
    device: Choice,
    /// Limit of GPU memory for weights, caches, steps and prompts, such as 24GiB: more is an error [default:
    /// all]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    device_memory: Option<ByteSize>,
}

/// Parses a number of bytes.
fn size(text: &str) -> std::result::Result<ByteSize, &'static str> {
    text.parse().map_err(|_| "must be a size, such as 24GiB")
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
    /// The GPU to run on; `None` for the CPU.
    #[cfg(feature = "cuda")]
    pub fn gpu(&self) -> Result<Option<Gpu>> {
        let most =
            self.device_memory.map_or(usize::MAX, |most| usize::try_from(most.0).unwrap_or(usize::MAX));
        let gpu = match self.device {
            Choice::Auto => Gpu::open_within(0, most).ok(),
            Choice::Cpu => None,
            Choice::Cuda(ordinal) => Some(Gpu::open_within(ordinal, most)?),
        };
        if gpu.is_none() && self.device_memory.is_some() {
            return Err(Error::argument("--device-memory limits a GPU, but the command runs on the CPU"));
        }
        Ok(gpu)
    }

    /// The GPU for the methods that it supports, with prefill chunks of `chunk` tokens, or all of `longest`;
    /// the others run on the CPU unless a GPU was requested.
    pub fn gpu_for(&self, chunk: Option<NonZeroUsize>, longest: usize) -> Result<Option<OnGpu>> {
        let gpu = self.on_gpu(chunk.map_or(longest, NonZeroUsize::get))?;
        if gpu.is_none() && chunk.is_some() {
            return Err(Error::argument("--chunk is for prompts on a GPU: on the CPU they are exact"));
        }
        Ok(gpu)
    }

    #[cfg(feature = "cuda")]
    fn on_gpu(&self, chunk: usize) -> Result<Option<OnGpu>> {
        let others_on_cpu = self.is_auto();
        Ok(self.gpu()?.map(|gpu| OnGpu { gpu: Arc::new(gpu), chunk, others_on_cpu }))
    }

    #[cfg(not(feature = "cuda"))]
    fn on_gpu(&self, _chunk: usize) -> Result<Option<OnGpu>> {
        self.check()?;
        Ok(None)
    }

    /// Whether to run on the CPU after this error: the GPU does not support the model or the method, and was
    /// not requested.
    #[cfg(feature = "cuda")]
    pub fn falls_back(&self, error: &Error) -> bool {
        self.is_auto() && unsupported(error)
    }

    /// Whether unsupported methods run on the CPU.
    #[cfg(feature = "cuda")]
    pub fn is_auto(&self) -> bool {
        self.device == Choice::Auto
    }

    /// Rejects a GPU.
    #[cfg(not(feature = "cuda"))]
    pub fn check(&self) -> Result<()> {
        match self.device {
            Choice::Auto | Choice::Cpu if self.device_memory.is_none() => Ok(()),
            _ => Err(Error::argument("this `kv` was built without the feature `cuda`")),
        }
    }
}
