//! Work lists that balance the processors (SMs) of a GPU over heads of unequal rank and sequences of unequal
//! length.
//!
//! The caller chooses the unit of costs: components (`rank_k + rank_v`) or bytes per token. A schedule covers
//! every token of every head exactly once, and reports its makespan and the ideal: the work without fixed
//! costs, spread evenly.

use alloc::collections::BinaryHeap;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::ops::Range;

use crate::Error;

/// Maximum processors, beyond any device.
const MOST_PROCESSORS: usize = 1 << 16;

/// One KV head of one sequence in a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeHead {
    /// Tokens in the cache; 0 for an empty sequence.
    pub tokens: usize,
    /// Cost per token, in components or bytes.
    pub cost: usize,
}

/// The fixed cost of a task, and the granule at which a head may be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskCost {
    /// Fixed cost of a task: its launch, and the merge of its partial softmax.
    pub per_task: usize,
    /// Heads are split at multiples of this number of tokens.
    pub granule: usize,
}

/// One head of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillHead {
    /// Queries, the last tokens of the sequence.
    pub rows: usize,
    /// Keys that its queries attend to.
    pub tokens: usize,
    /// Cost of one query on one key, in components.
    pub cost: usize,
}

/// How a prompt is split into row blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillRules {
    /// Rows in a block of the most expensive head. Blocks of other heads have more rows, so that all blocks
    /// cost the same.
    pub row_block: usize,
    /// Blocks are multiples of this number of rows (16 for tensor cores).
    pub granule: usize,
    /// Fixed cost of a task.
    pub per_task: usize,
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
}

/// A run of one head's tokens (decode) or rows (prefill).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Index in the list of heads that was scheduled.
    pub head: usize,
    /// Index of its first token or row in the head.
    pub first: usize,
    /// Tokens or rows, at least 1.
    pub len: usize,
}

/// The tasks of every processor, in execution order.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    tasks: Vec<Task>,
    ends: Vec<usize>, // (processors,): end of each processor's tasks
    makespan: u64,
    ideal: f64,
}

impl Schedule {
    /// All tasks, processor after processor.
    #[must_use]
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// The tasks of every processor, as ranges of [`tasks`](Self::tasks).
    pub fn processors(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = core::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }

    /// The cost of the busiest processor.
    #[must_use]
    pub const fn makespan(&self) -> u64 {
        self.makespan
    }

    /// The work without the tasks' fixed costs, spread evenly: a lower bound of every makespan.
    #[must_use]
    pub const fn ideal(&self) -> f64 {
        self.ideal
    }
}

/// Splits heads along their tokens by cost, and assigns the pieces to `processors`: the most expensive first,
/// each to the least loaded processor.
///
/// All pieces aim at the same cost. The function tries targets of at most one, two, ... eight pieces per
/// processor, and returns the schedule with the least makespan. Merge the pieces of a head with their
/// [`SoftmaxStats`](crate::SoftmaxStats).
///
/// # Errors
/// [`Error::Zero`] for no processor or granule, [`Error::TooLarge`] for more than 65,536 processors or costs
/// beyond `u64`.
/// # Cost
/// n log n for the n pieces, times eight.
/// # Source
/// ZACK, 5.3, with the split for GPUs with more processors than heads (FlashDecoding, FlashInfer).
/// # Examples
/// ```
/// use svd_core::{TaskCost, DecodeHead, schedule_decode};
/// let heads = [DecodeHead { tokens: 4096, cost: 256 }, DecodeHead { tokens: 4096, cost: 64 }];
/// let schedule = schedule_decode(&heads, 10, TaskCost { per_task: 2048, granule: 64 })?;
/// assert!((schedule.makespan() as f64) < 1.1 * schedule.ideal());
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn schedule_decode(heads: &[DecodeHead], processors: usize, model: TaskCost) -> Result<Schedule, Error> {
    /// Maximum pieces per processor.
    const PIECES: usize = 8;
    check_processors(processors)?;
    if model.granule == 0 {
        return Err(Error::Zero { what: "granule" });
    }
    let costs = heads.iter().map(|head| (head.tokens as u64).checked_mul(head.cost as u64));
    let costs = costs.collect::<Option<Vec<u64>>>().ok_or(Error::TooLarge)?;
    let total = checked_total(&costs, model.per_task, processors * PIECES)?;
    let ideal = total as f64 / processors as f64;
    let plan = |pieces: usize| {
        let target = smallest_target(&costs, (pieces * processors).max(heads.len()));
        let mut tasks = vec![];
        for (h, (head, &cost)) in heads.iter().zip(&costs).enumerate() {
            let len = rounded_up(head.tokens.div_ceil(pieces_of(cost, target)), model.granule);
            cut(h, head.tokens, len, &mut tasks);
        }
        let cost = |task: &Task| task.len as u64 * heads[task.head].cost as u64 + model.per_task as u64;
        longest_first(tasks, processors, ideal, cost)
    };
    let better = |best: Schedule, next: Schedule| if next.makespan < best.makespan { next } else { best };
    Ok((2..=PIECES).map(plan).fold(plan(1), better))
}

