//! A rank and its device.

use std::sync::Arc;

use kv_device::Gpu;

use super::{Communicator, HostMemory, Shard};
use crate::{Error, Result};

/// What a rank computes with.
#[derive(Clone)]
pub struct Rank {
    /// Its device, with a stream that no other rank uses.
    pub gpu: Arc<Gpu>,
    /// Its exchanges with the others; none if it is alone.
    pub communicator: Option<Arc<dyn Communicator>>,
}

/// How ranks exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exchange {
    /// By NCCL, between devices: the feature `nccl`.
    #[default]
    Nccl,
    /// Through [`HostMemory`]: slow, but ranks may share a device, and nothing needs to be installed.
    HostMemory,
}

impl Rank {
    /// The only rank.
    #[must_use]
    pub const fn alone(gpu: Arc<Gpu>) -> Self {
        Self { gpu, communicator: None }
    }

    /// Its part of the model.
    #[must_use]
    pub fn shard(&self) -> Shard {
        self.communicator.as_ref().map_or(Shard::WHOLE, |communicator| communicator.shard())
    }

    /// Opens a device for each rank, by number, with a limit of `bytes` each as in [`Gpu::open_within`], and
    /// connects them. A single device exchanges nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] for no device, and for one that is given twice, which only [`HostMemory`] takes;
    /// [`Error::Ranks`] without NCCL; [`Error::Rank`] with the number of the rank whose device does not open,
    /// [`Error::Device`] if it is the only one.
    pub fn open(devices: &[usize], exchange: Exchange, bytes: usize) -> Result<Vec<Self>> {
        match *devices {
            [] => return Err(Error::argument("no device")),
            [device] => return Ok(vec![Self::alone(Arc::new(Gpu::open_within(device, bytes)?))]),
            _ => exchange.check(devices)?,
        }
        let open = |(rank, &device): (usize, &usize)| {
            let gpu = Gpu::open_within(device, bytes).map(Arc::new);
            gpu.map_err(|e| Error::Rank { rank, source: Box::new(Error::from(e)) })
        };
        exchange.connect(devices.iter().enumerate().map(open).collect::<Result<_>>()?)
    }
}

impl Exchange {
    /// Rejects devices that cannot exchange so, before they are opened.
    fn check(self, devices: &[usize]) -> Result<()> {
        if self == Self::HostMemory {
            return Ok(());
        }
        let twice = devices.iter().enumerate().find(|(i, device)| devices[..*i].contains(device));
        match twice {
            Some((_, device)) => {
                Err(Error::Argument(format!("device {device} is given twice: NCCL takes a device once")))
            }
            #[cfg(feature = "nccl")]
            None => super::nccl::check(),
            #[cfg(not(feature = "nccl"))]
            None => Err(without_nccl()),
        }
    }

    fn connect(self, gpus: Vec<Arc<Gpu>>) -> Result<Vec<Rank>> {
        match self {
            Self::HostMemory => Ok(ranks(HostMemory::ranks(gpus.len()), gpus)),
            #[cfg(feature = "nccl")]
            Self::Nccl => {
                let devices: Vec<&Gpu> = gpus.iter().map(|gpu| &**gpu).collect();
                Ok(ranks(super::Nccl::ranks(&devices)?, gpus))
            }
            #[cfg(not(feature = "nccl"))]
            Self::Nccl => Err(without_nccl()),
        }
    }
}

fn ranks<C: Communicator + 'static>(communicators: Vec<C>, gpus: Vec<Arc<Gpu>>) -> Vec<Rank> {
    let rank = |(gpu, communicator)| {
        let communicator: Arc<dyn Communicator> = Arc::new(communicator);
        Rank { gpu, communicator: Some(communicator) }
    };
    gpus.into_iter().zip(communicators).map(rank).collect()
}

#[cfg(not(feature = "nccl"))]
fn without_nccl() -> Error {
    let what = "devices exchange by NCCL, which this build lacks: build it with `--features nccl`";
    Error::Ranks(what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_cannot_exchange_are_refused_before_they_are_opened() {
        let refused = |devices: &[usize], exchange| {
            Rank::open(devices, exchange, usize::MAX).map(drop).unwrap_err().to_string()
        };
        assert_eq!(refused(&[], Exchange::HostMemory), "no device");
        let twice = refused(&[1000, 1001, 1000], Exchange::Nccl);
        assert_eq!(twice, "device 1000 is given twice: NCCL takes a device once");
        let device = refused(&[1000, 1000], Exchange::HostMemory);
        assert!(device.starts_with("rank 0: "), "{device}");
        let nccl = refused(&[1000, 1001], Exchange::Nccl);
        assert!(nccl.contains("NCCL") || nccl.starts_with("rank 0: "), "{nccl}");
        assert!(cfg!(feature = "nccl") || nccl.contains("`--features nccl`"), "{nccl}");
    }
}
