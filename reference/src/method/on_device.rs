//! The device's view of a method: its element type, codes, maps and plans.

use pq_core::{CodebookBuf, Window};

use super::kind::{Bitstream, CutHead, DeviceCodes, DeviceCuts, Retrieval};
use super::{HybridPlan, Method, PagedMemory, TransformedHead};
use crate::cache::{ElementType, Geometry};
use crate::model::Config;
use crate::side::Pair;
use crate::{Error, Profile, Result};

impl Method {
    /// Whether it keeps every token exact.
    pub(crate) fn is_dense(&self) -> bool {
        self.kind.dense().is_some()
    }

    /// The pages of the tokens on a device; `None` if each sequence has memory for its maximum length.
    pub(crate) fn device_pages(&self) -> Option<PagedMemory> {
        self.kind.device_pages()
    }

    /// The element type of the model and of exact rows on a device: that of the method's exact rows.
    ///
    /// # Errors
    /// [`Error::Argument`] for 32 bits.
    pub fn device_element(&self) -> Result<kv_gpu::Element> {
        match self.exact {
            ElementType::F16 => Ok(kv_gpu::Element::F16),
            ElementType::Bf16 => Ok(kv_gpu::Element::Bf16),
            ElementType::F32 => Err(Error::Argument(format!(
                "{} keeps rows in 32 bits, and the device has 16: pass dtype or exact as f16 or bf16, or --device cpu",
                self.spec()
            ))),
        }
    }

    /// The tokens that stay exact.
    pub(crate) const fn window(&self) -> Window {
        self.window
    }

    /// The codes of a method that attends to codes on a device, else `None`.
    pub(crate) fn device_codes(&self, config: &Config) -> Result<Option<DeviceCodes>> {
        let codes = self.kind.device_codes(Geometry::of(config)).filter(|_| self.exact_layers.is_empty());
        codes.transpose().map_err(|e| self.named(e))
    }

    /// The codebooks of every layer and head of a method with [`Self::device_codes`] of untransformed rows.
    pub(crate) fn codebooks(
        &self,
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<Vec<Pair<CodebookBuf>>>> {
        let codebooks = |l| self.kind.codebooks(Geometry::of(config), l, profile);
        (0..config.n_layers).filter_map(codebooks).collect()
    }

    /// Whether a device supports it as uniform 4-bit codes.
    pub(crate) fn is_device_int4(&self) -> bool {
        self.kind.is_device_int4() && self.exact_layers.is_empty()
    }

    /// The device plan of a method whose store is a bitstream, else `None`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bitstream that a device does not encode.
    pub(crate) fn device_bitstream(&self) -> Result<Option<Bitstream>> {
        self.kind.device_bitstream().filter(|_| self.exact_layers.is_empty()).transpose()
    }

    /// The codec's planes of every layer of a method with [`Self::device_bitstream`].
    pub(crate) fn layer_planes(
        &self,
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<Pair<codec_core::PlaneBuf>>> {
        let planes = self.codec_planes(config, profile)?;
        let layer = |l| Pair::try_of(|side| Ok(planes.plane(0, l, side.into())?.clone()));
        (0..config.n_layers).map(layer).collect()
    }

    /// The device plan of a method that attends to rows of reduced rank, else `None`.
    pub(crate) fn device_cuts(&self) -> Option<DeviceCuts> {
        self.kind.device_cuts().filter(|_| self.exact_layers.is_empty())
    }

    /// The rotations and ranks of every layer and head of a method with [`Self::device_cuts`].
    pub(crate) fn cut_heads(&self, config: &Config, profile: &Profile) -> Result<Vec<Vec<CutHead>>> {
        let none = || Err(Error::Argument(format!("method {} cuts no rows", self.name)));
        self.kind.cut_heads(config, profile).unwrap_or_else(none).map_err(|e| self.named(e))
    }

    /// The device plan of hybrid attention; `None` for other methods.
    pub(crate) fn device_hybrid(&self, config: &Config) -> Result<Option<HybridPlan>> {
        let plan = self.kind.device_hybrid(Geometry::of(config)).filter(|_| self.exact_layers.is_empty());
        plan.transpose().map_err(|e| self.named(e))
    }

    /// The codes of every layer and head of a method with codes of transformed rows.
    pub(crate) fn transformed_heads(
        &self,
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<Vec<TransformedHead>>> {
        let none = || Err(Error::Argument(format!("method {} transforms no rows", self.name)));
        self.kind.transformed_heads(config, profile).unwrap_or_else(none).map_err(|e| self.named(e))
    }

    /// The device plan of a method that retrieves exact rows by codes, else `None`.
    pub(crate) fn device_retrieval(&self, config: &Config) -> Result<Option<Retrieval>> {
        let retrieval = self.kind.device_retrieval(Geometry::of(config)).transpose()?;
        Ok(retrieval.filter(|_| self.exact_layers.is_empty()))
    }

    /// The codebooks of the keys of every layer and head of a method with [`Self::device_retrieval`].
    pub(crate) fn key_codebooks(&self, config: &Config, profile: &Profile) -> Result<Vec<Vec<CodebookBuf>>> {
        let codebooks = |l| self.kind.key_codebooks(Geometry::of(config), l, profile);
        let all: Result<_> = (0..config.n_layers).filter_map(codebooks).collect();
        all.map_err(|e| self.named(e))
    }
}
