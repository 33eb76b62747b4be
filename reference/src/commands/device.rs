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

/// Where a command runs.
#[cfg(feature = "cuda")]
pub enum Chosen {
    Gpu(Gpu),
    /// The reason if `--device auto` takes it.
    Cpu {
        note: Option<String>,
    },
}

/// Says why `--device auto` takes the CPU.
fn on_cpu(reason: &impl fmt::Display) -> String {
    format!("--device auto takes the CPU: {reason}")
}

impl DeviceArgs {
    /// The GPU or the CPU.
    #[cfg(feature = "cuda")]
    pub fn choose(&self) -> Result<Chosen> {
        let most =
            self.device_memory.map_or(usize::MAX, |most| usize::try_from(most.0).unwrap_or(usize::MAX));
        let note = match self.device {
            Choice::Auto => match Gpu::open_within(0, most) {
                Ok(gpu) => return Ok(Chosen::Gpu(gpu)),
                Err(e) => Some(on_cpu(&e)),
            },
            Choice::Cpu => None,
            Choice::Cuda(ordinal) => return Gpu::open_within(ordinal, most).map(Chosen::Gpu),
        };
        if self.device_memory.is_some() {
            let reason = note.as_deref().unwrap_or("the command runs on the CPU");
            return Err(Error::Argument(format!("--device-memory limits a GPU, but {reason}")));
        }
        Ok(Chosen::Cpu { note })
    }

    /// The GPU for the methods that it supports, with prefill chunks of `chunk` tokens, or all of `longest`,
    /// or why the CPU is taken; the other methods run on the CPU unless a GPU was requested.
    pub fn gpu_for(
        &self,
        chunk: Option<NonZeroUsize>,
        longest: usize,
    ) -> Result<(Option<OnGpu>, Option<String>)> {
        let (gpu, note) = self.on_gpu(chunk.map_or(longest, NonZeroUsize::get))?;
        if gpu.is_none() && chunk.is_some() {
            return Err(Error::argument("--chunk is for prompts on a GPU: on the CPU they are exact"));
        }
        Ok((gpu, note))
    }

    #[cfg(feature = "cuda")]
    fn on_gpu(&self, chunk: usize) -> Result<(Option<OnGpu>, Option<String>)> {
        Ok(match self.choose()? {
            Chosen::Gpu(gpu) => {
                let others_on_cpu = self.device == Choice::Auto;
                (Some(OnGpu { gpu: Arc::new(gpu), chunk, others_on_cpu }), None)
            }
            Chosen::Cpu { note } => (None, note),
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn on_gpu(&self, _chunk: usize) -> Result<(Option<OnGpu>, Option<String>)> {
        Ok((None, self.cpu()?))
    }

    /// Why the CPU runs what the GPU does not support; the error itself if the GPU was requested, or if the
    /// CPU would not do better.
    #[cfg(feature = "cuda")]
    pub fn fall_back(&self, error: Error) -> Result<String> {
        match self.device == Choice::Auto && unsupported(&error) {
            true => Ok(on_cpu(&error)),
            false => Err(error),
        }
    }

    /// The CPU, with the reason if `--device auto` takes it; a GPU is rejected.
    #[cfg(not(feature = "cuda"))]
    pub fn cpu(&self) -> Result<Option<String>> {
        const WITHOUT: &str = "this `kv` was built without the feature `cuda`";
        match self.device {
            Choice::Auto if self.device_memory.is_none() => Ok(Some(on_cpu(&WITHOUT))),
            Choice::Cpu if self.device_memory.is_none() => Ok(None),
            _ => Err(Error::argument(WITHOUT)),
        }
    }
}
