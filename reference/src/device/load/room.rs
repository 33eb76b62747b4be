//! Device buffers for frames in flight.

use std::sync::Arc;

use codec_core::Frame;
use cudarc::driver::CudaStream;

use super::{LAYERS, Landing, Loader};
use crate::Result;
use crate::device::host_memory::HostWord;
use crate::device::memory::Buffer;

/// Bytes after a frame that the decoder may read.
const PADDING: usize = 3;

/// A stream that decodes.
pub(super) struct Lane {
    pub stream: Arc<CudaStream>,
    pub workspace: Buffer<u8>,
}

/// Room for a frame on the device.
pub(super) struct Slot {
    pub frame: Buffer<u8>,
    pub wrong: HostWord,  // whether a block of the frame has another checksum
    pub failed: HostWord, // whether a tile of the frame could not be decoded
    pub landing: Option<Landing>,
}

impl Loader {
    /// Makes a slot and the workspaces large enough.
    pub(super) fn make_room(
        &mut self,
        slot: usize,
        level: usize,
        frame: &Frame<'_>,
        bytes: usize,
        lands: bool,
    ) -> Result<()> {
        let (info, decode) = (frame.info(), &self.levels[level].decode);
        let workspace = decode.workspace_len(info, LAYERS.min(info.layers), info.blocks());
        let fits = |buffer: &Buffer<u8>, len| buffer.len() >= len;
        let (bytes, tokens) = (bytes + PADDING, info.tokens);
        let has_landing = |slot: &Slot| slot.landing.as_ref().is_some_and(|rows| rows.capacity() >= tokens);
        let has_landing = !lands || has_landing(&self.slots[slot]);
        if has_landing
            && fits(&self.slots[slot].frame, bytes)
            && self.lanes.iter().all(|lane| fits(&lane.workspace, workspace))
        {
            return Ok(());
        }
        // Frames of a level have about the same length: an eighth more is room for the next ones.
        self.wait()?;
        if !fits(&self.slots[slot].frame, bytes) {
            self.slots[slot].frame = Buffer::zeros(&self.gpu, bytes + bytes / 8)?;
        }
        if !has_landing {
            self.slots[slot].landing = None; // before there is another one
            self.slots[slot].landing = Some(Landing::new(&self.gpu, &self.config, tokens)?);
        }
        for lane in self.lanes.iter_mut().filter(|lane| !fits(&lane.workspace, workspace)) {
            lane.workspace = Buffer::zeros(&self.gpu, workspace)?;
        }
        self.gpu.synchronize() // before another stream writes to what has just been cleared
    }
}
