//! Scalar codes whose bits go where the model loses most: each layer's keys and values have as many as a
//! budget, solved over measured losses, gives them.
//!
//! A metric of one layer, such as the one that orders the components of keys, does not know what the layers
//! after it make of an error. Calibration measures that: the divergence of the next token with one side of one
//! layer coded. Losses of other bits follow from the distortion of the codes, those of all sides add up, and
//! the sum is the loss to expect of a text like that of the calibration. As in `sq`, keys that do not fit the
//! profile have more bits, beyond the budget.

mod allocation;

use std::fmt::Display;
use std::sync::Arc;

use kv_attend::owner::Pair;
use kv_model::Config;
use kv_owners::sq::{Basis, Bits};
use pq_core::sq::Shape;

use super::kind::{BuildContext, Kind, Registration};
use super::sq::bases::Bases;
use crate::cache::{Geometry, Store};
use crate::calibrate::Calibration;
use crate::{Error, Profile, Result};
use allocation::{Budget, Choice, allocate, total};

pub(super) const AUTO: Registration = Registration {
    names: &["auto"],
    help: "\
  auto              scalar codes, bits by what the errors of each layer's   bits=3, or loss=KL of a token,
                    keys and values cost the model                        or bytes=N of a token; block=256
",
    examples: &[
        "auto:bits=8:block=32:exact=f32:window=4",
        "auto:bits=8:block=32:exact=f32:window=4:batch=10",
    ],
    parse: |s| {
        let by_loss = s.is_first(["loss", "bits"])?;
        let by_bytes = s.is_first(["bytes", "bits"])?;
        s.is_first(["loss", "bytes"])?;
        let target = match (by_loss, by_bytes) {
            (true, _) => Target::Loss(s.fraction("loss", 0.01)?),
            (_, true) => Target::Bytes(s.bytes("bytes")?),
            _ => Target::Bits(s.mean_bits("bits", 3.0)?),
        };
        Ok(Arc::new(Auto { target, bases: Bases::parse(s)? }))
    },
};

/// What a cache may take, or lose. Exact rows are beside it.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// Mean bits of a component of keys and values.
    Bits(f64),
    /// Divergence of the next token from that of the exact cache, in nats.
    Loss(f64),
    /// Bytes of a token in all layers.
    Bytes(usize),
}

#[derive(Debug)]
struct Auto {
    target: Target,
    bases: Bases,
}

impl Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bits(bits) => write!(f, "bits={bits}"),
            Self::Loss(loss) => write!(f, "loss={loss}"),
            Self::Bytes(bytes) => write!(f, "bytes={bytes}"),
        }
    }
}

/// The most bits of a component, and the fewest of keys.
const MOST_BITS: u32 = 8;
const LEAST_KEY_BITS: f32 = 0.125;

/// Bits at which losses are measured.
const MEASURED: u32 = 2;

/// The loss of values with mean errors ([`Bits::mean_error`]) over that without, at 1 and at 2 bits.
const WITH_MEAN_ERROR: [f64; 2] = [0.5, 0.7];

/// One side of one layer: the bits that it may have.
struct Part {
    bits: Vec<f32>, // of codes, as `Bits` names them
    choices: Vec<Choice>,
}

impl Auto {
    /// The name of the profile's entry.
    fn key(&self) -> String {
        format!("auto/{}/losses", self.bases.block)
    }

    /// What `layers` coded layers may take.
    fn budget(&self, config: &Config, layers: usize) -> Budget {
        match self.target {
            Target::Bits(bits) => Budget::Bits(bits),
            Target::Loss(loss) => Budget::Loss(loss),
            Target::Bytes(bytes) => {
                Budget::Bits((8 * bytes) as f64 / (2 * layers.max(1) * config.kv_dim()) as f64)
            }
        }
    }

