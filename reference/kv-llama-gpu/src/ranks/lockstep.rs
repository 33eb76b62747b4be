//! Values of ranks that do the same.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread;

use super::ends::{End, Failed, wait};
use super::{Communicator, Rank, Shard};
use crate::Error;

/// A value of each rank, such as a [`Decoder`](crate::Decoder), made and used on a thread of its own: what is
/// called runs for all of them at the same time. The value of a single rank stays on the caller's thread.
///
/// A rank that fails ends the exchanges of the others, unless all fail alike, for example where no rank has
/// room for a token. It is named by the error of this call and of all that follow, within seconds, whatever
/// the others do.
///
/// # Examples
/// ```no_run
/// use std::sync::Arc;
/// use kv_device::{CacheShape, Plan};
/// use kv_gpu::Element;
/// use kv_llama_gpu::ranks::{Exchange, Lockstep, Rank};
/// use kv_llama_gpu::{CHUNK, Decoder, Error, WeightLayout, Weights};
/// # fn run(shape_of: fn(&kv_model::Config) -> CacheShape) -> Result<(), Error> {
///
/// let ranks = Rank::open(&[0, 1], Exchange::Nccl, usize::MAX)?;
/// let decoder = move |rank: &Rank| {
///     let (name, layout) = ("llama-3.1-70b", WeightLayout::Packed);
///     let weights = Weights::random_shard(&rank.gpu, name, Element::Bf16, layout, rank.shard())?;
///     let cache = Plan::Dense(None).build(&rank.gpu, &shape_of(&weights.config))?; // of the rank's heads
///     Decoder::of_rank(rank, Arc::new(weights), cache, 1)
/// };
/// let mut decoder = Lockstep::start(ranks, decoder)?;
/// let token = decoder.call(|decoder| {
///     decoder.prefill(&[vec![1, 2, 3]], CHUNK)?;
///     decoder.step()?;
///     decoder.next_tokens()
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Lockstep<T>(Members<T>);

/// An error that a call for ranks may end with: of this crate or of its user.
pub trait RankError: std::error::Error + From<Error> + Send + Sync + 'static {}

impl<E: std::error::Error + From<Error> + Send + Sync + 'static> RankError for E {}

enum Members<T> {
    Alone(T),
    Threads(Threads<T>),
}

type Job<T> = Box<dyn FnOnce(&mut T) + Send>;

struct Threads<T> {
    members: Vec<Member<T>>,
    communicators: Vec<Arc<dyn Communicator>>, // dropped after the values
    failed: Option<(usize, String)>,           // the rank and its error
}

/// A thread with the value of a rank. It ends when nobody can send it any more jobs.
struct Member<T> {
    jobs: mpsc::Sender<Job<T>>,
    thread: thread::JoinHandle<()>,
}

impl<T: 'static> Lockstep<T> {
    /// The value of a single rank.
    #[must_use]
    pub const fn alone(value: T) -> Self {
        Self(Members::Alone(value))
    }

    /// Makes the value of each rank, at the same time. All must succeed.
    ///
    /// # Errors
    /// That of `make` for a single rank, else [`Error::Rank`] with it; [`Error::Argument`] unless the ranks
    /// are all those of a model, in their order.
    pub fn start<E: RankError>(
        ranks: Vec<Rank>,
        make: impl Fn(&Rank) -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        if let [rank] = &ranks[..]
            && rank.communicator.is_none()
        {
            return make(rank).map(Self::alone);
        }
        let communicators: Vec<_> = ranks.iter().filter_map(|rank| rank.communicator.clone()).collect();
        let are = communicators.iter().map(|communicator| communicator.shard());
        if ranks.is_empty() || !are.eq((0..ranks.len()).map(|rank| Shard { rank, ranks: ranks.len() })) {
            return Err(Error::argument("ranks that are not all those of a model, in their order").into());
        }
        Threads::start(ranks, communicators, make).map(|threads| Self(Members::Threads(threads)))
    }

    /// Calls `f` for all ranks, and returns the results in their order.
    ///
    /// # Errors
    /// That of `f` for a single rank, else [`Error::Rank`] with it, or with the earlier error of a rank that
    /// has ended the exchanges.
    pub fn each<R, E>(
        &mut self,
        f: impl Fn(&mut T) -> Result<R, E> + Send + Sync + 'static,
    ) -> Result<Vec<R>, E>
    where
        R: Send + 'static,
        E: RankError,
    {
        match &mut self.0 {
            Members::Alone(value) => Ok(vec![f(value)?]),
            Members::Threads(threads) => threads.each(f),
        }
    }

    /// As [`Self::each`] where all ranks have the same result.
    ///
    /// # Errors
    /// As [`Self::each`].
    pub fn call<R, E>(&mut self, f: impl Fn(&mut T) -> Result<R, E> + Send + Sync + 'static) -> Result<R, E>
    where
        R: Send + 'static,
        E: RankError,
    {
        self.each(f)?.into_iter().next().ok_or_else(|| Error::argument("no rank").into())
    }

    /// The value, unless there are several.
    pub const fn as_alone(&mut self) -> Option<&mut T> {
        match &mut self.0 {
            Members::Alone(value) => Some(value),
            Members::Threads(_) => None,
        }
    }
}

