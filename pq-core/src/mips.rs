//! Maximum inner product search: which tokens a step attends to.

use crate::error::check_len;
use crate::exact::dot;
use crate::{Codes, Element, Error, GroupRule, Lut, SoftmaxStats, combine_group_into, scan_into, top_k_into};

/// Which tokens are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Tokens chosen by score, beside the sinks and the recent ones.
    pub k: usize,
    /// First tokens that are always in.
    pub sinks: usize,
    /// Last tokens that are always in.
    pub recent: usize,
    /// How the query heads of the group agree.
    pub rule: GroupRule,
}

impl Search {
    /// Tokens that a search among `n` returns.
    #[must_use]
    pub const fn found(&self, n: usize) -> usize {
        let wanted = self.k.saturating_add(self.sinks).saturating_add(self.recent);
        if wanted < n { wanted } else { n }
    }
}

/// Finds the tokens that a group of query heads attends to: scan, agreement of the group, top-k, and the tokens that are always
/// in.
///
/// Writes them in ascending order and returns how many ([`Search::found`]). Afterwards `scores` holds every query's table
/// scores of all tokens, `combined` what [`combine_group_into`] makes of them, and `stats` their maximum and sum:
/// [`SoftmaxStats::log_sum_exp`] tells what part of a query's attention the found tokens carry. Queries need no scale for the
/// order of a single head's scores; a group's softmaxes want it as attention does.
///
/// # Shapes
/// `luts` (group, m, ksub); `codes` n vectors; `scores` (group, n); `combined` (n,) scratch; `stats` (group,);
/// `tokens` at least [`Search::found`] elements.
/// # Errors
/// [`Error::Length`]; `tokens` is then untouched.
/// # Cost
/// group * n * m look-ups, the exponentials of [`combine_group_into`], one selection; no allocation.
/// # Source
/// PQCache (arXiv 2407.12820), 3.1 and 3.4.
pub fn search_into(
    luts: &[f32],
    codes: &Codes<'_>,
    search: &Search,
    scores: &mut [f32],
    combined: &mut [f32],
    stats: &mut [SoftmaxStats],
    tokens: &mut [u32],
) -> Result<usize, Error> {
    let (n, group) = (codes.n(), stats.len());
    check_len("luts", luts.len(), group.saturating_mul(codes.shape().lut_len()))?;
    check_len("scores", scores.len(), group.saturating_mul(n))?;
    check_len("combined", combined.len(), n)?;
    let found = search.found(n);
    if tokens.len() < found {
        check_len("tokens", tokens.len(), found)?;
    }
    for (g, scores) in scores.chunks_exact_mut(n.max(1)).enumerate() {
        scan_into(&Lut::nth(codes.shape(), luts, g), codes, scores)?;
    }
    combine_group_into(scores, search.rule, stats, combined)?;
    // Tokens that are in anyway do not compete.
    let sinks = search.sinks.min(n);
    let recent = search.recent.min(n - sinks);
    let middle = &combined[sinks..n - recent];
    let k = search.k.min(middle.len());
    for (i, token) in tokens[..sinks].iter_mut().enumerate() {
        *token = i as u32;
    }
    let chosen = &mut tokens[sinks..sinks + k];
    top_k_into(middle, k, chosen)?;
    chosen.iter_mut().for_each(|token| *token += sinks as u32);
    for (i, token) in tokens[sinks + k..found].iter_mut().enumerate() {
        *token = (n - recent + i) as u32;
    }
    Ok(found)
}

/// Ranks candidates again by exact scores and keeps the best `k`: the second step of a search that asked for more than it
/// needs.
///
/// Writes positions in the candidate list, in ascending order, and returns how many: `min(k, candidates)`.
///
/// # Shapes
/// `queries` (group, dim); `keys` (candidates, dim), the candidates' exact keys; `scores` (group, candidates) and
/// `combined` (candidates,) scratch; `stats` (group,); `kept` at least `min(k, candidates)` elements.
/// # Errors
/// [`Error::Length`], [`Error::Zero`] for a dimension of zero.
/// # Cost
/// group * candidates * dim multiply-adds and a selection; no allocation.
pub fn rerank_into<E: Element>(
    queries: &[f32],
    keys: &[E],
    (rule, k): (GroupRule, usize),
    scores: &mut [f32],
    combined: &mut [f32],
    stats: &mut [SoftmaxStats],
    kept: &mut [u32],
) -> Result<usize, Error> {
    let (group, n) = (stats.len(), combined.len());
    let dim = queries.len() / group.max(1);
    if dim == 0 {
        return Err(Error::Zero { what: "dim" });
    }
    check_len("queries", queries.len(), group * dim)?;
    check_len("keys", keys.len(), n.saturating_mul(dim))?;
    check_len("scores", scores.len(), group.saturating_mul(n))?;
    for (query, scores) in queries.chunks_exact(dim).zip(scores.chunks_exact_mut(n.max(1))) {
        for (key, score) in keys.chunks_exact(dim).zip(scores) {
            *score = dot(query, key);
        }
    }
    combine_group_into(scores, rule, stats, combined)?;
    top_k_into(combined, k, kept)
}
