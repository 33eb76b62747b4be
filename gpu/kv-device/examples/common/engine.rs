//! The engine of the examples: a context, a stream, and a prompt in pages of its own.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _, result};
use half::f16;
use kv_attend::owner::Side;
use kv_device::{Rows, hashed};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

pub const HEADS: usize = 2;
pub const GROUP: usize = 4; // query heads of a KV head
pub const DIM: usize = 128;
pub const TOKENS: usize = 4000; // of the prompt
pub const PAGE: usize = 16; // tokens

/// An engine whose model has one layer.
pub struct Engine {
    pub stream: Arc<CudaStream>,
    pool: CudaSlice<f16>, // (page, keys and values, head, PAGE, DIM)
    rows: Vec<f16>,       // the same on the host
    pages: Vec<usize>,    // of the prompt, in the order of its tokens
}

impl Engine {
    pub fn new() -> Result<Self> {
        let stream = CudaContext::new(0)?.new_stream()?;
        let number = |i| f16::from_f32(hashed(0, i, 1.7)); // of variance 1
        let rows: Vec<f16> = (0..(2 * HEADS * TOKENS * DIM) as u64).map(number).collect();
        let pages = (0..TOKENS / PAGE).rev().collect();
        Ok(Self { pool: stream.clone_htod(&rows)?, stream, rows, pages })
    }

    /// Keys or values, each of a head and a token.
    pub fn rows(&self, of: impl Iterator<Item = (usize, Side, usize)>) -> Vec<f32> {
        of.flat_map(|(head, side, token)| &self.rows[self.at(head, side, token)..][..DIM])
            .map(|x| x.to_f32())
            .collect()
    }

    /// Queries of a step, each 1.5 times the key of one token, which thus has nearly all weight.
    pub fn queries(&self) -> Vec<u16> {
        self.asked(Side::Keys).iter().map(|x| f16::from_f32(1.5 * x).to_bits()).collect()
    }

    /// The largest distance of outputs to the values of those tokens.
    pub fn largest_error(&self, outputs: &[u16]) -> f32 {
        let values = self.asked(Side::Values);
        let errors = outputs.iter().zip(values).map(|(&bits, x)| (f16::from_bits(bits).to_f32() - x).abs());
        errors.fold(0.0, f32::max)
    }

    fn asked(&self, side: Side) -> Vec<f32> {
        let token = |head: usize| 700 * (head % GROUP) + 300 * (head / GROUP) + 50;
        self.rows((0..HEADS * GROUP).map(|head| (head / GROUP, side, token(head))))
    }

    /// Copies keys and values of consecutive tokens of a page to rows of a cache, from row `to` of every head
    /// on.
    pub fn copy(&self, token: usize, count: usize, rows: &Rows, to: usize) -> Result<()> {
        let (pool, _order) = self.pool.device_ptr(&self.stream);
        for (head, side) in (0..HEADS).flat_map(|head| Side::ALL.map(|side| (head, side))) {
            let from = pool + (size_of::<f16>() * self.at(head, side, token)) as u64;
            let to = rows.side(side).cast::<f16>().offset((head * rows.capacity + to) * DIM);
            let bytes = size_of::<f16>() * count * DIM;
            // SAFETY: the page has these tokens, and the cache has as many rows.
            unsafe { result::memcpy_dtod_async(to.address(), from, bytes, self.stream.cu_stream()) }?;
        }
        Ok(())
    }

    fn at(&self, head: usize, side: Side, token: usize) -> usize {
        let page = self.pages[token / PAGE];
        (((page * 2 + side as usize) * HEADS + head) * PAGE + token % PAGE) * DIM
    }
}
