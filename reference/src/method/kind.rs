//! The interface between the registry and a method: parsing its settings and building its stores.

use std::fmt::Debug;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use pq_core::{CodebookBuf, PqShape};

#[cfg(feature = "cuda")]
use super::budget::Budget;
#[cfg(feature = "cuda")]
use super::head_maps::HeadMaps;
#[cfg(feature = "cuda")]
use super::hybrid::HybridPlan;
#[cfg(feature = "cuda")]
use super::offload::RowHome;
#[cfg(feature = "cuda")]
use super::paged::PagedMemory;
#[cfg(feature = "cuda")]
use super::pqklt::{RowForm, TransformedHead};
use super::settings::Settings;
use crate::cache::{DenseStore, ElementType, Geometry, Store};
use crate::calibrate::Calibration;
use crate::model::{Config, Model, Rope};
use crate::side::Pair;
use crate::{Profile, Result};

/// Seed of all random choices in the methods.
pub(super) const SEED: u64 = 0x6b76;

/// An entry of the registry.
pub(super) struct Entry {
    /// Its names.
    pub names: &'static [&'static str],
    /// Its lines of the help text, each with a newline.
    pub help: &'static str,
    /// Takes its settings.
    pub parse: fn(&mut Settings<'_>) -> Result<Arc<dyn Kind>>,
}

/// A method with its own settings.
pub(super) trait Kind: Debug + Send + Sync {
    /// Default number of tokens that leave the window at a time.
    fn batch(&self) -> usize {
        1
    }

    /// The element type of a method that keeps every token exact in its store, without sinks or window.
    fn dense(&self) -> Option<ElementType> {
        None
    }

    /// Rejects a model that the settings do not fit.
    fn check(&self, _config: &Config) -> Result<()> {
        Ok(())
    }

    /// Whether it needs a profile.
    fn needs_profile(&self) -> bool {
        false
    }

    /// Whether tokens that leave the window are dropped, so that steps attend to sinks and window alone.
    fn drops(&self) -> bool {
        false
    }

    /// A setting that was given but only affects a device.
    fn device_setting(&self) -> Option<&'static str> {
        None
    }

    /// Adds its entries to a profile.
    fn calibrate(
        &self,
        _model: &Model,
        _rope: &Rope,
        _samples: &Calibration,
        _profile: &mut Profile,
    ) -> Result<()> {
        Ok(())
    }

    /// An empty store for every layer: see [`Site::layers`].
    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>>;

    /// The model with the method's rotations folded into its weights, if it folds any.
    fn fold(&self, _model: &Model, _profile: &Profile) -> Result<Option<Model>> {
        Ok(None)
    }

    /// The model for a device, if it differs: that of [`Self::fold`], unless more is folded there.
    #[cfg(feature = "cuda")]
    fn device_fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        self.fold(model, profile)
    }

    /// The codes, for a method whose attention on codes runs on a device.
    #[cfg(feature = "cuda")]
    fn device_codes(&self, _geometry: Geometry) -> Option<Result<DeviceCodes>> {
        None
    }

    /// The codebooks of layer `l`, one pair per KV head, for a method with [`Self::device_codes`] of
    /// untransformed rows.
    #[cfg(feature = "cuda")]
    fn codebooks(
        &self,
        _geometry: Geometry,
        _l: usize,
        _profile: &Profile,
    ) -> Option<Result<Vec<Pair<CodebookBuf>>>> {
        None
    }

    /// The device plan of a method that retrieves tokens by codes of their keys.
    #[cfg(feature = "cuda")]
    fn device_retrieval(&self, _geometry: Geometry) -> Option<Result<Retrieval>> {
        None
    }

    /// The codebooks of the keys of layer `l`, one per KV head, for a method with [`Self::device_retrieval`].
    #[cfg(feature = "cuda")]
    fn key_codebooks(
        &self,
        _geometry: Geometry,
        _l: usize,
        _profile: &Profile,
    ) -> Option<Result<Vec<CodebookBuf>>> {
        None
    }

    /// The device plan of a method with hybrid attention over codes and exact rows.
    #[cfg(feature = "cuda")]
    fn device_hybrid(&self, _geometry: Geometry) -> Option<Result<HybridPlan>> {
        None
    }

    /// The codes of every layer and head, for a method with codes of transformed rows on a device.
    #[cfg(feature = "cuda")]
    fn transformed_heads(
        &self,
        _config: &Config,
        _profile: &Profile,
    ) -> Option<Result<Vec<Vec<TransformedHead>>>> {
        None
    }

    /// The pages of the method's tokens on a device; `None` if each sequence has memory for its maximum
    /// length.
    #[cfg(feature = "cuda")]
    fn device_pages(&self) -> Option<PagedMemory> {
        None
    }

    /// Whether these are the uniform codes that a device supports: 4-bit keys per channel over 64 tokens, and
    /// 4-bit values per token over 64 channels.
    #[cfg(feature = "cuda")]
    fn is_device_int4(&self) -> bool {
        false
    }

    /// The device plan of a method whose store is a bitstream.
    #[cfg(feature = "cuda")]
    fn device_bitstream(&self) -> Option<Result<Bitstream>> {
        None
    }

    /// The device plan of a method that attends to all tokens at reduced rank, without codes.
    #[cfg(feature = "cuda")]
    fn device_cuts(&self) -> Option<DeviceCuts> {
        None
    }

    /// The rotations and ranks of every layer and head, for a method with [`Self::device_cuts`].
    #[cfg(feature = "cuda")]
    fn cut_heads(&self, _config: &Config, _profile: &Profile) -> Option<Result<Vec<Vec<CutHead>>>> {
        None
    }

    /// The relative step sizes of keys and values, for a method whose store is a bitstream, comparable
    /// between methods with the same name of steps.
    fn coarseness(&self) -> Option<(&'static str, Pair<f32>)> {
        None
    }

    /// The codec's planes, for a method whose store is a bitstream.
    fn planes(&self, _config: &Config, _profile: &Profile) -> Option<Result<codec_core::Profile>> {
        None
    }
}

