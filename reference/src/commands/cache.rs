//! The options that select a cache and where it runs, for commands with one method.

use std::num::NonZeroUsize;
use std::path::PathBuf;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use clap::Args;
use clap::builder::ArgPredicate;
#[cfg(feature = "cuda")]
use kv_llama_gpu::ranks::Rank;
use kv_methods::{Method, Profile, calibrated_on};
use kv_model::{Checkpoint, Config, Model, Rope};
use kv_reference::Result;
#[cfg(feature = "cuda")]
use kv_reference::device::rank_decoder;

use super::device::Placement;
use super::{DeviceArgs, Files, at_least_one, built_in_text, few_tokens, print_error, progress};

#[derive(Args)]
pub struct CacheArgs {
    /// Cache to use; with --device-memory the default is hybrid
    #[arg(
        long,
        default_value = "dense:dtype=f16",
        default_value_if("device_memory", ArgPredicate::IsPresent, Some("hybrid"))
    )]
    pub method: Method,
    /// Tokens per prefill chunk [default: all; 8192 on a GPU; of `kv serve` 512, 2048 on a GPU]. Later chunks
    /// see earlier ones as the cache stores them
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    chunk: Option<NonZeroUsize>,
    /// Use this profile (`kv calibrate`); without one a method that needs it calibrates on the built-in texts
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// Default tokens of a prefill chunk on a GPU.
#[cfg(feature = "cuda")]
const DEVICE_CHUNK: usize = kv_llama_gpu::CHUNK;
#[cfg(not(feature = "cuda"))]
const DEVICE_CHUNK: usize = 0;

/// Calibration tokens, from the built-in texts, for a method without a profile.
const CALIBRATION: usize = 2048;

impl CacheArgs {
    /// Adds the profile to the files of a command.
    pub fn add_to(&self, files: &mut Files) {
        self.profile.iter().for_each(|path| files.reads("--profile", path));
    }

    /// Where the method runs; it is then fitted to the model there.
    pub fn place(&mut self, checkpoint: &Checkpoint) -> Result<Placement> {
        let chunk = self.given_chunk().unwrap_or(DEVICE_CHUNK);
        let placement =
            self.device.place(&checkpoint.config, Some(std::slice::from_ref(&self.method)), chunk)?;
        self.method.clone_from(&placement.placed.methods()[0]);
        Ok(placement)
    }

    /// Tokens of a prefill chunk on the CPU.
    pub fn chunk(&self) -> usize {
        self.given_chunk().unwrap_or(usize::MAX)
    }

    /// Tokens of a prefill chunk, if they are given.
    pub fn given_chunk(&self) -> Option<usize> {
        self.chunk.map(NonZeroUsize::get)
    }

    /// Positions for sequences of `length` tokens, and for calibration.
    pub fn rope(config: &Config, length: usize) -> Rope {
        Rope::new(config, length.max(CALIBRATION.min(config.max_seq_len)))
    }

    /// The profile, made if none is given and the method needs one.
    pub fn calibrated(&self, given: Option<Profile>, model: &Model, rope: &Rope) -> Result<Profile> {
        match given {
            Some(profile) => {
                if let Some(warning) = profile.beyond(rope.len()) {
                    print_error(format_args!("kv: {warning}\n"));
                }
                Ok(profile)
            }
            None if self.method.needs_profile() => {
                let text = built_in_text(model.tokenizer()?, CALIBRATION.min(rope.len()))?;
                let bar = progress();
                let n = text.tokens.len();
                bar.set_message(format!("calibrating {} on {n} tokens", self.method.spec()));
                let made = calibrated_on(model, rope, &text, std::slice::from_ref(&self.method));
                bar.finish_and_clear();
                few_tokens(made, "a --profile")
            }
            None => Ok(Profile::default()),
        }
    }

    /// Makes the decoder of a rank on a GPU over the method's cache of `batch` sequences of at most
    /// `capacity` tokens.
    #[cfg(feature = "cuda")]
    pub fn device_decoder(
        &self,
        model: &Arc<Model>,
        profile: &Profile,
        sizes: (usize, usize),
    ) -> Result<impl Fn(&Rank) -> Result<kv_llama_gpu::Decoder> + Send + Sync + use<>> {
        let (method, folded) = (self.method.clone(), self.method.device_model(model, profile)?);
        let profile = profile.clone();
        Ok(move |rank: &Rank| rank_decoder(rank, &method, &folded, &profile, sizes))
    }
}
