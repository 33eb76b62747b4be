//! Scalar codes: keys in their query-weighted KLT, rotated relative to blocks of positions, values in a
//! Hadamard basis. Calibration needs means and second moments only.
//!
//! The transform of the keys is all that is fitted, with the mean and the scale of the values, so that the
//! keys of a text of another kind may lose more than those of the calibration: mostly those of a few heads.
//! If the keys of a head on a prompt lose more than 1.5 times what the profile expects, they are coded again
//! with as many more bits as bring the error back.

pub(super) mod bases;
mod decoded;
#[cfg(feature = "cuda")]
mod device;

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use kv_model::Config;
use kv_owners::sq::Bits;

use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::settings::Switch;
use crate::cache::Store;
use crate::calibrate::Calibration;
use crate::{Profile, Result};
use bases::Bases;

pub(super) const SQ: Registration = Registration {
    names: &["sq"],
    help: "\
  sq                attention on scalar codes: no codebooks               k=3 v=3 block=256
                                                                          mean-error=on|off (on for v=1, v=2)
                      more bits for heads whose keys do not fit the       widen=on|off
                      profile (not on a GPU)
",
    examples: &[
        "sq:k=8:v=8:block=32:exact=f32:window=4",
        "sq:k=8:v=8:block=32:mean-error=on:exact=f32:window=4:batch=10",
    ],
    parse: |s| {
        let (keys, values) = (s.own("k", KeyBits(3.0))?, s.bits("v", 3)?);
        let bases = Bases::parse(s)?;
        let default = if values <= 2 { Switch::On } else { Switch::Off };
        let mean_error = s.common("mean-error", default)? == Switch::On;
        Ok(Arc::new(Sq { bases, keys, values, mean_error, widen: s.given("widen")? }))
    },
};

/// Mean bits per component of keys.
#[derive(Clone, Copy, Debug)]
struct KeyBits(f32);

impl FromStr for KeyBits {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bits = text.parse().ok().filter(|x: &f32| (0.125..=8.0).contains(x) && (8.0 * x).fract() == 0.0);
        bits.map(Self).ok_or_else(|| "must be a number of bits from 0.125 to 8, in eighths".into())
    }
}

impl Display for KeyBits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Debug)]
struct Sq {
    bases: Bases,
    keys: KeyBits,
    values: u32,
    mean_error: bool,
    /// Whether heads whose keys do not fit have more bits: if not given, on the CPU alone.
    widen: Option<Switch>,
}

impl Sq {
    /// Bits of the codes of a head.
    fn bits(&self) -> Bits {
        let widen = self.widen != Some(Switch::Off);
        Bits { keys: self.keys.0, values: self.values, mean_error: self.mean_error, widen }
    }
}

impl Kind for Sq {
    fn batch(&self) -> usize {
        self.bases.block
    }

    fn check(&self, config: &Config) -> Result<()> {
        Bases::check("sq", config, self.values)
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        self.bases.calibrate(samples, profile)
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| self.bases.store(context, l, &self.bits()))
    }
}