impl<T: 'static> Threads<T> {
    /// Makes a value of each part.
    fn start<P, E>(
        parts: Vec<P>,
        communicators: Vec<Arc<dyn Communicator>>,
        make: impl Fn(&P) -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E>
    where
        P: Send + 'static,
        E: RankError,
    {
        let (make, (sender, ends)) = (Arc::new(make), mpsc::channel());
        let mut threads = Self { members: vec![], communicators, failed: None };
        for (rank, part) in parts.into_iter().enumerate() {
            let (jobs, received) = mpsc::channel();
            let (make, made) = (make.clone(), sender.clone());
            let run = move || work(rank, move || make(&part), made, &received);
            match thread::Builder::new().name(format!("rank {rank}")).spawn(run) {
                Ok(thread) => threads.members.push(Member { jobs, thread }),
                Err(e) => {
                    threads.abort();
                    threads.failed = Some((rank, e.to_string()));
                    return Err(Error::Ranks(format!("the thread of rank {rank}: {e}")).into());
                }
            }
        }
        drop(sender);
        threads.ended(&ends)?;
        Ok(threads)
    }

    fn each<R, E>(&mut self, f: impl Fn(&mut T) -> Result<R, E> + Send + Sync + 'static) -> Result<Vec<R>, E>
    where
        R: Send + 'static,
        E: RankError,
    {
        if let Some((rank, what)) = &self.failed {
            return Err(Error::Rank { rank: *rank, source: what.clone().into() }.into());
        }
        let (f, (sender, ends)) = (Arc::new(f), mpsc::channel());
        for (rank, member) in self.members.iter().enumerate() {
            let (f, ended) = (f.clone(), sender.clone());
            let job = move |value: &mut T| end(rank, &ended, || f(value));
            // It is received: the thread lives as long as the sender of its jobs.
            let _ = member.jobs.send(Box::new(job));
        }
        drop(sender);
        self.ended(&ends)
    }

    /// The results of a call, once all ranks have ended it.
    fn ended<R, E: RankError>(&mut self, ends: &mpsc::Receiver<End<R, E>>) -> Result<Vec<R>, E> {
        let Failed { rank, cause, alike } = match wait(ends, self.members.len(), || self.abort()) {
            Ok(results) => return Ok(results),
            Err(failed) => failed,
        };
        match cause {
            Ok(error) => {
                if !alike {
                    self.failed = Some((rank, error.to_string()));
                }
                Err(Error::Rank { rank, source: Box::new(error) }.into())
            }
            Err(panic) => {
                self.failed = Some((rank, "it has panicked".into()));
                resume_unwind(panic)
            }
        }
    }
}

impl<T> Threads<T> {
    /// Ends the exchanges of all ranks.
    fn abort(&self) {
        self.communicators.iter().for_each(|communicator| communicator.abort());
    }
}

impl<T> Drop for Threads<T> {
    fn drop(&mut self) {
        let threads: Vec<_> = self.members.drain(..).map(|member| member.thread).collect();
        // After a failure one may hang.
        if self.failed.is_none() {
            // Their panics have been passed on.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

/// The thread of a rank.
fn work<T, E>(
    rank: usize,
    make: impl FnOnce() -> Result<T, E>,
    made: mpsc::Sender<End<(), E>>,
    jobs: &mpsc::Receiver<Job<T>>,
) {
    let mut value = None;
    end(rank, &made, || make().map(|made| value = Some(made)));
    drop(made);
    if let Some(mut value) = value {
        jobs.iter().for_each(|job| job(&mut value));
    }
}

/// Calls `f` and says how it has ended.
fn end<R, E>(rank: usize, ended: &mpsc::Sender<End<R, E>>, f: impl FnOnce() -> Result<R, E>) {
    let end = catch_unwind(AssertUnwindSafe(f));
    // After the failure of another rank nobody may wait for it.
    let _ = ended.send((rank, end));
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    use super::super::HostMemory;
    use super::*;
    use crate::Result;

    /// What a failure may take.
    const SOON: Duration = Duration::from_secs(10);

    /// As many ranks, each with its communicator.
    fn start(ranks: usize, make: fn(&Arc<HostMemory>) -> Result<()>) -> Result<Lockstep<Arc<HostMemory>>> {
        let all: Vec<Arc<HostMemory>> = HostMemory::ranks(ranks).into_iter().map(Arc::new).collect();
        let communicators = all.iter().cloned().map(|memory| memory as Arc<dyn Communicator>).collect();
        let make = move |memory: &Arc<HostMemory>| make(memory).map(|()| memory.clone());
        Threads::start(all, communicators, make).map(|threads| Lockstep(Members::Threads(threads)))
    }

    /// The sum of the numbers of all ranks.
    fn sum(memory: &HostMemory) -> Result<f32> {
        let mut data = [memory.shard().rank() as f32];
        memory.sum_rows(&mut data)?;
        Ok(data[0])
    }

    fn refused(what: &str) -> Result<()> {
        Err(Error::argument(what))
    }

    #[test]
    fn ranks_do_the_same_in_order() {
        for (ranks, total) in [(2, 1.0), (4, 6.0), (8, 28.0)] {
            let mut all = start(ranks, |memory| sum(memory).map(drop)).unwrap();
            for _ in 0..50 {
                assert_eq!(all.call(|memory| sum(memory)).unwrap(), total);
            }
            let numbers = all.each(|memory| Result::Ok(memory.shard().rank())).unwrap();
            assert_eq!(numbers, (0..ranks).collect::<Vec<_>>());
            assert!(all.as_alone().is_none());
        }
    }

    #[test]
    fn a_rank_that_fails_ends_the_others_and_is_named() {
        for ranks in [2, 4, 8] {
            let (mut all, begun) = (start(ranks, |_| Ok(())).unwrap(), Instant::now());
            for _ in 0..2 {
                let failed = all.call(move |memory| match memory.shard().rank() + 1 == ranks {
                    true => refused("no memory").map(|()| 0.0),
                    false => sum(memory),
                });
                assert_eq!(failed.unwrap_err().to_string(), format!("rank {}: no memory", ranks - 1));
            }
            let later = all.call(|memory| sum(memory)).unwrap_err().to_string();
            assert_eq!(later, format!("rank {}: no memory", ranks - 1), "of the same rank");
            drop(all);
            assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        }
    }

    #[test]
    fn a_rank_that_is_not_made_is_named() {
        let begun = Instant::now();
        let failed = start(4, |memory| match memory.shard().rank() {
            2 => refused("no memory"),
            _ => sum(memory).map(drop),
        });
        assert_eq!(failed.map(drop).unwrap_err().to_string(), "rank 2: no memory");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }

    /// The others have not exchanged anything, and have nothing to wait for.
    #[test]
    fn a_rank_that_fails_alone_ends_later_exchanges() {
        let mut all = start(2, |_| Ok(())).unwrap();
        let failed = all.call(|memory| match memory.shard().rank() {
            1 => refused("of one"),
            _ => Ok(()),
        });
        assert_eq!(failed.unwrap_err().to_string(), "rank 1: of one");
        assert_eq!(all.call(|memory| sum(memory)).unwrap_err().to_string(), "rank 1: of one");
    }

    #[test]
    fn ranks_that_fail_alike_go_on() {
        let mut all = start(4, |_| Ok(())).unwrap();
        let failed = all.call(|_| refused("no pages")).unwrap_err();
        assert!(matches!(&failed, Error::Rank { source, .. } if source.to_string() == "no pages"));
        assert_eq!(all.call(|memory| sum(memory)).unwrap(), 6.0);
    }

    #[test]
    fn a_rank_that_hangs_is_not_waited_for() {
        let (mut all, begun) = (start(4, |_| Ok(())).unwrap(), Instant::now());
        let failed = all.call(|memory| match memory.shard().rank() {
            0 => {
                sleep(2 * SOON);
                Ok(())
            }
            3 => refused("of one"),
            _ => sum(memory).map(drop),
        });
        assert_eq!(failed.unwrap_err().to_string(), "rank 3: of one");
        drop(all);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_panic_is_passed_on() {
        let mut all = start(2, |_| Ok(())).unwrap();
        let call = || {
            all.call(|memory| {
                assert!(memory.shard().rank() == 0, "as the test wants");
                sum(memory)
            })
        };
        let panic = catch_unwind(AssertUnwindSafe(call)).map(drop).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"as the test wants"));
        assert_eq!(all.call(|memory| sum(memory)).unwrap_err().to_string(), "rank 1: it has panicked");
    }

    #[test]
    fn a_single_value_stays_here() {
        let mut value = Lockstep::alone(std::rc::Rc::new(1)); // of this thread alone
        assert_eq!(value.call(|x| Result::Ok(**x + 1)).unwrap(), 2);
        assert_eq!(value.call(|_| refused("as it is")).unwrap_err().to_string(), "as it is");
        assert_eq!(value.as_alone().map(|x| **x), Some(1));
    }
}
