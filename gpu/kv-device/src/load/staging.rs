//! Staging rows of a frame, from which a cache takes one layer at a time.

use codec_core::ModelInfo;
use cudarc::driver::sys::{self, CUmemorytype};
use kv_gpu::{AnyElement, DevicePtr};

use crate::gpu::{Gpu, driver};
use crate::ledger::Allocating;
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows};
use crate::{Error, Result};

/// Rows of the tokens of a frame: elements (layer, keys and values, heads, capacity, head_dim).
pub struct Staging {
    rows: Buffer<u16>,
    sides: Buffer<u64>, // (layer, keys and values): addresses
    capacity: usize,
    heads: usize,
    head_dim: usize,
}

impl Staging {
    /// Rows for frames of up to `capacity` tokens.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] where it does not fit; [`Error::Gpu`].
    pub(super) fn new(gpu: &Gpu, info: &ModelInfo, capacity: usize) -> Result<Self> {
        let _purpose = Allocating::new("stored contexts");
        let (sides, heads, head_dim) = (2 * info.layers, info.heads, info.head_dim);
        let side_len = capacity.checked_mul(heads * head_dim);
        let len = side_len.and_then(|len| len.checked_mul(sides));
        let len = len.ok_or_else(|| Error::argument("a frame of more rows than addresses"))?;
        let rows = Buffer::zeros(gpu, len)?;
        let side = |side| rows.pointer().offset(side * heads * capacity * head_dim).address();
        let sides = Buffer::of(gpu, &(0..sides).map(side).collect::<Vec<_>>())?;
        Ok(Self { rows, sides, capacity, heads, head_dim })
    }

    /// Capacity in tokens.
    pub(super) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Pointers (layers, 2) to the rows (heads, capacity, head_dim) of keys, then values.
    pub(super) const fn sides(&self) -> DevicePtr<DevicePtr<AnyElement>> {
        self.sides.pointer().cast()
    }

    /// Copies the keys and values of a layer to the places of the chunk, which has as many tokens as the
    /// frame, in the order of the device's stream.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    /// # Safety
    /// The rows have room for the chunk, and nothing else uses them at the same time.
    pub unsafe fn copy(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        let row = self.head_dim * size_of::<u16>();
        let len = self.heads * self.capacity * self.head_dim;
        gpu.device.context().bind_to_thread().map_err(|e| driver("use device on this thread", e))?;
        for (side, to) in [rows.keys, rows.values].into_iter().enumerate() {
            let copy = sys::CUDA_MEMCPY2D {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcHost: std::ptr::null(),
                srcDevice: self.rows.pointer().offset((2 * layer + side) * len).address(),
                srcArray: std::ptr::null_mut(),
                srcPitch: self.capacity * row,
                dstXInBytes: chunk.position * row,
                dstY: 0,
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: std::ptr::null_mut(),
                dstDevice: to.address(),
                dstArray: std::ptr::null_mut(),
                dstPitch: rows.capacity * row,
                WidthInBytes: chunk.count * row,
                Height: self.heads,
            };
            // SAFETY: the frame has `count` rows of each head of a layer's side, and the chunk ends within
            // the capacity of the rows.
            unsafe { sys::cuMemcpy2DAsync_v2(&copy, gpu.stream()) }
                .result()
                .map_err(|e| driver("copy the rows of a frame", e))?;
        }
        Ok(())
    }
}
