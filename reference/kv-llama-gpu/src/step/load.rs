//! Continues a sequence from a stored context.

use codec_core::Profile;
use kv_device::{Chunk, Destination, Ended, Loader, Rows, Stages, Staging};
use kv_stream::Bytes;

use super::Decoder;
use crate::{Error, Result};

impl Decoder {
    /// A loader of frames of this profile into the decoder's cache.
    ///
    /// # Errors
    /// [`kv_device::Error::Profile`] for a profile of a model of another shape; [`Error::Device`], also for
    /// planes that the device does not decode: anchors and the range coder.
    pub fn loader(&self, profile: &Profile) -> Result<Loader> {
        if !self.has_shape(profile) {
            return Err(kv_device::Error::Profile("the levels are of a model of another shape".into()).into());
        }
        Ok(Loader::new(&self.gpu, profile, self.weights.element)?)
    }

    /// Whether a profile is of a model of this shape.
    fn has_shape(&self, profile: &Profile) -> bool {
        let (info, config) = (profile.info(), &self.weights.config);
        (info.layers, info.heads, info.head_dim) == (config.n_layers, config.n_kv_heads, config.head_dim)
    }

    /// Begins to load a stored frame: the tokens of a chunk, which follow those of its sequence, at a level
    /// of the loader's profile. The device decodes it while the host goes on, so that the next frame may
    /// begin; up to [`FRAMES`](kv_device::FRAMES) may be on their way. Where [`Self::loads_in_place`],
    /// steps and prompts that follow see its tokens; else they follow [`Self::end_load`].
    ///
    /// Out of page-locked memory ([`PageLocked`](kv_device::PageLocked)) the bytes are copied at the rate
    /// of the link; out of other memory the driver copies them twice.
    ///
    /// # Errors
    /// [`Error::Argument`] for a loader of another model, element type or device, no such sequence, tokens
    /// that do not follow it, none, more than the cache has room for, or frames on their way that are too
    /// many or of these or later tokens; and for a batch after a step, with another cache than `dense`.
    /// [`Error::Codec`] for bytes that are no frame, and for a frame of another profile, model or side of
    /// RoPE; [`Error::Stream`] for one of other tokens or of another level; [`Error::Device`]. The sequence
    /// is then as it was.
    pub fn begin_load(
        &mut self,
        loader: &mut Loader,
        chunk: Chunk,
        level: usize,
        frame: Bytes,
    ) -> Result<()> {
        self.begin(loader, chunk, level, frame, None)
    }

    /// Begins with the first bytes of a frame that is on its way to the host, as many as there are. More of
    /// them may follow, then the whole frame by [`Self::begin_load`]: what begins in the same memory is the
    /// same frame. Until then nothing is loaded, and another frame, or none, may take its place.
    ///
    /// # Errors
    /// As [`Self::begin_load`]; [`Error::Codec`] also for less than the header and index.
    pub fn begin_load_start(
        &mut self,
        loader: &mut Loader,
        chunk: Chunk,
        level: usize,
        start: Bytes,
    ) -> Result<()> {
        self.check_load(loader, &chunk)?;
        let rows = self.rows_in_place(&chunk)?;
        // SAFETY: rows and angles are the decoder's, which waits for loads before it frees them.
        Ok(unsafe { loader.begin_start(chunk, level, start, &self.destination(rows.as_deref())) }?)
    }

    /// Whether frames are decoded into the cache itself. Other caches take a frame when it ends.
    #[must_use]
    pub fn loads_in_place(&self) -> bool {
        self.cache.has_rows_of_all()
    }

    fn begin(
        &mut self,
        loader: &mut Loader,
        chunk: Chunk,
        level: usize,
        frame: Bytes,
        stages: Option<&mut Stages>,
    ) -> Result<()> {
        self.check_load(loader, &chunk)?;
        let rows = self.rows_in_place(&chunk)?;
        // SAFETY: as in `begin_load_start`.
        unsafe { loader.begin(chunk, level, frame, &self.destination(rows.as_deref()), stages) }?;
        if rows.is_none() {
            return Ok(());
        }
        let lengths = self.lengths_with(&chunk)?;
        self.set_lengths(&lengths, chunk.sequence)
    }

    /// Refuses a loader of another model, and a chunk that does not follow its sequence.
    fn check_load(&self, loader: &Loader, chunk: &Chunk) -> Result<()> {
        if !loader.is_for(&self.gpu, self.weights.element) || !self.has_shape(loader.profile()) {
            return Err(Error::argument("the loader is of another model, element type or device"));
        }
        let (sequence, capacity) = (chunk.sequence, self.cache.capacity());
        if sequence >= self.batch {
            return Err(Error::Argument(format!("sequence {sequence} of a batch of {}", self.batch)));
        }
        self.check_batch()?;
        let start = match loader.staged_end(sequence, self.clears) {
            Some(end) => end,
            None => self.lengths()?[sequence],
        };
        let room = capacity.saturating_sub(start);
        if chunk.count == 0 || chunk.position != start || chunk.count > room {
            return Err(Error::Argument(format!(
                "a frame of {} tokens from {} on, after {start} in a cache of {capacity} tokens",
                chunk.count, chunk.position
            )));
        }
        Ok(())
    }

