//! The store of CacheGen on the CPU: tokens as bits, and decoded again for attention.

use std::sync::Arc;

use codec_core::{Frame, FrameInfo, LayerRows, Place, Profile};
use kv_attend::owner::{Pair, Side};
use kv_llama::Footprint;

use crate::cache::{DenseStore, Geometry, Grouped, Store, Sums};
use crate::{Error, Result};

/// Encodes every batch of tokens to a bitstream (keys before RoPE, values); attention runs over the decoded
/// rows.
///
/// The paper stores and streams the bits and decodes them into a dense cache: the bits count as kept, the
/// dense rows as working memory.
///
/// Layers may be coded together, in groups. Tokens that leave the window in a decode step are then coded when
/// the group's last layer has them; in that step, the layers attend to them exactly.
#[derive(Clone)]
pub(crate) struct CacheGenStore {
    geometry: Geometry,
    layers: usize, // of the group
    grouped: Grouped,
    last: Option<GroupBits>, // of the group's last layer
}

/// The bits of a group of layers.
#[derive(Clone)]
struct GroupBits {
    planes: Arc<Profile>, // of the group, whose heads are those of one layer
    planes_len: usize,    // bytes
    chunks: Vec<Chunk>,
}

#[derive(Clone)]
struct Chunk {
    valid: usize, // tokens left after truncation
    frame: Vec<u8>,
}

impl CacheGenStore {
    /// The store of a layer; the last one of a group of `layers` has the `planes` of the group.
    pub fn new(geometry: Geometry, layers: usize, planes: Option<Profile>, decoded: DenseStore) -> Self {
        let last = planes.map(|planes| {
            let planes_len = planes.to_bytes().len();
            GroupBits { planes: Arc::new(planes), planes_len, chunks: vec![] }
        });
        let exact = Pair::of(|_| vec![]);
        Self { geometry, layers, grouped: Grouped { pos: 0, rows: decoded, exact }, last }
    }
}

impl GroupBits {
    /// Encodes and decodes the rows of some tokens, (n, layers, heads * head_dim).
    fn code(&mut self, pos: usize, rows: &Pair<Vec<f32>>) -> Result<Pair<Vec<f32>>> {
        let info = *self.planes.info();
        let (place, tokens) = (Place::nhd(info.heads, info.head_dim), rows.keys.len() / info.channels());
        let info = FrameInfo { first_token: pos as u64, ..self.planes.frame_info(0, tokens) };
        let mut frame = vec![0; info.max_frame_len()];
        let rows = [LayerRows { keys: &rows.keys[..], values: &rows.values }];
        let len = self.planes.encode_into(&info, &rows, &place, &mut frame)?;
        frame.truncate(len);
        let mut out = Pair::of(|_| vec![0.0; info.elements() / 2]);
        let parsed = Frame::parse(&frame, info.elements())?;
        self.planes.decode_layer_to(&parsed, 0, None, &place, &mut out.keys, &mut out.values)?;
        self.chunks.push(Chunk { valid: tokens, frame });
        Ok(out)
    }
}

impl Grouped {
    /// Replaces the first `n` exact rows by decoded ones.
    fn replace_exact(&mut self, n: usize, kv_dim: usize, keys: &[f32], values: &[f32]) -> Result<()> {
        let exact = self.exact.keys.len() / kv_dim;
        self.rows.truncate(self.rows.tokens() - exact)?;
        self.rows.push(self.pos, keys, values)?;
        self.exact.iter_mut().for_each(|rows| drop(rows.drain(..n * kv_dim)));
        self.pos += n;
        self.rows.push(self.pos, &self.exact.keys, &self.exact.values)
    }

    fn truncate(&mut self, len: usize, kv_dim: usize) -> Result<()> {
        let coded = self.rows.tokens() - self.exact.keys.len() / kv_dim;
        self.exact.iter_mut().for_each(|rows| rows.truncate(len.saturating_sub(coded) * kv_dim));
        self.rows.truncate(len)
    }
}

impl Store for CacheGenStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let Grouped { pos: first, rows, exact } = &mut self.grouped;
        if exact.keys.is_empty() {
            *first = pos;
        }
        exact.keys.extend_from_slice(k);
        exact.values.extend_from_slice(v);
        rows.push(pos, k, v)
    }

    fn code_group(&mut self, before: &mut [&mut dyn Store]) -> Result<()> {
        let Some(bits) = &mut self.last else { return Ok(()) };
        let kv_dim = self.geometry.kv_dim();
        let first = (before.len() + 1).checked_sub(self.layers);
        let others = first.and_then(|first| before.get_mut(first..)).unwrap_or_default();
        let mut group: Vec<&mut Grouped> = others.iter_mut().filter_map(|store| store.grouped()).collect();
        group.push(&mut self.grouped);
        if group.len() != self.layers {
            return Err(Error::argument("layers that are coded together must all be coded"));
        }
        // After a step that failed in between, some layers may have tokens that others still have in their window.
        let tokens = group.iter().map(|layer| layer.exact.keys.len() / kv_dim).min().unwrap_or(0);
        if tokens == 0 {
            return Ok(());
        }
        let pos = group[0].pos;
        let rows = Pair::of(|side| {
            let token =
                |t: usize| group.iter().flat_map(move |layer| &layer.exact[side][t * kv_dim..][..kv_dim]);
            (0..tokens).flat_map(token).copied().collect::<Vec<f32>>()
        });
        let decoded = bits.code(pos, &rows)?;
        for (l, layer) in group.into_iter().enumerate() {
            let own = |side| {
                let tokens = decoded[side].chunks_exact(self.layers * kv_dim);
                tokens.flat_map(|token| &token[l * kv_dim..][..kv_dim]).copied().collect::<Vec<f32>>()
            };
            layer.replace_exact(tokens, kv_dim, &own(Side::Keys), &own(Side::Values))?;
        }
        Ok(())
    }

    fn grouped(&mut self) -> Option<&mut Grouped> {
        Some(&mut self.grouped)
    }

    fn len(&self) -> usize {
        self.grouped.rows.tokens()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        let mut left = len;
        if let Some(bits) = &mut self.last {
            for chunk in &mut bits.chunks {
                chunk.valid = chunk.valid.min(left);
                left -= chunk.valid;
            }
            bits.chunks.retain(|chunk| chunk.valid > 0);
        }
        self.grouped.truncate(len, self.geometry.kv_dim())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        self.grouped.rows.attend(head, first, q, sums)
    }

    fn footprint(&self) -> Footprint {
        let bits = self.last.as_ref();
        Footprint {
            kept: bits.map_or(0, |bits| bits.chunks.iter().map(|chunk| chunk.frame.len()).sum()),
            working: self.grouped.rows.footprint().kept,
            shared: bits.map_or(0, |bits| bits.planes_len),
            ..Footprint::default()
        }
    }
}
