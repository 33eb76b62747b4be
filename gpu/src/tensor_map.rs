use std::mem::MaybeUninit;

use cudarc::driver::sys::{self, CUtensorMap};

use crate::{Element, Error};

/// Rows of heads, (heads, rows, dim), which a kernel has copied to shared memory in boxes of one head.
pub(crate) struct RowsOfHeads {
    pub rows: u64,
    pub element: Element,
    pub heads: usize,
    pub n: usize,
    pub dim: usize,
    /// Elements from a head and a row to the next, multiples of 8.
    pub strides: [usize; 2],
    /// Components and rows of a box: 64 components are 128 bytes, whose chunks of 16 are turned as `chunk_at` of the kernels does.
    pub in_box: [u32; 2],
}

impl RowsOfHeads {
    /// The map that a kernel is given, on devices from 9.0 on. Behind the last row are zeros.
    ///
    /// # Errors
    /// [`Error::Driver`] for what it cannot map.
    pub(crate) fn map(&self) -> Result<CUtensorMap, Error> {
        let element = match self.element {
            Element::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let sizes = [self.dim as u64, self.n as u64, self.heads as u64];
        let strides = [2 * self.strides[1] as u64, 2 * self.strides[0] as u64];
        let in_box = [self.in_box[0], self.in_box[1], 1];
        let mut map = MaybeUninit::<CUtensorMap>::uninit();
        // SAFETY: arrays of three dimensions and of the two strides between them, which the driver reads; it writes the map, and
        // nothing at the rows' address.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                element,
                3,
                self.rows as *mut _,
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
            .map_err(Error::of("map rows of heads"))?;
            Ok(map.assume_init())
        }
    }
}
