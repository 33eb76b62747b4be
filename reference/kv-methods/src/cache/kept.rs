//! The rows of a head that evicts tokens.

use kv_attend::{ElementType, Rows};
use kv_llama::Fetched;

use super::{HeadRows, Sums};
use crate::Result;

/// The tokens that one head keeps, with their rotated keys and values.
#[derive(Clone, Debug)]
pub(crate) struct KeptRows {
    tokens: Vec<u32>, // indices, ascending
    rows: HeadRows,
}

impl KeptRows {
    pub const fn new(element: ElementType, dim: usize) -> Self {
        Self { tokens: vec![], rows: HeadRows::new(element, dim) }
    }

    /// The indices of the tokens, ascending.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The keys (tokens, head_dim).
    pub fn keys(&self, dim: usize) -> Vec<f32> {
        let mut keys = vec![0.0; self.tokens.len() * dim];
        self.rows.read(0, &mut keys, &mut []);
        keys
    }

    /// Appends rows (n, head_dim) of the tokens from index `first` on.
    pub fn push(&mut self, first: usize, keys: Rows<'_, f32>, values: Rows<'_, f32>) -> Result<()> {
        self.tokens.extend((first..first + keys.rows()).map(|token| token as u32));
        self.rows.push(keys, values)
    }

    /// Evicts all but the tokens at places `kept`, ascending.
    pub fn retain(&mut self, kept: &[usize]) -> Result<()> {
        self.tokens = kept.iter().map(|&i| self.tokens[i]).collect();
        self.rows.retain(kept)
    }

    /// Drops the tokens from index `len` on; returns how many are left.
    pub fn truncate(&mut self, len: usize) -> usize {
        let left = self.before(len);
        self.tokens.truncate(left);
        self.rows.truncate(left);
        left
    }

    /// How many tokens come before index `token`.
    pub fn before(&self, token: usize) -> usize {
        self.tokens.partition_point(|&t| (t as usize) < token)
    }

    /// Adds the attention over the tokens from index `first` on, as [`super::Store::attend`]; returns what
    /// was read.
    pub fn attend(&self, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<Fetched> {
        let first = self.before(first);
        self.rows.attend(first, None, q, sums)?;
        let rows = self.tokens.len() - first;
        let bytes = self.bytes() / self.tokens.len().max(1) * rows;
        Ok(Fetched { attentions: 1, rows: rows as u64, bytes: bytes as u64, ..Fetched::default() })
    }

    pub fn bytes(&self) -> usize {
        self.rows.bytes()
    }
}
