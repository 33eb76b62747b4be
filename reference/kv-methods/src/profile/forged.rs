//! Profiles that no calibration writes: a file with a right checksum over wrong numbers.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_llama::Decoder;
use kv_model::{Model, Rope};

use super::Profile;
use crate::{Method, Prepared, Result, calibrated, method_examples};

const FORGED: [f32; 5] = [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e30];

/// Tokens of the run: sinks and window hold a few of them.
const TOKENS: usize = 90;

struct Forger {
    model: Arc<Model>,
    rope: Arc<Rope>,
    tokens: Vec<u32>,
    folder: tempfile::TempDir,
}

impl Forger {
    /// The logits of a run with this profile, once written and read.
    fn run(&self, method: &Method, profile: &Profile) -> Result<Vec<f32>> {
        let path = self.folder.path().join("profile");
        profile.save(&path, &self.model)?;
        let profile = Profile::load(&path, &self.model)?;
        let Prepared { model, mut cache } = method.prepare(&self.model, &self.rope, &profile)?;
        let mut decoder = Decoder::new(model, self.rope.clone());
        let (prompt, steps) = self.tokens.split_at(TOKENS - 2);
        decoder.prefill(prompt, cache.as_mut())?;
        let mut last = vec![];
        for &token in steps {
            last = decoder.step(token, cache.as_mut())?.to_vec();
        }
        Ok(last)
    }

    /// Asserts that a forged entry is refused by its name, or does no harm.
    fn check(&self, method: &Method, name: &str, profile: &Profile, forged: &str) {
        match self.run(method, profile) {
            Ok(logits) => {
                assert!(logits.iter().all(|x| x.is_finite()), "{}: {name}: {forged}", method.spec())
            }
            Err(e) => assert!(e.to_string().contains(&format!("`{name}`")), "{}: {name}: {e}", method.spec()),
        }
    }
}

/// The last entry of each kind: names differ in layers and heads.
fn of_each_kind<T>(entries: &BTreeMap<String, T>) -> impl Iterator<Item = (&String, &T)> {
    let kind = |name: &str| -> Vec<String> {
        name.split('/').filter(|part| part.parse::<usize>().is_err()).map(str::to_owned).collect()
    };
    let kinds: BTreeMap<_, _> = entries.iter().map(|(name, entry)| (kind(name), (name, entry))).collect();
    kinds.into_values()
}

#[test]
fn forged_numbers_are_refused_by_name_or_do_no_harm() {
    let model = Arc::new(crate::fixture::model());
    let forger = Forger {
        rope: Arc::new(Rope::new(&model.config, TOKENS)),
        tokens: (0..TOKENS).map(|i| ((i * i + 7 * i) % model.config.vocab_size) as u32).collect(),
        folder: tempfile::tempdir().unwrap(),
        model,
    };
    for method in method_examples().map(|spec| spec.parse::<Method>().unwrap()).filter(Method::needs_profile)
    {
        let made = calibrated(&forger.model, &forger.rope, &forger.tokens, std::slice::from_ref(&method));
        let made = made.unwrap();
        assert!(forger.run(&method, &made).unwrap().iter().all(|x| x.is_finite()));
        for (name, values) in of_each_kind(&made.floats) {
            for x in FORGED {
                for range in [0..1, values.len() / 2..values.len() / 2 + 1, 0..values.len()] {
                    let (mut profile, mut values) = (made.clone(), values.clone());
                    values[range.clone()].fill(x);
                    profile.put_floats(name.clone(), values);
                    forger.check(&method, name, &profile, &format!("{x} at {range:?}"));
                }
            }
        }
        for (name, bytes) in of_each_kind(&made.bytes) {
            for (x, at) in
                FORGED.into_iter().flat_map(|x| (0..32).map(move |i| (x, i * (bytes.len() - 4) / 31)))
            {
                let (mut profile, mut bytes) = (made.clone(), bytes.clone());
                bytes[at..at + 4].copy_from_slice(&x.to_le_bytes());
                profile.put_bytes(name.clone(), bytes);
                forger.check(&method, name, &profile, &format!("{x} at byte {at}"));
            }
        }
    }
}