    /// The cache's rows of a chunk in all layers; none where frames land.
    fn rows_in_place(&mut self, chunk: &Chunk) -> Result<Option<Vec<Rows>>> {
        if !self.loads_in_place() {
            return Ok(None);
        }
        let gpu = self.gpu.clone();
        let layers = 0..self.weights.layers.len();
        let rows = layers.map(|layer| self.cache.chunk_rows(&gpu, layer, chunk));
        Ok(Some(rows.collect::<kv_device::Result<_>>()?))
    }

    fn destination<'a>(&self, rows: Option<&'a [Rows]>) -> Destination<'a> {
        Destination { rows, angles: self.angles(), clears: self.clears }
    }

    /// Waits for the oldest frame on its way.
    ///
    /// # Errors
    /// [`Error::Codec`] for a frame with a wrong checksum, or that no encoder writes though they are right;
    /// [`Error::Device`]. No frame is then on its way, and every sequence ends before those that were.
    /// [`Error::Argument`] where none is, and for a sequence that has gone on since the frame began, and
    /// [`kv_device::Error::Pages`] where there are none for its tokens: nothing has changed then.
    pub fn end_load(&mut self, loader: &mut Loader) -> Result<()> {
        let in_place = loader.in_place(self.clears);
        match loader.end() {
            Ok(Ended { staging: None, .. }) => Ok(()),
            // Of sequences that have been emptied since, nobody wants it.
            Ok(Ended { clears, .. }) if clears != self.clears => Ok(()),
            Ok(Ended { chunk, staging: Some(staging), .. }) => self.take(&chunk, staging),
            Err(e) => {
                let mut lengths = self.lengths()?;
                in_place.iter().rev().for_each(|chunk| lengths[chunk.sequence] = chunk.position);
                if let Some(first) = in_place.first() {
                    self.set_lengths(&lengths, first.sequence)?;
                }
                Err(e.into())
            }
        }
    }

    /// Refuses a batch whose cache has not stored the last tokens of other sequences, which steps have
    /// written: it stores them in turns, and would begin anew behind them.
    fn check_batch(&self) -> Result<()> {
        if self.batch == 1 || self.lengths.is_some() || self.cache.is_exact() {
            return Ok(());
        }
        Err(Error::argument(
            "the sequences of this batch have gone on: caches other than dense load before the first step",
        ))
    }

    /// Gives a frame that has landed to the cache.
    fn take(&mut self, chunk: &Chunk, staging: &Staging) -> Result<()> {
        self.check_batch()?;
        let length = self.lengths()?[chunk.sequence];
        if length != chunk.position {
            let (position, sequence) = (chunk.position, chunk.sequence);
            return Err(Error::Argument(format!(
                "sequence {sequence} has gone on to {length} tokens while a frame after {position} was loaded"
            )));
        }
        let (gpu, lengths) = (self.gpu.clone(), self.lengths_with(chunk)?);
        self.cache.reserve(&gpu, &lengths)?;
        for layer in 0..self.weights.layers.len() {
            let rows = self.cache.chunk_rows(&gpu, layer, chunk)?;
            // SAFETY: the rows have room for the chunk, and nothing else uses them before they are taken.
            unsafe { staging.copy(&gpu, layer, chunk, &rows) }?;
            // SAFETY: as above; these rows have just been written.
            unsafe { self.cache.turn_stored(&gpu, layer, chunk, &rows) }?;
            self.cache.append(&gpu, layer, chunk)?;
        }
        self.set_lengths(&lengths, chunk.sequence)
    }

    /// Loads a frame one stage after the other, for timing.
    ///
    /// # Errors
    /// As [`Self::begin_load`] and [`Self::end_load`].
    pub fn load_in_stages(
        &mut self,
        loader: &mut Loader,
        chunk: Chunk,
        level: usize,
        frame: Bytes,
    ) -> Result<Stages> {
        let mut stages = Stages::default();
        self.begin(loader, chunk, level, frame, Some(&mut stages))?;
        self.end_load(loader)?;
        Ok(stages)
    }

    /// Tokens of every sequence with a chunk of one of them.
    fn lengths_with(&self, chunk: &Chunk) -> Result<Vec<usize>> {
        let mut lengths = self.lengths()?;
        lengths[chunk.sequence] = chunk.end();
        Ok(lengths)
    }

    /// Makes the sequences have these lengths. One that had ended goes on if it has been loaded.
    fn set_lengths(&mut self, lengths: &[usize], loaded: usize) -> Result<()> {
        let gpu = self.gpu.clone();
        self.cache.set_lengths(&gpu, lengths)?;
        let mut ended = self.ended.clone();
        ended[loaded] = false;
        let standing = ended.iter().enumerate().filter(|(_, ended)| **ended);
        standing.map(|(sequence, _)| sequence).try_for_each(|sequence| self.cache.end(&gpu, sequence))?;
        self.place(&lengths.iter().map(|&length| length as u32).collect::<Vec<_>>())?;
        self.ended = ended;
        self.run_those_not_ended()
    }
}