    /// The bits of each layer; those that are kept exact have any.
    fn bits(&self, context: &BuildContext<'_>) -> Result<Vec<Bits>> {
        let BuildContext { config, profile, .. } = context;
        let losses = profile.deviations(&self.key(), 2 * config.n_layers)?;
        let layers: Vec<usize> = (0..config.n_layers).filter(|l| !context.exact_layers.contains(l)).collect();
        let mut parts = vec![];
        for &l in &layers {
            let bases = self.bases.of_layer(config, profile, l)?;
            parts.push(self.keys(&bases, losses[2 * l].into())?);
            parts.push(self.values(config.head_dim, losses[2 * l + 1].into())?);
        }
        let choices: Vec<_> = parts.iter().map(|part| part.choices.clone()).collect();
        let budget = self.budget(config, layers.len());
        let chosen = allocate(&choices, budget);
        let total = total(&choices, &chosen);
        if matches!(budget, Budget::Loss(loss) if total.loss > loss) {
            let most = total.bits / parts.len() as f64;
            return Err(Error::Argument(format!(
                "method auto: {}: the least loss is {:.2e}, at {most:.2} bits a component",
                self.target, total.loss
            )));
        }
        let bits = |i: usize| parts[i].bits[chosen[i]];
        let of_layer = |i: usize| {
            let values = bits(2 * i + 1) as u32;
            Bits { keys: bits(2 * i), widen: true, ..Bits::uniform(values) }
        };
        let mut all = vec![Bits::uniform(8); config.n_layers];
        layers.iter().enumerate().for_each(|(i, &l)| all[l] = of_layer(i));
        Ok(all)
    }

    /// The choices of a layer's keys: their loss follows the distortion of scores.
    fn keys(&self, bases: &[Basis], loss: f64) -> Result<Part> {
        let dim = bases[0].sigma.len();
        let distortion = |bits: f32| -> Result<f64> {
            let slots = key_slots(dim, bits)?;
            let of_head = |basis: &Basis| -> Result<f64> {
                let coded = basis.coded_keys(slots)?;
                Ok(coded.shape.distortion(&coded.sigma)?)
            };
            bases.iter().map(of_head).sum()
        };
        // Keys that are all equal lose nothing.
        let measured = distortion(MEASURED as f32)?.max(f64::MIN_POSITIVE);
        let mut part = Part { bits: vec![], choices: vec![] };
        for bits in (1..=8 * MOST_BITS).map(|i| i as f32 * LEAST_KEY_BITS) {
            let stored = self.stored_of_keys(dim, bits)?;
            if part.choices.last().is_none_or(|last| last.bits < stored) {
                part.bits.push(bits);
                part.choices.push(Choice { bits: stored, loss: loss * distortion(bits)? / measured });
            }
        }
        Ok(part)
    }

    /// The choices of a layer's values: their loss follows the distortion of the values.
    fn values(&self, dim: usize, loss: f64) -> Result<Part> {
        let distortion = |bits: u32| -> Result<f64> {
            let left = WITH_MEAN_ERROR.get(bits as usize - 1).copied().unwrap_or(1.0);
            Ok(left * Shape::uniform(dim, bits)?.distortion(&vec![1.0; dim])?)
        };
        let measured = distortion(MEASURED)?;
        let mut part = Part { bits: vec![], choices: vec![] };
        for bits in 1..=MOST_BITS {
            let stored = self.stored_of_values(dim, bits)?;
            part.bits.push(bits as f32);
            part.choices.push(Choice { bits: stored, loss: loss * distortion(bits)? / measured });
        }
        Ok(part)
    }

    /// Bits of a component of a key, with the steps of its block.
    fn stored_of_keys(&self, dim: usize, bits: f32) -> Result<f64> {
        Ok((16 * key_slots(dim, bits)?) as f64 / dim as f64 + 8.0 / self.bases.block as f64)
    }

    /// Bits of a component of a value, with its norm and the mean error of its block.
    fn stored_of_values(&self, dim: usize, bits: u32) -> Result<f64> {
        let error = if Bits::uniform(bits).mean_error { 16.0 / self.bases.block as f64 } else { 0.0 };
        Ok(f64::from(Shape::uniform(dim, bits)?.bits()) + 8.0 / dim as f64 + error)
    }
}

fn key_slots(dim: usize, bits: f32) -> Result<usize> {
    Ok(Bits { keys: bits, ..Bits::default() }.key_slots(dim)?)
}