/// Splits prompts into row blocks of equal cost and assigns them to `processors`.
///
/// A head of lower rank gets blocks of more rows, so that each block costs as much as one of the most
/// expensive head. Blocks that would leave processors idle in the last wave are split again, to the last
/// wave's work per processor. Blocks are assigned in descending cost, each to the least loaded processor.
///
/// # Errors
/// [`Error::Zero`] for no processor, row block or granule, [`Error::Causal`] for a causal head with more rows
/// than tokens, [`Error::TooLarge`] for more than 65,536 processors, more than 2^24 blocks, or costs beyond
/// `u64`.
/// # Cost
/// n log n for n blocks.
/// # Source
/// ZACK, 5.3, prefill. The paper counts all keys for every row; with `causal`, only its visible keys are
/// counted.
/// # Examples
/// ```
/// use svd_core::{PrefillHead, PrefillRules, schedule_prefill};
/// let heads = [256, 96, 64].map(|cost| PrefillHead { rows: 2048, tokens: 4096, cost });
/// let rules = PrefillRules { row_block: 128, granule: 16, per_task: 4096, causal: true };
/// let schedule = schedule_prefill(&heads, 12, rules)?;
/// assert!((schedule.makespan() as f64) < 1.1 * schedule.ideal());
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn schedule_prefill(
    heads: &[PrefillHead],
    processors: usize,
    rules: PrefillRules,
) -> Result<Schedule, Error> {
    const MOST_BLOCKS: usize = 1 << 24;
    check_processors(processors)?;
    for (what, size) in [("row block", rules.row_block), ("granule", rules.granule)] {
        if size == 0 {
            return Err(Error::Zero { what });
        }
    }
    let mut costs = vec![];
    for head in heads {
        if rules.causal && head.rows > head.tokens {
            return Err(Error::Causal { rows: head.rows, tokens: head.tokens });
        }
        let pairs = (head.rows as u64).checked_mul(head.tokens as u64);
        costs.push(pairs.and_then(|pairs| pairs.checked_mul(head.cost as u64)).ok_or(Error::TooLarge)?);
    }
    let max_cost = heads.iter().map(|head| head.cost).max().unwrap_or(0);
    let block_rows = |head: &PrefillHead| {
        let rows =
            (rules.row_block as u128 * max_cost as u128 / head.cost.max(1) as u128).min(head.rows as u128);
        (rows as usize / rules.granule * rules.granule).max(rules.granule)
    };
    let mut blocks = heads.iter().map(|head| head.rows.div_ceil(block_rows(head)));
    let blocks = blocks.try_fold(0_usize, usize::checked_add).filter(|&n| n <= MOST_BLOCKS);
    checked_total(&costs, rules.per_task, blocks.ok_or(Error::TooLarge)? + 2 * processors)?;
    let work = |task: &Task| {
        let head = &heads[task.head];
        let (rows, tokens, first) = (task.len as u64, head.tokens as u64, task.first as u64);
        // A block's first row sees `tokens - head.rows + first + 1` keys, each further row one key more.
        let before = |first: u64| tokens - head.rows as u64 + first;
        let pairs = if rules.causal { rows * before(first) + rows * (rows + 1) / 2 } else { rows * tokens };
        pairs * head.cost as u64
    };
    let mut tasks = vec![];
    for (h, head) in heads.iter().enumerate() {
        cut(h, head.rows, block_rows(head), &mut tasks);
    }
    let total: u64 = tasks.iter().map(work).sum();
    tasks.sort_by_key(|task| Reverse(work(task)));
    let last_round = tasks.split_off(tasks.len() / processors * processors);
    let left: u64 = last_round.iter().map(work).sum();
    for task in last_round {
        let share = (left / processors as u64).max(1);
        let pieces = work(&task).div_ceil(share).max(1);
        let len = rounded_up((task.len as u64).div_ceil(pieces) as usize, rules.granule);
        let from = tasks.len();
        cut(task.head, task.len, len, &mut tasks);
        tasks[from..].iter_mut().for_each(|piece| piece.first += task.first);
    }
    let cost = |task: &Task| work(task) + rules.per_task as u64;
    Ok(longest_first(tasks, processors, total as f64 / processors as f64, cost))
}

