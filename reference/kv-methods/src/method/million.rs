//! MILLION: attention on product-quantizer codes of rotated keys and of values, with codebooks that are
//! trained offline, one per layer, head and side (the released code shares one over all layers and heads).

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
#[cfg(feature = "cuda")]
use kv_device::plan::{CodedRows, Plan};
use kv_llama::{Footprint, HeadFit};
use kv_model::{Config, Model, Rope};
use pq_core::{
    CodebookBuf, CodedTokens, CodesBuf, Outlier, TrainOptions, decode_into, extract_outliers, lut_into,
    restore_outliers, train_batch,
};
use svd_core::SoftmaxStats;

use super::kind::{Entry, Kind, SEED, Site};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::paged::Paging;
use super::pq_code::{CODE_TILE, PqCode, attend_to_codes, check_codes};
use crate::cache::{CodingError, Geometry, Store, attend_rows, unseen_error};
use crate::calibrate::{Calibration, mean_row, rotated_keys};
use crate::{Error, Profile, Result};

pub(super) const MILLION: Entry = Entry {
    names: &["million"],
    help: "\
  million           attention on PQ codes                                 k=64x8 v=64x8 iterations=8
                                                                          outliers=PERCENT kept exact
                      on a device: pages of N tokens, of a pool of M      pages=N pool=M
",
    examples: &[
        "million:k=8/1:v=8/1:exact=f32:window=4",
        "million:k=8/1:v=8/1:outliers=2:exact=f32:window=4",
    ],
    parse: |s| {
        let codes = PqCode::take_both(s, 8, 2)?;
        let (iterations, outliers) = (s.positive("iterations", 8)?, s.percent("outliers", 0)?);
        Ok(Arc::new(Million { codes, iterations, outliers, pages: Paging::take(s, CODE_TILE)? }))
    },
};

#[derive(Debug)]
struct Million {
    codes: Pair<PqCode>,
    iterations: usize,
    outliers: usize, // percent
    pages: Option<Paging>,
}

impl Million {
    fn key(&self, side: Side, l: usize, head: usize, part: &str) -> String {
        let (code, letter) = (self.codes[side], side.letter());
        format!("million/{code}/{}/{letter}/{l}/{head}/{part}", self.outliers)
    }

