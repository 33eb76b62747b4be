//! The options that select the device of a command.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
#[cfg(feature = "cuda")]
use kv_llama_gpu::ranks::{self, Rank, Shard};
use kv_methods::Method;
use kv_model::Config;
use kv_reference::compare::{OnGpu, Placed};
#[cfg(feature = "cuda")]
use kv_reference::device;
use kv_reference::{Error, Result};

use super::no_effect;

/// What a build without GPUs says of them.
#[cfg(not(feature = "cuda"))]
pub const WITHOUT_CUDA: &str = "this `kv` was built without the feature `cuda`";

/// The options that select the device.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to run: auto takes the first GPU, or the CPU if there is none; several GPUs, such as cuda:0,1,
    /// each hold a part of the model
    #[arg(long, value_name = "auto|cpu|cuda[:N[,N...]]", default_value_t = Choice::Auto)]
    device: Choice,
    /// Limit of the memory of a GPU for weights, caches, steps and prompts, such as 24GiB: more is an error
    /// [default: all]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    device_memory: Option<ByteSize>,
    /// How several GPUs exchange [default: nccl]
    #[arg(long, value_enum, value_name = "HOW")]
    exchange: Option<Exchange>,
}

/// How the parts of a model exchange.
#[derive(Clone, Copy, ValueEnum)]
enum Exchange {
    /// By NCCL
    Nccl,
    /// Through memory of the host: slow, but without NCCL, and a GPU may hold several parts, as in cuda:0,0
    Host,
}

/// Parses a number of bytes.
fn size(text: &str) -> std::result::Result<ByteSize, &'static str> {
    text.parse().map_err(|_| "must be a size, such as 24GiB")
}

/// Devices.
#[derive(Clone, PartialEq, Eq)]
pub enum Choice {
    Auto,
    Cpu,
    /// Their numbers, at least one.
    Cuda(Vec<usize>),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers = |list: &str| list.split(',').map(|number| number.parse().ok()).collect();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(vec![0])),
            _ => text
                .strip_prefix("cuda:")
                .and_then(numbers)
                .map(Self::Cuda)
                .ok_or_else(|| "must be auto, cpu, cuda, cuda:N or a list, such as cuda:0,1".into()),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", numbers.join(","))
            }
        }
    }
}

/// Where a command runs.
#[cfg(feature = "cuda")]
enum Chosen {
    Gpus(Vec<Rank>),
    /// The reason if `--device auto` takes it.
    Cpu {
        note: Option<String>,
    },
}

/// Names the way to do without NCCL in an error about it.
#[cfg(feature = "cuda")]
fn without_nccl(e: kv_llama_gpu::Error) -> Error {
    match e {
        kv_llama_gpu::Error::Ranks(what) => {
            Error::Argument(format!("{what}; --exchange host does without, but slowly"))
        }
        e => e.into(),
    }
}

/// Says why `--device auto` takes the CPU.
fn on_cpu(reason: &impl fmt::Display) -> String {
    format!("--device auto takes the CPU: {reason}")
}

impl DeviceArgs {
    /// The GPUs or the CPU.
    #[cfg(feature = "cuda")]
    fn choose(&self) -> Result<Chosen> {
        let most =
            self.device_memory.map_or(usize::MAX, |most| usize::try_from(most.0).unwrap_or(usize::MAX));
        let exchange = match self.exchange.unwrap_or(Exchange::Nccl) {
            Exchange::Nccl => ranks::Exchange::Nccl,
            Exchange::Host => ranks::Exchange::HostMemory,
        };
        let note = match &self.device {
            Choice::Auto => match Rank::open(&[0], exchange, most) {
                Ok(gpu) => return Ok(Chosen::Gpus(gpu)),
                Err(e) => Some(on_cpu(&e)),
            },
            Choice::Cpu => None,
            Choice::Cuda(devices) => {
                return Ok(Chosen::Gpus(Rank::open(devices, exchange, most).map_err(without_nccl)?));
            }
        };
        if self.device_memory.is_some() {
            let reason = note.as_deref().unwrap_or("the command runs on the CPU");
            return Err(Error::Argument(format!("--device-memory limits a GPU, but {reason}")));
        }
        Ok(Chosen::Cpu { note })
    }

    /// Devices, each with a part of the model.
    pub const fn count(&self) -> usize {
        match &self.device {
            Choice::Auto | Choice::Cpu => 1,
            Choice::Cuda(devices) => devices.len(),
        }
    }

    /// Rejects an exchange where there is none.
    fn check_exchange(&self) -> Result<()> {
        match self.exchange.is_some() && self.count() == 1 {
            true => Err(no_effect("--exchange", "on one device")),
            false => Ok(()),
        }
    }

    /// Methods where they run, or the default ones of `kv compare`, and the GPUs for them with prefill chunks
    /// of `chunk` tokens. What GPUs do not support is refused before they are opened if all must run there.
    #[cfg(feature = "cuda")]
    pub fn place(&self, config: &Config, methods: Option<&[Method]>, chunk: usize) -> Result<Placement> {
        self.check_exchange()?;
        if let Choice::Cuda(devices) = &self.device {
            let shard = Shard::new(0, devices.len())?;
            kv_llama_gpu::Weights::check(&shard.config(config)?)?;
            let mut methods = methods.into_iter().flatten();
            methods.try_for_each(|method| device::fitted(method, config, shard).map(drop))?;
        }
        let (gpu, note) = match self.choose()? {
            Chosen::Gpus(ranks) => {
                let others_on_cpu = self.device == Choice::Auto;
                (Some(OnGpu { ranks, chunk, others_on_cpu }), None)
            }
            Chosen::Cpu { note } => (None, note),
        };
        Placement::new(config, methods, gpu, note)
    }

    /// Methods on the CPU, or the default ones of `kv compare`.
    #[cfg(not(feature = "cuda"))]
    pub fn place(&self, config: &Config, methods: Option<&[Method]>, _chunk: usize) -> Result<Placement> {
        self.check_exchange()?;
        Placement::new(config, methods, None, self.cpu()?)
    }

    /// The CPU, with the reason if `--device auto` takes it; a GPU is rejected.
    #[cfg(not(feature = "cuda"))]
    fn cpu(&self) -> Result<Option<String>> {
        match self.device {
            Choice::Auto if self.device_memory.is_none() => Ok(Some(on_cpu(&WITHOUT_CUDA))),
            Choice::Cpu if self.device_memory.is_none() => Ok(None),
            _ => Err(Error::argument(WITHOUT_CUDA)),
        }
    }
}

/// Methods where they run.
pub struct Placement {
    pub placed: Placed,
    pub gpu: Option<OnGpu>,
    /// Why `--device auto` takes the CPU.
    pub note: Option<String>,
}

impl Placement {
    fn new(
        config: &Config,
        methods: Option<&[Method]>,
        gpu: Option<OnGpu>,
        note: Option<String>,
    ) -> Result<Self> {
        let placed = match methods {
            Some(methods) => Placed::new(config, methods, gpu.as_ref())?,
            None => Placed::defaults(config, gpu.as_ref())?,
        };
        Ok(Self { placed, gpu, note })
    }

    /// Rejects prefill chunks on the CPU.
    pub fn check_chunk(&self, chunk: Option<NonZeroUsize>) -> Result<()> {
        match self.gpu.is_none() && chunk.is_some() {
            true => Err(Error::argument("--chunk is for prompts on a GPU: on the CPU they are exact")),
            false => Ok(()),
        }
    }
}