fn check_processors(processors: usize) -> Result<(), Error> {
    match processors {
        0 => Err(Error::Zero { what: "number of processors" }),
        _ if processors > MOST_PROCESSORS => Err(Error::TooLarge),
        _ => Ok(()),
    }
}

/// The sum of all costs. Together with the fixed costs of the largest possible number of tasks it must fit a
/// `u64`.
fn checked_total(costs: &[u64], per_task: usize, tasks: usize) -> Result<u64, Error> {
    let total = costs.iter().try_fold(0_u64, |sum, &cost| sum.checked_add(cost));
    let fixed = (per_task as u64).checked_mul((tasks + costs.len()) as u64);
    match (total, fixed) {
        (Some(total), Some(fixed)) if total.checked_add(fixed).is_some() => Ok(total),
        _ => Err(Error::TooLarge),
    }
}

/// The number of pieces of a head of this cost if no piece may cost more than `target`.
fn pieces_of(cost: u64, target: u64) -> usize {
    cost.div_ceil(target).max(1) as usize
}

/// The smallest target with at most `pieces` in total. `pieces` must be at least the number of heads.
fn smallest_target(costs: &[u64], pieces: usize) -> u64 {
    let fits = |target: u64| {
        costs
            .iter()
            .try_fold(0_usize, |n, &cost| n.checked_add(pieces_of(cost, target)).filter(|&n| n <= pieces))
            .is_some()
    };
    // `low` does not fit, `high` does.
    let (mut low, mut high) = (0, costs.iter().copied().max().unwrap_or(0).max(1));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { high = middle } else { low = middle }
    }
    high
}

/// The next multiple of `granule`, or `len` if that overflows.
fn rounded_up(len: usize, granule: usize) -> usize {
    len.checked_next_multiple_of(granule).unwrap_or(len)
}

/// Splits `all` tokens or rows into tasks of `len`, the last one shorter.
fn cut(head: usize, all: usize, len: usize, tasks: &mut Vec<Task>) {
    let mut first = 0;
    while first < all {
        let len = len.min(all - first);
        tasks.push(Task { head, first, len });
        first += len;
    }
}

/// Assigns tasks in descending cost, each to the least loaded processor.
fn longest_first(tasks: Vec<Task>, processors: usize, ideal: f64, cost: impl Fn(&Task) -> u64) -> Schedule {
    let mut tasks: Vec<(u64, Task)> = tasks.into_iter().map(|task| (cost(&task), task)).collect();
    tasks.sort_by_key(|&(cost, _)| Reverse(cost)); // stable: equal costs in order of head and token
    let mut loads: BinaryHeap<Reverse<(u64, usize)>> = (0..processors).map(|p| Reverse((0, p))).collect();
    let mut owners = Vec::with_capacity(tasks.len());
    let mut ends = vec![0; processors];
    for (cost, _) in &tasks {
        if let Some(mut least) = loads.peek_mut() {
            let Reverse((load, p)) = &mut *least;
            *load += cost;
            ends[*p] += 1;
            owners.push(*p);
        }
    }
    let makespan = loads.iter().map(|&Reverse((load, _))| load).max().unwrap_or(0);
    let mut end = 0;
    let mut next: Vec<usize> = ends
        .iter_mut()
        .map(|n| {
            let start = end;
            end += *n;
            *n = end;
            start
        })
        .collect();
    let mut ordered = vec![Task { head: 0, first: 0, len: 0 }; tasks.len()];
    for ((_, task), p) in tasks.into_iter().zip(owners) {
        ordered[next[p]] = task;
        next[p] += 1;
    }
    Schedule { tasks: ordered, ends, makespan, ideal }
}