    /// The codebooks of layer `l`, one pair per KV head.
    fn trained(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<Pair<CodebookBuf>>> {
        let codebook = |side: Side, head: usize| -> Result<_> {
            let shape = self.codes[side].shape(geometry.head_dim)?;
            let centroids = profile.floats(&self.key(side, l, head, "centroids"))?;
            CodebookBuf::new(shape, centroids).map_err(|e| Error::Profile(e.to_string()))
        };
        (0..geometry.n_kv_heads).map(|head| Pair::try_of(|side| codebook(side, head))).collect()
    }

    /// The relative errors of layer `l`'s codes on the calibration text.
    fn errors(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<Pair<f64>>> {
        let error = |side: Side, head: usize| match profile.floats(&self.key(side, l, head, "error"))? {
            &[error] => Ok(error.into()),
            _ => Err(Error::Profile("more or less than one coding error of a head".into())),
        };
        (0..geometry.n_kv_heads).map(|head| Pair::try_of(|side| error(side, head))).collect()
    }
}

impl Kind for Million {
    fn check(&self, config: &Config) -> Result<()> {
        check_codes(self.codes, "million", config)
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.pages.map(|_| "pages")
    }

    /// Trains codebooks for every head of every layer.
    fn calibrate(
        &self,
        model: &Model,
        rope: &Rope,
        samples: &Calibration,
        profile: &mut Profile,
    ) -> Result<()> {
        let geometry = Geometry::of(&model.config);
        let options =
            TrainOptions { iterations: self.iterations, seed: SEED, encode: true, ..Default::default() };
        for (l, layer) in samples.layers.iter().enumerate() {
            for side in Side::ALL {
                let rows = |head| -> Result<Vec<f32>> {
                    let mut rows = match side {
                        Side::Keys => rotated_keys(rope.layer(l), &geometry.head_rows(head, &layer.keys)),
                        Side::Values => geometry.head_rows(head, &layer.values),
                    };
                    if self.outliers > 0 {
                        let centre = mean_row(&rows, geometry.head_dim);
                        take_outliers(&mut rows, &centre, self.outliers)?;
                    }
                    Ok(rows)
                };
                let sets = (0..geometry.n_kv_heads).map(rows).collect::<Result<Vec<_>>>()?;
                let sets: Vec<&[f32]> = sets.iter().map(Vec::as_slice).collect();
                let trained = train_batch(self.codes[side].shape(geometry.head_dim)?, &sets, &options)?;
                for (head, (trained, rows)) in trained.into_iter().zip(sets).enumerate() {
                    let squares: f64 = rows.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                    let error = if squares > 0.0 { trained.error / squares } else { 0.0 };
                    let n = layer.values.len() / geometry.kv_dim();
                    let error = unseen_error(error, n, self.codes[side].shape(geometry.head_dim)?.ksub());
                    profile.put_floats(self.key(side, l, head, "centroids"), trained.centroids);
                    profile.put_floats(self.key(side, l, head, "error"), vec![error as f32]);
                }
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        site.layers(|l| {
            let codebooks = Arc::new(self.trained(site.profile, site.geometry, l)?);
            let errors = Arc::new(self.errors(site.profile, site.geometry, l)?);
            Ok(MillionStore::new(site.geometry, site.rope(l), codebooks, errors, self.outliers))
        })
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for Million {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        let mut limits = Limit::of_rings(window);
        limits.push(Limit::new(self.outliers > 0, "outliers=1", "a device codes all elements", "outliers=0"));
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let geometry = Geometry::of(config);
        let quantizers = Pair::try_of(|side| self.codes[side].shape(geometry.head_dim))?;
        let trained = |profile| (0..config.n_layers).map(|l| self.trained(profile, geometry, l)).collect();
        let rows = CodedRows::Plain(profile.map(trained).transpose()?);
        Ok(Plan::Codes { quantizers, rows, pages: self.pages.map(Paging::memory) })
    }
}

/// One head's keys or values.
#[derive(Clone)]
struct Coded {
    codes: CodesBuf,
    centre: Vec<f32>,       // (head_dim,) mean of the first rows; empty without outliers
    outliers: Vec<Outlier>, // of all rows
    error: CodingError,     // of all tokens coded since the first one
}

impl Coded {
    fn new(codebook: &CodebookBuf) -> Self {
        let codes = CodesBuf::new(codebook.view().shape());
        Self { codes, centre: vec![], outliers: vec![], error: CodingError::default() }
    }

    /// Appends rows (n, head_dim), with `percent` of the elements kept exact next to the codes.
    fn append(&mut self, codebook: &CodebookBuf, mut rows: Vec<f32>, percent: usize) -> Result<()> {
        let (dim, start) = (codebook.view().shape().dim(), self.codes.view().n());
        if percent > 0 {
            if self.centre.is_empty() {
                self.centre = mean_row(&rows, dim);
            }
            let first = (start * dim) as u32;
            let found = take_outliers(&mut rows, &self.centre, percent)?;
            self.outliers.extend(found.iter().map(|x| Outlier { index: first + x.index, ..*x }));
        }
        self.codes.append(&codebook.view(), &rows)?;
        let mut decoded = vec![0.0; rows.len()];
        decode_into(&codebook.view(), &self.codes.view(), start, &mut decoded)?;
        self.error.add(rows.len() / dim, rows.iter().zip(&decoded).map(|(&x, decoded)| (x, x - decoded)));
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        self.codes.truncate(len);
        let end = len * self.codes.view().shape().dim();
        self.outliers.retain(|x| (x.index as usize) < end);
        if len == 0 {
            self.centre.clear();
            self.error = CodingError::default();
        }
    }

    /// Decodes codes and outliers to rows.
    fn decoded(&self, codebook: &CodebookBuf) -> Result<Vec<f32>> {
        let codes = self.codes.view();
        let mut rows = vec![0.0; codes.n() * codes.shape().dim()];
        decode_into(&codebook.view(), &codes, 0, &mut rows)?;
        restore_outliers(&mut rows, &self.outliers)?;
        Ok(rows)
    }

    fn bytes(&self) -> usize {
        self.codes.view().size() + size_of_val(&self.outliers[..]) + size_of_val(&self.centre[..])
    }
}

/// Replaces the `percent` of elements farthest from their channel's centre by that centre, and returns them.
fn take_outliers(rows: &mut [f32], centre: &[f32], percent: usize) -> Result<Vec<Outlier>> {
    let count = (rows.len() * percent).div_ceil(100);
    let (mut distances, mut indices) = (vec![0.0; rows.len()], vec![0; count]);
    let mut outliers = vec![Outlier::default(); count];
    extract_outliers(rows, centre, &mut distances, &mut indices, &mut outliers)?;
    Ok(outliers)
}

/// MILLION: keys (rotated) and values are product-quantized; attention runs on the codes.
///
/// With outliers (the paper's ablation, not its method), rows are decoded and corrected instead.
#[derive(Clone)]
struct MillionStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    codebooks: Arc<Vec<Pair<CodebookBuf>>>, // (n_kv_heads,), offline, shared by all sequences
    errors: Arc<Vec<Pair<f64>>>,            // (n_kv_heads,), of the calibration
    outliers: usize,                        // percent of the elements kept exact
    heads: Vec<Pair<Coded>>,
    len: usize,
}

impl MillionStore {
    fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        codebooks: Arc<Vec<Pair<CodebookBuf>>>,
        errors: Arc<Vec<Pair<f64>>>,
        outliers: usize,
    ) -> Self {
        let heads = codebooks.iter().map(|books| Pair::of(|side| Coded::new(&books[side]))).collect();
        Self { geometry, rope, codebooks, errors, outliers, heads, len: 0 }
    }
}

impl Store for MillionStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (head, (books, Pair { keys, values })) in self.codebooks.iter().zip(&mut self.heads).enumerate() {
            keys.append(&books.keys, self.geometry.head_rows(head, &rotated), self.outliers)?;
            values.append(&books.values, self.geometry.head_rows(head, v), self.outliers)?;
        }
        self.len += k.len() / kv_dim;
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().flat_map(Pair::iter_mut).for_each(|coded| coded.truncate(len));
        self.len = len;
        Ok(())
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let (books, Pair { keys, values }) = (&self.codebooks[head], &self.heads[head]);
        if self.outliers > 0 {
            let (keys, values) = (keys.decoded(&books.keys)?, values.decoded(&books.values)?);
            let start = first * self.geometry.head_dim;
            return attend_rows(q, &keys[start..], &values[start..], out, stats);
        }
        let mask: Option<Vec<f32>> = (first > 0).then(|| {
            let row = (0..self.len).map(|t| if t < first { f32::NEG_INFINITY } else { 0.0 });
            row.cycle().take(stats.len() * self.len).collect()
        });
        let tokens = CodedTokens::new(keys.codes.view(), values.codes.view(), books.values.view())?
            .with_bias(mask.as_deref());
        let mut luts = vec![0.0; stats.len() * tokens.key_shape().lut_len()];
        let luts = lut_into(&books.keys.view(), q, &mut luts)?;
        attend_to_codes(&luts, &tokens, out, stats)
    }

    fn footprint(&self) -> Footprint {
        let codebooks = self.codebooks.iter().flat_map(Pair::iter);
        Footprint {
            kept: self.heads.iter().flat_map(Pair::iter).map(Coded::bytes).sum(),
            shared: codebooks.map(|codebook| 4 * codebook.view().shape().codebook_len()).sum(),
            ..Footprint::default()
        }
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        let fit = |head: usize, side: Side| {
            self.heads[head][side].error.fit(layer, head, side, self.errors[head][side])
        };
        (0..self.heads.len()).flat_map(|head| Side::ALL.map(|side| fit(head, side))).collect()
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
