//! Quest (Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024,
//! arXiv 2406.10774): the smallest and the largest component of the keys of each page give an upper bound of
//! its scores; the pages with the highest bounds are attended to exactly. All rows are kept: the method saves
//! memory traffic, not memory.
//!
//! As in the authors' code, pages have 16 tokens, and the first two layers attend to all of them. There are
//! three differences: pages begin after the sinks, sinks and window are always attended to, and a group of
//! query heads shares its pages (the paper's models have no groups).

use std::sync::Arc;

use kv_llama::Footprint;
use pq_core::TokenBudget;

use super::budget::take_budget;
use super::kind::{BuildContext, Kind, Registration};
use super::offload::OffloadSettings;
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::retrieval::{RetrievalStore, Scorer};
use crate::Result;
use crate::cache::{Geometry, OffloadedRows, Store};

pub(super) const QUEST: Registration = Registration {
    names: &["quest"],
    help: "\
  quest             top pages by the bounds of their keys' components;    ratio=0.2 or tokens=N
                      layers before `skip` read all (Quest); a group of   page=16 skip=2
                      query heads shares its pages; saves reads, not bytes
",
    examples: &["quest:ratio=1:exact=f32:window=4", "quest:ratio=1:page=5:skip=0:exact=f32:window=4"],
    parse: |s| {
        let budget = take_budget(s)?;
        Ok(Arc::new(Quest { budget, page: s.positive("page", 16)?, skip: s.count("skip", 2)? }))
    },
};

#[derive(Debug)]
struct Quest {
    budget: TokenBudget,
    page: usize, // tokens
    skip: usize, // first layers, which read all tokens
}

impl Kind for Quest {
    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("pqcache"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let budget = if l < self.skip { TokenBudget::Ratio(1.0) } else { self.budget };
            let pages = Pages::new(self.page, context.geometry);
            RetrievalStore::new(context, l, budget, &OffloadSettings::NONE, pages)
        })
    }
}

/// The bounds of the keys of every page.
#[derive(Clone)]
struct Pages {
    page: usize, // tokens
    geometry: Geometry,
    bounds: Vec<Vec<f32>>, // per KV head: (pages, 2, head_dim), smallest and largest components
}

impl Pages {
    fn new(page: usize, geometry: Geometry) -> Self {
        Self { page, geometry, bounds: vec![vec![]; geometry.n_kv_heads] }
    }

    /// Computes the bounds of the pages from the one of token `changed` on.
    fn update(&mut self, changed: usize, exact: &OffloadedRows) -> Result<()> {
        let dim = self.geometry.head_dim;
        let (first, mut key) = (changed / self.page, vec![0.0; dim]);
        for (head, bounds) in self.bounds.iter_mut().enumerate() {
            bounds.truncate(first * 2 * dim);
            for start in (first * self.page..exact.len()).step_by(self.page) {
                let (mut least, mut most) = (vec![f32::INFINITY; dim], vec![f32::NEG_INFINITY; dim]);
                for t in start..exact.len().min(start + self.page) {
                    exact.key(head, t, &mut key)?;
                    least.iter_mut().zip(&key).for_each(|(least, &x)| *least = least.min(x));
                    most.iter_mut().zip(&key).for_each(|(most, &x)| *most = most.max(x));
                }
                bounds.extend(least);
                bounds.extend(most);
            }
        }
        Ok(())
    }
}

impl Scorer for Pages {
    fn unit(&self) -> usize {
        self.page
    }

    fn push(&mut self, _pos: usize, rotated: &[f32], exact: &OffloadedRows) -> Result<()> {
        self.update(exact.len() - rotated.len() / self.geometry.kv_dim(), exact)
    }

    fn truncate(&mut self, exact: &OffloadedRows) -> Result<()> {
        self.update(exact.len(), exact)
    }

    fn scores(&self, _exact: &OffloadedRows, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let dim = self.geometry.head_dim;
        let bound = |q: &[f32], page: &[f32]| -> f32 {
            let (least, most) = page.split_at(dim);
            q.iter().zip(least.iter().zip(most)).map(|(q, (least, most))| (q * least).max(q * most)).sum()
        };
        let pages = || self.bounds[head].chunks_exact(2 * dim);
        Ok(q.chunks_exact(dim).flat_map(|q| pages().map(move |page| bound(q, page))).collect())
    }

    fn scored_bytes(&self, exact: &OffloadedRows) -> usize {
        exact.len().div_ceil(self.page) * 2 * exact.key_bytes() // bounds have the keys' element type
    }

    fn footprint(&self, exact: &OffloadedRows) -> Footprint {
        let bounds = self.geometry.n_kv_heads * self.scored_bytes(exact);
        Footprint { kept: exact.footprint().offloaded + bounds, ..Footprint::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::retrieval::tests::{Setup, combined, largest};
    use super::*;

    #[test]
    fn attention_is_over_the_pages_with_the_highest_bounds() {
        let budget = TokenBudget::Ratio(0.25);
        for (n, removed, first) in [(1, 0, 0), (70, 0, 0), (70, 0, 21), (70, 9, 0), (64, 0, 16)] {
            let mut setup = Setup::new(budget, |geometry| Pages::new(8, geometry));
            (0..n).step_by(35).for_each(|start| _ = setup.push(35.min(n - start)));
            setup.store.truncate(n - removed).unwrap();
            let n = n - removed;
            let k = (budget.k(n - first, 0) / 8).max(1);
            setup.check(first, |setup, head, q| {
                let pages: Vec<usize> = (first / 8..n.div_ceil(8)).collect();
                let bound = |q: &[f64], page: usize| -> f64 {
                    let keys: Vec<Vec<f64>> =
                        (page * 8..n.min(page * 8 + 8)).map(|t| setup.key(head, t)).collect();
                    let products = |c: usize| keys.iter().map(move |key| key[c]);
                    let most = |c: usize, q: f64| products(c).map(|k| q * k).fold(f64::MIN, f64::max);
                    q.iter().enumerate().map(|(c, &q)| most(c, q)).sum()
                };
                let scores: Vec<Vec<f64>> =
                    q.iter().map(|q| pages.iter().map(|&page| bound(q, page)).collect()).collect();
                let chosen = largest(&combined(&scores), k).into_iter().map(|i| pages[i]);
                chosen.flat_map(|page| (page * 8).max(first)..n.min(page * 8 + 8)).collect()
            });
        }
    }
}
