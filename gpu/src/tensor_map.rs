//! Descriptors of rows for the copies of TMA.

use std::mem::MaybeUninit;

use cudarc::driver::sys::{self, CUtensorMap};

use crate::pointer::{AnyElement, DevicePtr};
use crate::{Element, Error};

/// Elements of a row of a box: 128 bytes, the span of the 128-byte swizzle. It is `WIDTH` of the kernels.
pub(crate) const BOX_WIDTH: usize = 64;

/// Rows (heads, n, dim) of 16-bit elements that TMA copies between global and shared memory in boxes of one
/// head.
pub(crate) struct RowsOfHeads {
    pub rows: DevicePtr<AnyElement>,
    pub element: Element,
    pub heads: usize,
    pub n: usize,
    pub dim: usize,
    /// Strides of heads and rows in elements, multiples of 8.
    pub strides: [usize; 2],
    /// Rows of a box. It is [`BOX_WIDTH`] elements wide.
    pub box_rows: usize,
}

impl RowsOfHeads {
    /// The tensor map, from compute capability 9.0 on. Loads beyond the rows or `dim` give zeros, and stores
    /// there do nothing.
    ///
    /// # Errors
    /// [`Error::Driver`] for sizes, strides or an alignment that TMA does not support.
    pub(crate) fn map(&self) -> Result<CUtensorMap, Error> {
        let element = match self.element {
            Element::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let sizes = [self.dim as u64, self.n as u64, self.heads as u64];
        let strides = [self.strides[1], self.strides[0]].map(|stride| (stride as u64).saturating_mul(2));
        let in_box = [BOX_WIDTH as u32, self.box_rows as u32, 1];
        let mut map = MaybeUninit::<CUtensorMap>::uninit();
        // SAFETY: the driver reads three sizes and two strides and writes the map, not the rows.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                element,
                3,
                self.rows.address() as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                in_box.as_ptr(),
                [1; 3].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()
            .map_err(Error::of(format_args!(
                "map {} heads of {} rows of {}",
                self.heads, self.n, self.dim
            )))?;
            Ok(map.assume_init())
        }
    }
}
