//! The interface between the registry and a method: how its settings are read, and what they make.

use std::fmt::Debug;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use pq_core::CodebookBuf;
use pq_core::PqShape;

#[cfg(feature = "cuda")]
use super::budget::Budget;
#[cfg(feature = "cuda")]
use super::cost::Iterations;
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

/// Everything random in the methods starts from it.
pub(super) const SEED: u64 = 0x6b76;

/// A line of the registry.
pub(super) struct Entry {
    /// The names it answers to.
    pub names: &'static [&'static str],
    /// Its lines of the help text, each with its newline.
    pub help: &'static str,
    /// Takes its settings.
    pub parse: fn(&mut Settings<'_>) -> Result<Arc<dyn Kind>>,
}

/// A method with its own settings.
pub(super) trait Kind: Debug + Send + Sync {
    /// Tokens that leave the window at once, unless the user says otherwise.
    fn batch(&self) -> usize {
        1
    }

    /// The element type of a method that keeps every token exact, in its store: it has neither sinks nor
    /// window.
    fn dense(&self) -> Option<ElementType> {
        None
    }

    /// Refuses a model that the settings do not fit.
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

    /// A setting that is given and has an effect on a device only.
    fn device_setting(&self) -> Option<&'static str> {
        None
    }

    /// Refuses files that are needed on the CPU and cannot be read.
    fn check_on_cpu(&self) -> Result<()> {
        Ok(())
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

    /// The model that a device runs, if it is another one: that of [`Self::fold`], unless more is folded
    /// there.
    #[cfg(feature = "cuda")]
    fn device_fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        self.fold(model, profile)
    }

    /// The codes of a method whose attention on codes a device has.
    #[cfg(feature = "cuda")]
    fn device_codes(&self, _geometry: Geometry) -> Option<Result<DeviceCodes>> {
        None
    }

    /// The codebooks of layer `l`, one pair per kv head, for a method with [`Self::device_codes`] of rows as
    /// they are.
    #[cfg(feature = "cuda")]
    fn codebooks(
        &self,
        _geometry: Geometry,
        _l: usize,
        _profile: &Profile,
    ) -> Option<Result<Vec<Pair<CodebookBuf>>>> {
        None
    }

    /// The product quantizer of a method that trains its codebooks on the prompt.
    fn prompt_quantizer(&self, _geometry: Geometry) -> Option<Result<PqShape>> {
        None
    }

    /// What a device needs of a method that attends to the tokens that codes of keys choose.
    #[cfg(feature = "cuda")]
    fn device_retrieval(&self, _geometry: Geometry) -> Option<Result<Retrieval>> {
        None
    }

    /// The codebooks of the keys of layer `l`, one per kv head, for a method with [`Self::device_retrieval`].
    #[cfg(feature = "cuda")]
    fn key_codebooks(
        &self,
        _geometry: Geometry,
        _l: usize,
        _profile: &Profile,
    ) -> Option<Result<Vec<CodebookBuf>>> {
        None
    }

    /// What a device needs of a method that attends to codes and to the exact rows of the best tokens.
    #[cfg(feature = "cuda")]
    fn device_hybrid(&self, _geometry: Geometry) -> Option<Result<HybridPlan>> {
        None
    }

    /// The codes of every layer and head, for a method of which a device has codes of transformed rows.
    #[cfg(feature = "cuda")]
    fn transformed_heads(
        &self,
        _config: &Config,
        _profile: &Profile,
    ) -> Option<Result<Vec<Vec<TransformedHead>>>> {
        None
    }

    /// The pages in which a device keeps a method's tokens; none where each sequence has memory for its
    /// longest.
    #[cfg(feature = "cuda")]
    fn device_pages(&self) -> Option<PagedMemory> {
        None
    }

    /// Whether it is what a device has of uniform codes: 4 bits of keys by channel over 64 tokens, and of
    /// values by token over 64 channels.
    #[cfg(feature = "cuda")]
    fn is_device_int4(&self) -> bool {
        false
    }

    /// What a device needs of a method whose store is a bitstream.
    #[cfg(feature = "cuda")]
    fn device_bitstream(&self) -> Option<Result<Bitstream>> {
        None
    }

    /// What a device needs of a method that attends to rows of reduced rank: of all tokens, and without
    /// codes.
    #[cfg(feature = "cuda")]
    fn device_cuts(&self) -> Option<DeviceCuts> {
        None
    }

    /// The rotations and ranks of every layer and head, for a method with [`Self::device_cuts`].
    #[cfg(feature = "cuda")]
    fn cut_heads(&self, _config: &Config, _profile: &Profile) -> Option<Result<Vec<Vec<CutHead>>>> {
        None
    }

    /// How coarse the steps of keys and of values are, for a method whose store is a bitstream: numbers that
    /// compare with those of methods whose steps have the same name.
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
    /// How, for rows that are transformed ([`Kind::transformed_heads`]).
    pub transformed: Option<RowForm>,
}

/// Rows that pass through a bitstream.
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
    /// Parts of the dimensions that stay.
    pub fractions: Pair<f64>,
    /// Whether the tokens of a prompt attend to cut rows, too.
    pub cuts_prompts: bool,
}

/// A head whose rows are cut: in the basis of the maps, and of values in that which weights are folded to,
/// the first components up to the rank stay.
#[cfg(feature = "cuda")]
pub(crate) struct CutHead {
    pub maps: HeadMaps,
    pub ranks: Pair<usize>,
}

/// Attention to the exact rows of tokens that codes of keys choose.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub(crate) struct Retrieval {
    pub quantizer: PqShape,
    pub budget: Budget,
    /// Iterations of codebooks that are trained on the prompt; else they are the profile's.
    pub training: Option<Iterations>,
    pub home: RowHome,
    /// Rows of a head that stay on the device, if a step chooses fewer.
    pub held: usize,
}

/// Where stores are built.
pub(super) struct Site<'a> {
    pub config: &'a Config,
    pub geometry: Geometry,
    pub model_rope: &'a Arc<Rope>,
    pub profile: &'a Profile,
    pub exact: ElementType, // of rows that stay exact
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

    /// A store for every layer: exact rows in the layers that are left uncompressed, `make(layer)` in the
    /// others.
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
