//! Device buffers for frames in flight.

use std::sync::Arc;

use codec_core::Frame;
use cudarc::driver::CudaStream;

use super::{LAYERS, Loader, Staging};
use crate::Result;
use crate::host_memory::HostWord;
use crate::memory::Buffer;

/// Bytes after a frame that the decoder may read.
const PADDING: usize = 3;

/// A stream that decodes.
pub(super) struct DecodeStream {
    pub stream: Arc<CudaStream>,
    pub workspace: Buffer<u8>,
}

/// The buffers of a frame on the device.
pub(super) struct FrameBuffers {
    pub frame: Buffer<u8>,
    pub wrong: HostWord,  // whether a block of the frame has another checksum
    pub failed: HostWord, // whether a tile of the frame could not be decoded
    pub staging: Option<Staging>,
}

impl Loader {
    /// Makes the buffers of a frame and the workspaces large enough.
    pub(super) fn reserve(
        &mut self,
        slot: usize,
        level: usize,
        frame: &Frame<'_>,
        bytes: usize,
        is_staged: bool,
    ) -> Result<()> {
        let (info, decode) = (frame.info(), &self.levels[level].decode);
        let workspace = decode.workspace_len(info, LAYERS.min(info.layers), info.blocks());
        let fits = |buffer: &Buffer<u8>, len| buffer.len() >= len;
        let (bytes, tokens) = (bytes + PADDING, info.tokens);
        let has_staging =
            |slot: &FrameBuffers| slot.staging.as_ref().is_some_and(|rows| rows.capacity() >= tokens);
        let has_staging = !is_staged || has_staging(&self.slots[slot]);
        if has_staging
            && fits(&self.slots[slot].frame, bytes)
            && self.decode_streams.iter().all(|on| fits(&on.workspace, workspace))
        {
            return Ok(());
        }
        // Frames of a level have about the same length: an eighth more is room for the next ones.
        self.wait()?;
        if !fits(&self.slots[slot].frame, bytes) {
            self.slots[slot].frame = Buffer::zeros(&self.gpu, bytes + bytes / 8)?;
        }
        if !has_staging {
            self.slots[slot].staging = None; // before there is another one
            self.slots[slot].staging = Some(Staging::new(&self.gpu, self.profile.info(), tokens)?);
        }
        for on in self.decode_streams.iter_mut().filter(|on| !fits(&on.workspace, workspace)) {
            on.workspace = Buffer::zeros(&self.gpu, workspace)?;
        }
        self.gpu.synchronize() // before another stream writes to what has just been cleared
    }
}
