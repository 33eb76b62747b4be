//! A sequence that goes on with a stored context.

use std::ops::Range;

use bytes::Bytes;
use codec_core::Profile;

use super::super::cache::{Chunk, Rows};
use super::super::load::{Destination, Loader, Stages};
use super::Decoder;
use crate::{Error, Result};

impl Decoder {
    /// A loader of frames of this profile into the decoder's cache.
    ///
    /// # Errors
    /// [`Error::Argument`] for a batch, and for a cache that does not hold the rows of all tokens;
    /// [`Error::Profile`] for a profile of a model of another shape; [`Error::Device`], also for planes that
    /// the device does not decode: anchors and the range coder.
    pub fn loader(&self, profile: &Profile) -> Result<Loader> {
        self.check_loads()?;
        Loader::new(&self.gpu, profile, &self.weights.config, self.weights.element)
    }

    /// Begins to load a stored frame: the tokens at these positions, which follow those of the only sequence,
    /// at a level of the loader's profile. The device decodes it while the host goes on, so that the next
    /// frame may begin; up to [`FRAMES`](super::super::FRAMES) may be on their way. Steps and prompts that
    /// follow see its tokens.
    ///
    /// Out of page-locked memory ([`PageLocked`](super::super::PageLocked)) the bytes are copied at the rate
    /// of the link; out of other memory the driver copies them twice.
    ///
    /// # Errors
    /// [`Error::Argument`] for a batch, a cache that does not hold the rows of all tokens, a loader of
    /// another model, element type or device, tokens that do not follow the sequence, none, more than the
    /// cache has room for, or frames on their way that are too many or of these or later tokens.
    /// [`Error::Codec`] for bytes that are no frame or not what was written, and for a frame of another
    /// profile, model or side of RoPE; [`Error::Stream`] for one of other tokens or of another level;
    /// [`Error::Device`]. The sequence is then as it was.
    pub fn begin_load(
        &mut self,
        loader: &mut Loader,
        tokens: Range<usize>,
        level: usize,
        frame: Bytes,
    ) -> Result<()> {
        self.begin(loader, tokens, level, frame, None)
    }

    fn begin(
        &mut self,
        loader: &mut Loader,
        tokens: Range<usize>,
        level: usize,
        frame: Bytes,
        stages: Option<&mut Stages>,
    ) -> Result<()> {
        self.check_loads()?;
        if !loader.is_for(&self.gpu, &self.weights.config, self.weights.element) {
            return Err(Error::argument("the loader is of another model, element type or device"));
        }
        let (start, capacity) = (self.position(loader)?, self.cache.room().capacity);
        if tokens.is_empty() || tokens.start != start || tokens.end > capacity {
            return Err(Error::Argument(format!(
                "a frame of the tokens {}..{} after {start} in a cache of {capacity} tokens",
                tokens.start, tokens.end
            )));
        }
        let gpu = self.gpu.clone();
        let chunk = Chunk { sequence: 0, position: start, count: tokens.len() };
        let layers = 0..self.weights.layers.len();
        let rows: Vec<Rows> =
            layers.map(|layer| self.cache.chunk_rows(&gpu, layer, &chunk)).collect::<Result<_>>()?;
        let angles = [self.cos.pointer(), self.sin.pointer()];
        let end = tokens.end;
        loader.begin(tokens, level, frame, &Destination { rows: &rows, angles }, stages)?;
        self.cache.settle(&gpu, &[end])?;
        self.place(&[end as u32])
    }

    /// Waits for the oldest frame on its way.
    ///
    /// # Errors
    /// [`Error::Codec`] for a frame that no encoder writes, though its checksums are right;
    /// [`Error::Device`]. The sequence then ends before that frame, and no later one is on its way.
    /// [`Error::Argument`] where none is.
    pub fn end_load(&mut self, loader: &mut Loader) -> Result<()> {
        let Err((start, e)) = loader.end() else { return Ok(()) };
        if let Some(start) = start {
            let gpu = self.gpu.clone();
            self.cache.settle(&gpu, &[start])?;
            self.place(&[start as u32])?;
        }
        Err(e)
    }

    /// Loads a frame one stage after the other, for timing.
    ///
    /// # Errors
    /// As [`Self::begin_load`] and [`Self::end_load`].
    pub fn load_in_stages(
        &mut self,
        loader: &mut Loader,
        tokens: Range<usize>,
        level: usize,
        frame: Bytes,
    ) -> Result<Stages> {
        let mut stages = Stages::default();
        self.begin(loader, tokens, level, frame, Some(&mut stages))?;
        self.end_load(loader)?;
        Ok(stages)
    }

    fn check_loads(&self) -> Result<()> {
        if self.batch == 1 && self.cache.has_rows_of_all() {
            return Ok(());
        }
        Err(Error::argument("on the device a stored context is loaded into the dense cache of one sequence"))
    }

    /// The position of the next token, behind frames on their way.
    fn position(&self, loader: &Loader) -> Result<usize> {
        if !loader.is_idle() {
            return Ok(self.longest); // to read it would be to wait for the frames
        }
        let mut position = [0];
        self.sequences.positions.read_into(&self.gpu, &mut position)?;
        Ok(position[0] as usize)
    }
}
