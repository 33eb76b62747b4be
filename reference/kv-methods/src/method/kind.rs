//! The interface between the registry and a method: parsing its settings and building its stores.

use std::fmt::Debug;
use std::sync::Arc;

use kv_attend::ElementType;
use kv_attend::owner::Pair;
use kv_model::{Config, Model, Rope};

#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::settings::Settings;
use crate::cache::{DenseStore, Geometry, Store};
use crate::calibrate::Calibration;
use crate::{Profile, Result};

/// Seed of all random choices in the methods.
pub(super) const SEED: u64 = 0x6b76;

/// Default numbers of sinks and of tokens in the window.
pub(super) const SINKS_AND_WINDOW: [usize; 2] = [4, 64];

/// The name of the steps of bitstreams without loss; see [`Kind::coarseness`].
pub(super) const LOSSLESS: &str = "lossless";

/// An entry of the registry.
pub(super) struct Registration {
    /// Its names.
    pub names: &'static [&'static str],
    /// Its lines of the help text, each with a newline.
    pub help: &'static str,
    /// One setting for each kind of store that it makes: see [`method_examples`](super::method_examples).
    pub examples: &'static [&'static str],
    /// Takes its settings.
    pub parse: fn(&mut Settings<'_>) -> Result<Arc<dyn Kind>>,
}

/// A method with its own settings.
pub(super) trait Kind: Debug + Send + Sync {
    /// Default number of tokens that leave the window at a time.
    fn batch(&self) -> usize {
        1
    }

    /// Default numbers of sinks and of the most recent tokens, which stay exact.
    fn sinks_and_window(&self) -> [usize; 2] {
        SINKS_AND_WINDOW
    }

    /// Whether its stores watch all queries, not only the last ones of a prompt.
    fn watches_all(&self) -> bool {
        false
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

    /// Adds its entries to a profile, if it [needs](Self::needs_profile) one.
    fn calibrate(&self, _samples: &Calibration<'_>, _profile: &mut Profile) -> Result<()> {
        Ok(())
    }

    /// An empty store for every layer: see [`BuildContext::layers`].
    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>>;

    /// Whether [`Self::fold`] folds anything.
    fn folds(&self) -> bool {
        false
    }

    /// The model with the method's rotations folded into its weights, if it folds any.
    fn fold(&self, _model: &Model, _profile: &Profile) -> Result<Option<Model>> {
        Ok(None)
    }

    /// Its form on a device, or why no device has it and what to pass there.
    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels(""))
    }

    /// The relative step sizes of keys and values, for a method whose store is a bitstream, comparable
    /// between methods with the same name of steps; every other name is lossier than [`LOSSLESS`].
    fn coarseness(&self) -> Option<(&'static str, Pair<f32>)> {
        None
    }

    /// The codec's planes, for a method whose store is a bitstream.
    fn planes(&self, _config: &Config, _profile: &Profile) -> Option<Result<codec_core::Profile>> {
        None
    }
}

/// The context in which stores are built.
pub(super) struct BuildContext<'a> {
    pub config: &'a Config,
    pub geometry: Geometry,
    pub model_rope: &'a Arc<Rope>,
    pub profile: &'a Profile,
    pub exact: ElementType, // element type of exact rows
    pub recent: usize,      // tokens in the window
    pub reserved: usize,    // tokens in sinks and window
    pub exact_layers: &'a [usize],
}

impl BuildContext<'_> {
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
