use std::mem::MaybeUninit;

use cudarc::driver::sys::{self, CUtensorMap};

use crate::pointer::{AnyElement, DevicePtr};
use crate::{Element, Error};

/// Components of a box, whose 128 bytes of a row are turned in chunks of 16 as `chunk_at<8>` of the kernels does: `WIDTH` of the kernels.
pub(crate) const BOX_WIDTH: usize = 64;

/// Rows of heads, (heads, rows, dim), which a kernel has copied to shared memory, or from there, in boxes of one head.
pub(crate) struct RowsOfHeads {
    pub rows: DevicePtr<AnyElement>,
    pub element: Element,
    pub heads: usize,
    pub n: usize,
    pub dim: usize,
    /// Elements from a head and a row to the next, multiples of 8.
    pub strides: [usize; 2],
    /// Rows of a box. It is [`BOX_WIDTH`] components wide.
    pub box_rows: usize,
}

impl RowsOfHeads {
    /// The map that a kernel is given, on devices from 9.0 on. What lies beyond the rows and components is zeros, and not written.
    ///
    /// # Errors
    /// [`Error::Driver`] for what it cannot map.
    pub(crate) fn map(&self) -> Result<CUtensorMap, Error> {
        let element = match self.element {
            Element::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let sizes = [self.dim as u64, self.n as u64, self.heads as u64];
        let strides = [self.strides[1], self.strides[0]].map(|stride| (stride as u64).saturating_mul(2));
        let in_box = [BOX_WIDTH as u32, self.box_rows as u32, 1];
        let mut map = MaybeUninit::<CUtensorMap>::uninit();
        // SAFETY: arrays of three dimensions and of the two strides between them, which the driver reads; it writes the map, and
        // nothing at the rows' address.
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