/// Attention on the codes of all tokens.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceCodes {
    pub quantizers: Pair<PqShape>,
    /// The form of transformed rows ([`Kind::transformed_heads`]).
    pub transformed: Option<RowForm>,
}

/// Rows stored as a bitstream.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bitstream {
    /// Whether planes have a transform.
    pub has_transform: bool,
    /// The kind of their models.
    pub models: codec_core::ModelKind,
}

/// Attention to rows of reduced rank.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceCuts {
    /// Fractions of the dimensions to keep.
    pub fractions: Pair<f64>,
    /// Whether prompt tokens also attend to truncated rows.
    pub cuts_prompts: bool,
}

/// A head with truncated rows: the first components, up to the rank, in the basis of the maps (keys) or of
/// the folded weights (values).
#[cfg(feature = "cuda")]
pub(crate) struct CutHead {
    pub maps: HeadMaps,
    pub ranks: Pair<usize>,
}

/// Attention over exact rows retrieved by codes of their keys.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub(crate) struct Retrieval {
    pub quantizer: PqShape,
    pub budget: Budget,
    /// Iterations for codebooks trained on the prompt; `None` for the profile's codebooks.
    pub training: Option<usize>,
    pub home: RowHome,
    /// Rows per head that stay resident on the device, if a step selects fewer.
    pub held: usize,
}

/// The context in which stores are built.
pub(super) struct Site<'a> {
    pub config: &'a Config,
    pub geometry: Geometry,
    pub model_rope: &'a Arc<Rope>,
    pub profile: &'a Profile,
    pub exact: ElementType, // element type of exact rows
    pub reserved: usize,    // tokens in sinks and window
    pub exact_layers: &'a [usize],
}

impl Site<'_> {
    /// The rotary embedding of layer `l`.
    pub fn rope(&self, l: usize) -> Arc<Rope> {
        self.model_rope.shared_layer(l)
    }

    /// A store of exact rows for layer `l`.
    pub fn dense(&self, l: usize) -> DenseStore {
        DenseStore::new(self.exact, self.geometry, self.rope(l))
    }

    /// A store for every layer: exact rows in uncompressed layers, `make(layer)` in the others.
    pub fn layers<S: Store + 'static>(
        &self,
        mut make: impl FnMut(usize) -> Result<S>,
    ) -> Result<Vec<Box<dyn Store>>> {
        let store = |l| -> Result<Box<dyn Store>> {
            Ok(if self.exact_layers.contains(&l) { Box::new(self.dense(l)) } else { Box::new(make(l)?) })
        };
        (0..self.config.n_layers).map(store).collect()
    }
}
