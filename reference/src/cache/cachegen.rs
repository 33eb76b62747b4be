use std::sync::Arc;

use codec_core::{PlaneProfile, decode_into, encode};

use crate::Result;
use crate::cache::accumulate::Accumulator;
use crate::cache::{DenseStore, ElementType, Footprint, Geometry, Store};
use crate::model::Rope;

/// CacheGen: every batch of tokens becomes two bitstreams (keys before RoPE, values), and what is attended to is what the
/// decoder gives back.
///
/// The paper stores and streams the bits and decodes them into a dense cache: the bits count as kept, the dense rows as
/// working memory.
#[derive(Clone)]
pub(crate) struct CacheGenStore {
    profiles: Arc<[PlaneProfile; 2]>, // of keys and values
    chunks: Vec<Chunk>,
    decoded: DenseStore,
}

#[derive(Clone)]
struct Chunk {
    valid: usize,             // tokens that truncation has left
    bitstreams: [Vec<u8>; 2], // of keys and values
}

impl CacheGenStore {
    pub fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        profiles: Arc<[PlaneProfile; 2]>,
        element: ElementType,
    ) -> Self {
        Self { profiles, chunks: vec![], decoded: DenseStore::new(element, geometry, rope) }
    }
}

/// Through the codec and back: the decoded rows and their bitstream.
fn through_codec(profile: &PlaneProfile, rows: &[f32]) -> Result<(Vec<f32>, Vec<u8>)> {
    let plane = profile.plane()?;
    let mut bytes = vec![];
    encode(&plane, rows, &mut bytes)?;
    let mut decoded = vec![0.0; rows.len()];
    decode_into(&plane, &bytes, &mut decoded)?;
    Ok((decoded, bytes))
}

impl Store for CacheGenStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (k, k_bits) = through_codec(&self.profiles[0], k)?;
        let (v, v_bits) = through_codec(&self.profiles[1], v)?;
        self.chunks
            .push(Chunk { valid: k.len() / self.profiles[0].channels(), bitstreams: [k_bits, v_bits] });
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

    fn attend(&self, head: usize, q: &[f32], group: &mut [Accumulator]) -> Result<()> {
        self.decoded.attend(head, q, group)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.chunks.iter().flat_map(|chunk| &chunk.bitstreams).map(Vec::len).sum(),
            working: self.decoded.footprint().kept,
            shared: self.profiles.iter().map(|profile| profile.to_bytes().len()).sum(),
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
