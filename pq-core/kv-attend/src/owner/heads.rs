use crate::error::check_len;
use crate::{Error, SoftmaxStats, Workspace, normalize_all};

/// The sizes of attention over many heads, of one sequence or of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Key/value heads, at least 1.
    pub heads: usize,
    /// Query heads of each, at least 1.
    pub group: usize,
    /// Components of a query and of a value.
    pub dims: [usize; 2],
    /// Floats of the scratch of one head.
    pub scratch_len: usize,
}

/// Runs `attend` for every head: its number, its queries (group, dim), the scratch, its `out` (group, dim of
/// the values), zeros at first, and its statistics (group,); then divides `out` by the sums.
///
/// With feature `rayon`, the threads take consecutive heads, each with one scratch. Heads are computed alike
/// on any number of threads.
///
/// # Shapes
/// `queries` (heads, group, dim); `out` (heads, group, dim of the values).
/// # Errors
/// [`Error::Zero`], [`Error::Length`], and those of `attend`.
pub fn attend_heads<Q: Sync, T: From<Error> + Send>(
    Heads { heads, group, dims: [dim, dim_v], scratch_len }: Heads,
    queries: &[Q],
    workspace: &mut Workspace,
    out: &mut [f32],
    attend: impl Fn(usize, &[Q], &mut [f32], &mut [f32], &mut [SoftmaxStats]) -> Result<(), T> + Sync,
) -> Result<(), T> {
    if heads == 0 || group == 0 || dim == 0 || dim_v == 0 {
        return Err(Error::Zero { what: "number of heads, queries or components" }.into());
    }
    let scratch_len = scratch_len.max(1);
    let rows = heads.saturating_mul(group);
    check_len("queries", queries.len(), rows.saturating_mul(dim))?;
    check_len("out", out.len(), rows.saturating_mul(dim_v))?;
    #[cfg(feature = "rayon")]
    let parts = rayon::current_num_threads().min(heads);
    #[cfg(not(feature = "rayon"))]
    let parts = 1;
    let each = heads.div_ceil(parts);
    let (scratch, stats) = workspace.get(parts.saturating_mul(scratch_len), rows);
    out.fill(0.0);
    let part = |i: usize, queries: &[Q], scratch: &mut [f32], out: &mut [f32], stats: &mut [SoftmaxStats]| {
        let rows =
            queries.chunks(group * dim).zip(out.chunks_mut(group * dim_v)).zip(stats.chunks_mut(group));
        for (head, ((queries, out), stats)) in (i * each..).zip(rows) {
            attend(head, queries, scratch, out, stats)?;
            normalize_all(stats, out)?;
        }
        Ok(())
    };
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        let [queries_len, out_len] = [dim, dim_v].map(|dim| each * group * dim);
        let parts = queries.par_chunks(queries_len).zip(scratch.par_chunks_mut(scratch_len));
        let parts = parts.zip(out.par_chunks_mut(out_len)).zip(stats.par_chunks_mut(each * group));
        parts
            .enumerate()
            .try_for_each(|(i, (((queries, scratch), out), stats))| part(i, queries, scratch, out, stats))
    }
    #[cfg(not(feature = "rayon"))]
    part(0, queries, scratch, out, stats)
}