impl Kind for Auto {
    fn batch(&self) -> usize {
        self.bases.block
    }

    fn check(&self, config: &Config) -> Result<()> {
        Bases::check("auto", config, MOST_BITS)?;
        let dim = config.head_dim;
        let least = (self.stored_of_keys(dim, LEAST_KEY_BITS)? + self.stored_of_values(dim, 1)?) / 2.0;
        match self.budget(config, config.n_layers) {
            Budget::Bits(bits) if bits < least => Err(Error::Argument(format!(
                "method auto: {}: codes of this model have at least {least:.3} bits a component, {} bytes a token",
                self.target,
                ((2 * config.n_layers * config.kv_dim()) as f64 * least / 8.0).ceil()
            ))),
            _ => Ok(()),
        }
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        self.bases.calibrate(samples, profile)?;
        let (key, config) = (self.key(), &samples.model.config);
        let losses = samples.shared.get(&key, || {
            let layers = 0..config.n_layers;
            let bases =
                layers.map(|l| self.bases.of_layer(config, profile, l)).collect::<Result<Vec<_>>>()?;
            samples.divergences(|l, side, rows| {
                let (rope, bits) = (samples.rope.layer(l), Bits::uniform(MEASURED));
                self.bases.decode(Geometry::of(config), rope, &bases[l], side, &bits, rows)
            })
        })?;
        // Rounding may make a divergence of next to nothing negative.
        let losses = losses.iter().flat_map(Pair::iter).map(|&loss| loss.max(0.0) as f32);
        profile.put_floats(key, losses.collect());
        Ok(())
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let bits = self.bits(context)?;
        context.layers(|l| self.bases.store(context, l, &bits[l]))
    }
}

#[cfg(test)]
mod tests {
    use kv_model::{Model, Rope};

    use super::*;
    use crate::{Method, calibrated, fixture};

    fn method(spec: &str, model: &Model) -> Method {
        spec.parse::<Method>().unwrap().fitted(&model.config).unwrap()
    }

    /// Also after the shortest calibration, and with layers that are exact.
    #[test]
    fn budgets_are_spent_and_not_overspent() {
        let model = fixture::model();
        let rope = Arc::new(Rope::new(&model.config, 64));
        let tokens: Vec<u32> = (0..64_u32).map(|i| (i * i + 7 * i) % 96).collect();
        for (bits, more) in [(1.5, ""), (2.3, ":block=32"), (3.0, ":exact-layers=0"), (5.0, ":block=256")] {
            let of = method(&format!("auto:bits={bits}{more}"), &model);
            let profile = calibrated(&model, &rope, &tokens, std::slice::from_ref(&of)).unwrap();
            let block = of.window.batch;
            let auto = Auto { target: Target::Bits(bits), bases: Bases { block } };
            let chosen = auto.bits(&of.context(&model.config, &rope, &profile)).unwrap();
            let dim = model.config.head_dim;
            let coded = (0..model.config.n_layers).filter(|l| !more.contains("exact") || *l > 0);
            let stored = coded.map(|l| {
                let of = &chosen[l];
                (auto.stored_of_keys(dim, of.keys).unwrap() + auto.stored_of_values(dim, of.values).unwrap())
                    / 2.0
            });
            let stored: Vec<f64> = stored.collect();
            let mean = stored.iter().sum::<f64>() / stored.len() as f64;
            assert!(mean <= bits + 1e-9 && mean > bits - 0.6, "{bits}{more}: {mean}");
        }
    }

    #[test]
    fn a_loss_that_no_bits_have_is_refused() {
        let model = fixture::model();
        let rope = Arc::new(Rope::new(&model.config, 64));
        let tokens: Vec<u32> = (0..64_u32).map(|i| (i * i + 7 * i) % 96).collect();
        let of = method("auto:loss=1e-30", &model);
        let profile = calibrated(&model, &rope, &tokens, std::slice::from_ref(&of)).unwrap();
        let error = of.prepare(&Arc::new(model), &rope, &profile).err().unwrap().to_string();
        assert!(error.contains("loss=") && error.contains("the least loss is"), "{error}");
    }
}
