//! The bases of all heads in a profile: means and second moments of keys, and means of values. They serve any
//! bits.

use std::fmt::Display;

use kv_attend::owner::Side;
use kv_model::{Config, Rope};
use kv_owners::sq::{Basis, Bits, Codes};
use pq_core::sq::{MAX_BLOCK, MAX_DIM, Shape, TILE};
use svd_core::{Hadamard, Rows};

use super::decoded::{decode_keys, decode_values};
use crate::cache::{Geometry, HeadStore};
use crate::calibrate::{Calibration, LayerSamples};
use crate::method::kind::BuildContext;
use crate::method::settings::Settings;
use crate::{Error, Profile, Result};

/// Bases for blocks of a number of tokens.
#[derive(Clone, Copy, Debug)]
pub(in crate::method) struct Bases {
    pub block: usize,
}

impl Bases {
    /// Long blocks have fewer scales, and queries are turned to fewer of them; rows are exact until theirs is
    /// complete.
    const BLOCK: usize = 256;

    /// Takes `block=`.
    pub fn parse(s: &mut Settings<'_>) -> Result<Self> {
        let block = s.positive("block", Self::BLOCK)?;
        if !block.is_multiple_of(TILE) || block > MAX_BLOCK {
            return Err(Error::Argument(format!(
                "method {}: block={block}: must be a multiple of {TILE} tokens, at most {MAX_BLOCK}",
                s.name
            )));
        }
        Ok(Self { block })
    }

    /// Rejects heads that have no such codes; `name` is that of the method.
    pub fn check(name: &str, config: &Config, value_bits: u32) -> Result<()> {
        let dim = config.head_dim;
        let wrong =
            |e: &dyn Display| Error::Argument(format!("method {name}: heads of {dim} components: {e}"));
        if dim > MAX_DIM {
            return Err(wrong(&format!("at most {MAX_DIM} have scalar codes")));
        }
        Shape::uniform(dim, value_bits).map_err(|e| wrong(&e))?;
        Hadamard::new(dim).map_err(|e| wrong(&e))?;
        Ok(())
    }

    /// The name of a profile's entry.
    fn key(&self, l: usize, head: usize, part: &str) -> String {
        format!("sq/{}/{l}/{head}/{part}", self.block)
    }

    /// Adds the entries of all heads to a profile.
    pub fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let geometry = Geometry::of(&samples.model.config);
        let fit = |l, head| self.fit(samples.rope.layer(l), &samples.layers[l], geometry, head);
        for (l, head, basis) in samples.of_heads(fit)? {
            let parts = [
                ("mean", basis.mean),
                ("basis", basis.basis),
                ("dual", basis.dual),
                ("sigma", basis.sigma),
                ("value-mean", basis.value_mean),
                ("value-scale", vec![basis.value_scale]),
            ];
            for (part, values) in parts {
                profile.put_floats(self.key(l, head, part), values);
            }
        }
        Ok(())
    }

    /// The basis of a head.
    fn fit(&self, rope: &Rope, layer: &LayerSamples, geometry: Geometry, head: usize) -> Result<Basis> {
        let (dim, kv_dim) = (geometry.head_dim, geometry.kv_dim());
        let of_head = |rows| Rows::contiguous(rows, kv_dim)?.columns(head * dim, dim);
        let (keys, values) = (of_head(&layer.keys)?, of_head(&layer.values)?);
        Ok(Basis::fit(keys, &layer.plain_query_grams[head], values, rope.frequencies(), self.block)?)
    }

    /// The bases of layer `l` in the profile.
    pub fn of_layer(&self, config: &Config, profile: &Profile, l: usize) -> Result<Vec<Basis>> {
        let dim = config.head_dim;
        let basis = |head: usize| -> Result<Basis> {
            let key = |part| self.key(l, head, part);
            let [basis, dual] = profile.basis_and_dual([&key("basis"), &key("dual")], dim)?;
            Ok(Basis {
                block: self.block,
                mean: profile.factors(&key("mean"), dim)?.to_vec(),
                basis: basis.to_vec(),
                dual: dual.to_vec(),
                sigma: profile.deviations(&key("sigma"), dim)?.to_vec(),
                value_mean: profile.factors(&key("value-mean"), dim)?.to_vec(),
                value_scale: profile.unit_of_norms(&key("value-scale"))?,
            })
        };
        (0..config.n_kv_heads).map(basis).collect()
    }

    /// Replaces one side of a layer's rows (n, n_kv_heads * head_dim) by what codes hold: keys before RoPE,
    /// from the start of a block on.
    pub fn decode(
        &self,
        geometry: Geometry,
        rope: &Rope,
        bases: &[Basis],
        side: Side,
        bits: &Bits,
        rows: &mut [f32],
    ) -> Result<()> {
        let (dim, kv_dim) = (geometry.head_dim, geometry.kv_dim());
        for (head, basis) in bases.iter().enumerate() {
            let mut decoded = geometry.head_rows(head, rows);
            match side {
                Side::Keys => decode_keys(basis, rope.frequencies(), bits, &mut decoded)?,
                Side::Values => decode_values(basis, bits, &mut decoded)?,
            }
            let places = rows.chunks_exact_mut(kv_dim).map(|row| &mut row[head * dim..][..dim]);
            places.zip(decoded.chunks_exact(dim)).for_each(|(place, row)| place.copy_from_slice(row));
        }
        Ok(())
    }

    /// An empty store of layer `l`.
    pub fn store(&self, context: &BuildContext<'_>, l: usize, bits: &Bits) -> Result<HeadStore<Codes>> {
        let rope = context.rope(l);
        let bases = self.of_layer(context.config, context.profile, l)?;
        let head = |basis: &Basis| Ok(basis.head(rope.frequencies(), bits)?);
        let heads = bases.iter().map(|basis| head(basis).map(Codes::new)).collect::<Result<_>>()?;
        let shared_size = |codes: &Codes| codes.head().size();
        Ok(HeadStore { geometry: context.geometry, rope, heads, shared_size })
    }
}
