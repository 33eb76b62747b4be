//! Exchanges through memory of the host.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{DriverError, result};
use kv_gpu::DevicePtr;

use super::{Communicator, Shard};
use crate::{Error, Result};

/// Exchanges through memory of the host, for ranks that are threads of a process: slow, but ranks may share a
/// device, and nothing needs to be installed.
pub struct HostMemory {
    shard: Shard,
    meeting: Arc<Meeting>,
}

/// Where ranks meet to exchange rows.
struct Meeting {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    given: Vec<Option<Vec<f32>>>, // of each rank that has arrived
    taken: usize,                 // ranks that have read them all
    aborted: bool,
}

impl HostMemory {
    /// A communicator for each of `ranks` ranks.
    #[must_use]
    pub fn ranks(ranks: usize) -> Vec<Self> {
        let state = State { given: vec![None; ranks], ..State::default() };
        let meeting = Arc::new(Meeting { ranks, state: Mutex::new(state), changed: Condvar::new() });
        (0..ranks).map(|rank| Self { shard: Shard { rank, ranks }, meeting: meeting.clone() }).collect()
    }

    /// Gives this rank's floats, and replaces them by `join` of those of all ranks.
    ///
    /// # Safety
    /// As [`Communicator::sum`].
    unsafe fn exchange(
        &self,
        stream: CUstream,
        data: DevicePtr<f32>,
        len: usize,
        join: impl Fn(&[Vec<f32>]) -> Vec<f32>,
    ) -> Result<()> {
        let mut own = vec![0.0_f32; len];
        // SAFETY: the caller's contract: `len` floats are there, and work on the stream may read and write
        // them.
        unsafe {
            result::memcpy_dtoh_async(&mut own, data.address(), stream)
                .and_then(|()| result::stream::synchronize(stream))
                .map_err(failed)?;
        }
        let joined = join(&self.meeting.exchange(self.shard.rank, own)?);
        // SAFETY: as above; the floats live until the copy has ended.
        unsafe {
            result::memcpy_htod_async(data.address(), &joined, stream)
                .and_then(|()| result::stream::synchronize(stream))
                .map_err(failed)
        }
    }
}

fn failed(e: DriverError) -> Error {
    Error::driver("exchange rows with other ranks", e)
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `waits` holds.
    fn wait(&self, waits: impl Fn(&State) -> bool) -> Result<MutexGuard<'_, State>> {
        let state = self.changed.wait_while(self.lock(), |state| !state.aborted && waits(state));
        let state = state.unwrap_or_else(PoisonError::into_inner);
        match state.aborted {
            true => Err(Error::Ranks("another rank has failed".into())),
            false => Ok(state),
        }
    }

    /// What every rank has given.
    fn exchange(&self, rank: usize, own: Vec<f32>) -> Result<Vec<Vec<f32>>> {
        // Not before all ranks have those of the round before.
        self.wait(|state| state.given[rank].is_some())?.given[rank] = Some(own);
        self.changed.notify_all();
        let mut state = self.wait(|state| state.given.iter().any(Option::is_none))?;
        let all = state.given.iter().flatten().cloned().collect();
        state.taken += 1;
        if state.taken == self.ranks {
            *state = State { given: vec![None; self.ranks], ..State::default() };
        }
        drop(state);
        self.changed.notify_all();
        Ok(all)
    }
}

impl Communicator for HostMemory {
    fn shard(&self) -> Shard {
        self.shard
    }

    unsafe fn sum(&self, stream: CUstream, data: DevicePtr<f32>, len: usize) -> Result<()> {
        let sum = |all: &[Vec<f32>]| {
            let mut sums = vec![0.0; len];
            all.iter().for_each(|given| sums.iter_mut().zip(given).for_each(|(sum, x)| *sum += x));
            sums
        };
        // SAFETY: the caller's contract.
        unsafe { self.exchange(stream, data, len, sum) }
    }

    unsafe fn gather(&self, stream: CUstream, data: DevicePtr<f32>, rows: usize, len: usize) -> Result<()> {
        let ranks = self.shard.ranks;
        let gather = |all: &[Vec<f32>]| {
            let of_rank = |rank: usize, row| &all[rank][row * len..][Shard { rank, ranks }.of(len)];
            (0..rows).flat_map(|row| (0..ranks).flat_map(move |rank| of_rank(rank, row))).copied().collect()
        };
        // SAFETY: the caller's contract.
        unsafe { self.exchange(stream, data, rows * len, gather) }
    }

    fn is_capturable(&self) -> bool {
        false
    }

    fn abort(&self) {
        self.meeting.lock().aborted = true;
        self.meeting.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_what_all_have_given_in_every_round() {
        const ROUNDS: usize = 100;
        let ranks = HostMemory::ranks(4);
        std::thread::scope(|scope| {
            for HostMemory { shard, meeting } in &ranks {
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let all =
                            meeting.exchange(shard.rank, vec![(10 * round + shard.rank) as f32]).unwrap();
                        let expected: Vec<_> = (0..4).map(|rank| vec![(10 * round + rank) as f32]).collect();
                        assert_eq!(all, expected);
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_fails_ends_the_others() {
        let mut ranks = HostMemory::ranks(3);
        let failing = ranks.pop().unwrap();
        std::thread::scope(|scope| {
            let waiting: Vec<_> = ranks
                .iter()
                .map(|rank| scope.spawn(|| rank.meeting.exchange(rank.shard.rank, vec![1.0])))
                .collect();
            failing.abort();
            for end in waiting {
                assert!(matches!(end.join().unwrap(), Err(Error::Ranks(_))));
            }
        });
    }
}
