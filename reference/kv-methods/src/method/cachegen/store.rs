//! The store of CacheGen on the CPU: tokens as bits, and decoded again for attention.

use std::sync::Arc;

use codec_core::{Frame, FrameInfo, PlaneBuf, Profile, encode_frame};
use kv_attend::owner::{Pair, Side};
use kv_llama::Footprint;
use svd_core::SoftmaxStats;

use super::CODEC_SIDES;
use crate::Result;
use crate::cache::{DenseStore, Geometry, Store};

/// Encodes every batch of tokens to a bitstream (keys before RoPE, values); attention runs over the decoded
/// rows.
///
/// The paper stores and streams the bits and decodes them into a dense cache: the bits count as kept, the
/// dense rows as working memory.
#[derive(Clone)]
pub(crate) struct CacheGenStore {
    geometry: Geometry,
    planes: Arc<Profile>,
    layer: usize,
    planes_len: usize, // bytes, of the layer
    chunks: Vec<Chunk>,
    decoded: DenseStore,
}

#[derive(Clone)]
struct Chunk {
    valid: usize, // tokens left after truncation
    frame: Vec<u8>,
}

impl CacheGenStore {
    pub fn new(geometry: Geometry, planes: Arc<Profile>, layer: usize, decoded: DenseStore) -> Result<Self> {
        let plane = |side: Side| planes.plane(0, layer, CODEC_SIDES[side]);
        let planes_len = Pair::try_of(plane)?.iter().map(|plane| plane.to_bytes().len()).sum();
        Ok(Self { geometry, planes, layer, planes_len, chunks: vec![], decoded })
    }
}

impl Store for CacheGenStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let info = FrameInfo {
            first_token: pos as u64,
            ..FrameInfo::new(
                1,
                self.geometry.n_kv_heads,
                self.geometry.head_dim,
                k.len() / self.geometry.kv_dim(),
            )
        };
        let planes =
            Pair::try_of(|side| self.planes.plane(0, self.layer, CODEC_SIDES[side]).map(PlaneBuf::view))?;
        let mut bytes = vec![];
        encode_frame(&info, &[planes.keys, planes.values], &[k, v], &mut bytes)?;
        let frame = Frame::parse(&bytes, info.elements())?;
        let decoded = Pair::try_of(|side| {
            let (mut rows, plane) = (vec![0.0; k.len()], &planes[side]);
            frame.decode_plane_into(plane, 0, CODEC_SIDES[side], None, &mut rows).map(|_| rows)
        })?;
        self.chunks.push(Chunk { valid: info.tokens, frame: bytes });
        self.decoded.push(pos, &decoded.keys, &decoded.values)
    }

    fn len(&self) -> usize {
        self.decoded.tokens()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        let mut left = len;
        for chunk in &mut self.chunks {
            chunk.valid = chunk.valid.min(left);
            left -= chunk.valid;
        }
        self.chunks.retain(|chunk| chunk.valid > 0);
        self.decoded.truncate(len)
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        self.decoded.attend(head, first, q, out, stats)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.chunks.iter().map(|chunk| chunk.frame.len()).sum(),
            working: self.decoded.footprint().kept,
            shared: self.planes_len,
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
