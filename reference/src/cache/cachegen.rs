use std::sync::Arc;

use codec_core::{Backend, Frame, FrameInfo, PlaneBuf, Side, encode_frame};
use svd_core::SoftmaxStats;

use crate::Result;
use crate::cache::{DenseStore, ElementType, Footprint, Geometry, Store};
use crate::model::Rope;

/// CacheGen: every batch of tokens becomes a bitstream (keys before RoPE, values), and what is attended to is what the decoder
/// gives back.
///
/// The paper stores and streams the bits and decodes them into a dense cache: the bits count as kept, the dense rows as
/// working memory.
#[derive(Clone)]
pub(crate) struct CacheGenStore {
    geometry: Geometry,
    planes: Arc<[PlaneBuf; 2]>, // of keys and values
    chunks: Vec<Chunk>,
    decoded: DenseStore,
}

#[derive(Clone)]
struct Chunk {
    valid: usize, // tokens that truncation has left
    frame: Vec<u8>,
}

impl CacheGenStore {
    pub fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        planes: Arc<[PlaneBuf; 2]>,
        element: ElementType,
    ) -> Self {
        Self { geometry, planes, chunks: vec![], decoded: DenseStore::new(element, geometry, rope) }
    }
}

impl Store for CacheGenStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let backend = Backend::detect();
        let info = FrameInfo {
            first_token: pos as u64,
            ..FrameInfo::new(
                1,
                self.geometry.n_kv_heads,
                self.geometry.head_dim,
                k.len() / self.geometry.kv_dim(),
            )
        };
        let planes = [self.planes[0].view()?, self.planes[1].view()?];
        let mut bytes = vec![];
        encode_frame(backend, &info, &planes, &[k, v], &mut bytes)?;
        let frame = Frame::parse(&bytes, info.numbers())?;
        let (mut k, mut v) = (vec![0.0; k.len()], vec![0.0; v.len()]);
        frame.decode_plane_into(backend, &planes[0], 0, Side::Keys, None, &mut k)?;
        frame.decode_plane_into(backend, &planes[1], 0, Side::Values, None, &mut v)?;
        self.chunks.push(Chunk { valid: info.tokens, frame: bytes });
        self.decoded.push(pos, &k, &v)
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

    fn attend(&self, head: usize, q: &[f32], out: &mut [f32], stats: &mut [SoftmaxStats]) -> Result<()> {
        self.decoded.attend(head, q, out, stats)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.chunks.iter().map(|chunk| chunk.frame.len()).sum(),
            working: self.decoded.footprint().kept,
            shared: self.planes.iter().map(|plane| plane.to_bytes().len()).sum(),
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
