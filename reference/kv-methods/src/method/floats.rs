//! Cache types of serving engines: `fp8`, vLLM's and FlashInfer's `fp8_e4m3`, and `nvfp4`, TensorRT-LLM's.
//! Keys are coded after RoPE, as those engines store them. They keep no token exact; sinks and window are
//! this project's.

use std::sync::Arc;

use kv_attend::owner::Pair;

use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::scalar::{BLOCK, BlockCodec, CodedStore, Fp8, NvFp4};
use super::settings::words;
use crate::cache::Store;
use crate::calibrate::{Calibration, rotated_keys};
use crate::{Profile, Result};

pub(super) const FLOATS: Registration = Registration {
    names: &["fp8", "nvfp4"],
    help: "\
  fp8               E4M3 with a scale per layer: 1 (vLLM's default), or   scale=one|calibrated
                      that of the largest element of a calibration text
  nvfp4             E2M1 in blocks of 16, an E4M3 scale for each, and     scale=one|calibrated
                      one per layer as for fp8
",
    examples: &[
        "fp8:exact=f32:window=4",
        "fp8:scale=calibrated:exact=f32:window=4",
        "nvfp4:exact=f32:window=4",
        "nvfp4:scale=calibrated:exact=f32:window=4",
    ],
    parse: |s| {
        let format = if s.name == "fp8" { Format::Fp8 } else { Format::NvFp4 };
        Ok(Arc::new(Floats { format, scale: s.own("scale", Scale::One)? }))
    },
};

#[derive(Debug)]
struct Floats {
    format: Format,
    scale: Scale,
}

#[derive(Clone, Copy, Debug)]
enum Format {
    Fp8,
    NvFp4,
}

/// The scale of a layer's keys, and that of its values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    One,
    Calibrated,
}
words!(Scale, "one" => Scale::One, "calibrated" => Scale::Calibrated);

impl Format {
    fn codec(self, scale: f32) -> Arc<dyn BlockCodec> {
        match self {
            Self::Fp8 => Arc::new(Fp8 { scale }),
            Self::NvFp4 => Arc::new(NvFp4 { scale }),
        }
    }

    /// The largest element that scale 1 codes without saturation.
    const fn most(self) -> f32 {
        match self {
            Self::Fp8 => Fp8::MOST,
            Self::NvFp4 => NvFp4::MOST,
        }
    }
}

/// The profile's entry of the largest magnitudes of a layer: of its rotated keys, and of its values.
fn entry(l: usize) -> String {
    format!("floats/{l}/largest")
}

impl Kind for Floats {
    fn needs_profile(&self) -> bool {
        self.scale == Scale::Calibrated
    }

    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        // A text of zeros has a scale, too.
        let largest = |rows: &[f32]| rows.iter().fold(f32::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
        for (l, layer) in samples.layers.iter().enumerate() {
            let keys = rotated_keys(samples.rope.layer(l), &layer.keys);
            profile.put_floats(entry(l), vec![largest(&keys), largest(&layer.values)]);
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("int4"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let scales = match self.scale {
                Scale::One => Pair::new(1.0, 1.0),
                Scale::Calibrated => self.scales(context.profile, l)?,
            };
            let codecs = Pair::new(self.format.codec(scales.keys), self.format.codec(scales.values));
            Ok(CodedStore::new(context.geometry, context.rope(l), None, codecs, BLOCK))
        })
    }
}

impl Floats {
    /// The scales of layer `l` with which the largest elements of the calibration are the largest of the
    /// format.
    fn scales(&self, profile: &Profile, l: usize) -> Result<Pair<f32>> {
        let largest = profile.sizes(&entry(l), 2)?;
        Ok(Pair::new(largest[0] / self.format.most(), largest[1] / self.format.most()))
    }
}
