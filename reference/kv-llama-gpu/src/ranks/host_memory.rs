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

    /// Replaces the numbers of all ranks by their sums, in the order of the ranks.
    pub(super) fn sum_rows(&self, data: &mut [f32]) -> Result<()> {
        let all = self.meeting.exchange(self.shard.rank, data.to_vec())?;
        data.fill(0.0);
        all.iter().for_each(|given| data.iter_mut().zip(given).for_each(|(sum, x)| *sum += x));
        Ok(())
    }

    /// Completes rows (rows, len), of which each rank has its part.
    fn gather_rows(&self, data: &mut [f32], len: usize) -> Result<()> {
        let all = self.meeting.exchange(self.shard.rank, data.to_vec())?;
        for (rank, given) in all.iter().enumerate() {
            let part = Shard { rank, ..self.shard }.of(len);
            for (row, given) in data.chunks_exact_mut(len).zip(given.chunks_exact(len)) {
                row[part.clone()].copy_from_slice(&given[part.clone()]);
            }
        }
        Ok(())
    }

    /// Replaces floats on the device by what an exchange of them results in.
    ///
    /// # Safety
    /// As [`Communicator::sum`].
    unsafe fn on_device(
        stream: CUstream,
        data: DevicePtr<f32>,
        len: usize,
        exchange: impl FnOnce(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut rows = vec![0.0_f32; len];
        // SAFETY: the caller's contract: `len` floats are there, and work on the stream may read and write
        // them.
        unsafe {
            result::memcpy_dtoh_async(&mut rows, data.address(), stream)
                .and_then(|()| result::stream::synchronize(stream))
                .map_err(failed)?;
        }
        exchange(&mut rows)?;
        // SAFETY: as above; the floats live until the copy has ended.
        unsafe {
            result::memcpy_htod_async(data.address(), &rows, stream)
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
        // SAFETY: the caller's contract.
        unsafe { Self::on_device(stream, data, len, |data| self.sum_rows(data)) }
    }

    unsafe fn gather(&self, stream: CUstream, data: DevicePtr<f32>, rows: usize, len: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { Self::on_device(stream, data, rows * len, |data| self.gather_rows(data, len)) }
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

    /// Runs `body` for as many ranks at the same time.
    fn each<T: Send>(ranks: usize, body: impl Fn(&HostMemory) -> T + Sync) -> Vec<T> {
        let all = HostMemory::ranks(ranks);
        std::thread::scope(|scope| {
            let running: Vec<_> = all.iter().map(|memory| scope.spawn(|| body(memory))).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_get_the_same_sums_in_every_round() {
        const ROUNDS: usize = 100;
        for ranks in [1, 2, 4, 8] {
            let number = |rank: usize, round: usize, i: usize| ((10 * rank + i) as f32).sin() + round as f32;
            let sums = each(ranks, |memory| {
                let sum = |round| {
                    let mut data = [0, 1, 2].map(|i| number(memory.shard.rank, round, i));
                    memory.sum_rows(&mut data).unwrap();
                    data.map(f32::to_bits)
                };
                (0..ROUNDS).map(sum).collect::<Vec<_>>()
            });
            let in_order = |round, i| (0..ranks).fold(0.0, |sum, rank| sum + number(rank, round, i));
            let expected: Vec<[u32; 3]> =
                (0..ROUNDS).map(|round| [0, 1, 2].map(|i| in_order(round, i).to_bits())).collect();
            assert!(sums.iter().all(|sums| *sums == expected), "{ranks} ranks");
        }
    }

    #[test]
    fn all_ranks_get_the_rows_of_which_each_has_a_part() {
        const ROWS: usize = 3;
        for ranks in [1, 2, 4, 8] {
            let len = 5 * ranks;
            let whole: Vec<f32> = (0..ROWS * len).map(|i| i as f32).collect();
            let gathered = each(ranks, |memory| {
                let of_rank = |i: usize| memory.shard.of(len).contains(&(i % len));
                let mut data: Vec<f32> =
                    (0..ROWS * len).map(|i| if of_rank(i) { i as f32 } else { f32::NAN }).collect();
                memory.gather_rows(&mut data, len).unwrap();
                data
            });
            assert!(gathered.iter().all(|rows| *rows == whole), "{ranks} ranks");
        }
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
