//! Blocks of coded rows, which one operation writes and another one reads.

use half::f16;

use super::{EncodeShape, Side};
use crate::Error;
use crate::launch::Operation;
use crate::pointer::DevicePtr;
use crate::pq::Pages;

/// The codes of rows of a ragged batch, which [`Encode`](super::Encode) writes and [`Decode`](super::Decode)
/// reads. Arrays of blocks are those of [`AttendArguments`](super::AttendArguments).
#[derive(Clone, Copy, Debug)]
pub struct CodedBlocks {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Maximum number of rows of a sequence.
    pub max_rows: usize,
    /// `u32` (batch,): the block of the sequence that the first row begins.
    pub firsts: DevicePtr<u32>,
    /// `u32` (batch,): rows of each sequence, at most `max_rows`. If their number is not a multiple of a block,
    /// the last block is incomplete: its further tokens are not written, nor is their part of its codes
    /// meaningful.
    pub counts: DevicePtr<u32>,
    /// `u32` (heads, [`KeyTable::table_len`](super::KeyTable::table_len)), given if and only if the rows are
    /// keys.
    pub key_tables: Option<DevicePtr<u32>>,
    /// Bytes (pages or batch, heads, blocks, dim): steps of keys; or (pages or batch, heads, blocks, tokens of
    /// a block): norms of values.
    pub scales: DevicePtr<u8>,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block).
    pub words: DevicePtr<u32>,
    /// `f16` (pages or batch, heads, blocks, dim), for values only: their mean errors, as
    /// [`mean_error_into`](pq_core::sq::mean_error_into) computes them. `Decode` adds them to every row of their
    /// block, as attention does.
    pub mean_errors: Option<DevicePtr<f16>>,
    /// Blocks of a page, or of a sequence without pages.
    pub blocks: usize,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
}

/// `BlockArguments` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct BlockArguments {
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    key_tables: Option<DevicePtr<u32>>,
    pages: Option<DevicePtr<u32>>,
    scales: DevicePtr<u8>,
    words: DevicePtr<u32>,
    mean_errors: Option<DevicePtr<f16>>,
    heads: u32,
    max_rows: u32,
    blocks: u32,
    max_pages: u32,
}

const _: () = assert!(size_of::<BlockArguments>() == 72);

impl CodedBlocks {
    /// The kernel's arguments; `None` if there is nothing to do.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, or arrays that are not those of the shape.
    pub(super) fn arguments(
        &self,
        operation: Operation,
        shape: &EncodeShape,
    ) -> Result<Option<BlockArguments>, Error> {
        if self.batch == 0 || self.heads == 0 || self.max_rows == 0 {
            return Ok(None);
        }
        if shape.paged != self.pages.is_some() {
            return Err(operation.error("pages are given exactly when it is compiled for them"));
        }
        let keys = matches!(shape.side, Side::Keys { .. });
        if keys != self.key_tables.is_some() || keys && self.mean_errors.is_some() {
            return Err(operation.error("keys have tables, and only values may have mean errors"));
        }
        if self.blocks == 0 {
            return Err(operation.error("no room for a block"));
        }
        let in_32_bits = |what, size| operation.in_32_bits(what, size);
        Ok(Some(BlockArguments {
            firsts: self.firsts,
            counts: self.counts,
            key_tables: self.key_tables,
            pages: self.pages.map(|pages| pages.table),
            scales: self.scales,
            words: self.words,
            mean_errors: self.mean_errors,
            heads: in_32_bits("heads", self.heads)?,
            max_rows: in_32_bits("rows", self.max_rows)?,
            blocks: in_32_bits("blocks", self.blocks)?,
            max_pages: in_32_bits("pages", self.pages.map_or(0, |pages| pages.max_pages))?,
        }))
    }
}
