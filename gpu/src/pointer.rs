//! Typed addresses in device memory.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU64;

/// The element of a buffer whose type the shape of an operation names at run time, as
/// [`Element`](crate::Element) or [`VectorElement`](crate::VectorElement).
///
/// It has no values and no size: it only appears in the type of a pointer, which [`DevicePtr::cast`] makes.
pub enum AnyElement {}

/// The address of elements of type `T` in memory that the device can access.
///
/// It has the size of an address, and so has `Option<DevicePtr<T>>`, with 0 for `None`. The type names the
/// elements that a launch reads or writes at the address; nothing checks that they exist.
///
/// An engine wraps the address of its own allocation or tensor, or of a `CudaSlice` or `CudaView` of cudarc.
/// Pinned host memory and managed memory have the same address on the device as on the host.
///
/// An empty buffer often has the address 0. No launch accesses it, so any aligned address will do:
/// [`DevicePtr::dangling`].
///
/// # Launches
/// Every `launch` of this crate is `unsafe`, since kernels take their arguments on trust. From the call until
/// the launch has run, the caller guarantees the following; the safety section of an operation adds its own
/// requirements.
///
/// * Every pointer is to memory that the device can access, is aligned to its element, and has all the
///   elements that the documentation of its field states. The memory is not freed.
/// * Memory that the launch reads is not written meanwhile, and memory that it writes is neither read nor
///   written. Work that precedes the launch on its stream does not count, except where `pdl` names inputs
///   that the previous kernel must not write. If that kernel triggers its dependents before its own wait, the
///   kernel before it must not write these inputs either.
/// * Memory that the launch writes does not overlap other memory that it reads or writes.
/// * Sizes and indices in device memory are within bounds: lengths, counts, ranks, offsets, page and row
///   numbers. The host cannot check them, and kernels clamp them only where an operation says so.
/// * The stream belongs to the context of the [`Device`](crate::Device) that the operation was compiled for.
///
/// # Examples
/// ```no_run
/// use cudarc::driver::DevicePtr as _;
/// use kv_gpu::{AnyElement, Device, DevicePtr};
///
/// let device = Device::open(0)?;
/// let lengths = device.stream().clone_htod(&[1000_u32, 20])?;
/// let (address, _ordered_before_it_drops) = lengths.device_ptr(device.stream());
/// let lengths = DevicePtr::<u32>::new(address).ok_or("an empty buffer")?;
/// let of_the_second_sequence = lengths.offset(1);
///
/// let data_ptr = 0x7f12_3456_7800_u64; // of an engine's tensor of f16
/// let queries: DevicePtr<AnyElement> = DevicePtr::new(data_ptr).unwrap_or(DevicePtr::dangling());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(transparent)]
pub struct DevicePtr<T>(NonZeroU64, PhantomData<fn() -> T>);

// Kernels receive it as a CUDA pointer, null for `None`.
const _: () = assert!(size_of::<DevicePtr<u8>>() == size_of::<u64>());
const _: () = assert!(size_of::<Option<DevicePtr<u8>>>() == size_of::<u64>());

impl<T> DevicePtr<T> {
    /// The pointer to an address, which is not checked; `None` for 0.
    #[must_use]
    pub const fn new(address: u64) -> Option<Self> {
        match NonZeroU64::new(address) {
            Some(address) => Some(Self(address, PhantomData)),
            None => None,
        }
    }

    /// An address that is aligned for every operation and must not be accessed, for a buffer without
    /// elements.
    #[must_use]
    pub const fn dangling() -> Self {
        Self(NonZeroU64::MIN.saturating_add(255), PhantomData)
    }

    /// The address on the device.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.0.get()
    }

    /// The same address for elements of another type.
    #[must_use]
    pub const fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr(self.0, PhantomData)
    }

    /// The address of the element `count` elements further on. It saturates at an address where no device has
    /// memory.
    ///
    /// The size of [`AnyElement`] is not known: cast first.
    #[must_use]
    pub const fn offset(self, count: usize) -> Self {
        const { assert!(size_of::<T>() > 0, "the elements have no size") };
        let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
        Self(self.0.saturating_add(bytes), PhantomData)
    }
}

// Not derived: the element need not be `Copy` or comparable.
impl<T> Copy for DevicePtr<T> {}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> PartialEq for DevicePtr<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for DevicePtr<T> {}

impl<T> fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_is_zero() {
        assert_eq!(DevicePtr::<u8>::new(0), None);
        for address in [0, 1, 4096, u64::MAX] {
            let pointer = DevicePtr::<f32>::new(address);
            assert_eq!(pointer.map_or(0, DevicePtr::address), address);
            // SAFETY: both are eight bytes, and every number is a `u64`.
            let bits = unsafe { std::mem::transmute::<Option<DevicePtr<f32>>, u64>(pointer) };
            assert_eq!(bits, address, "what the kernel receives");
        }
    }

    #[test]
    fn offsets_count_elements() {
        let bytes = DevicePtr::<u8>::dangling();
        assert_eq!(bytes.address() % 256, 0);
        assert_eq!(bytes.offset(3).address(), bytes.address() + 3);
        assert_eq!(bytes.cast::<f64>().offset(3).address(), bytes.address() + 24);
        assert_eq!(bytes.cast::<f64>().offset(usize::MAX).address(), u64::MAX);
        assert_eq!(format!("{:?}", bytes.offset(1)), "DevicePtr(0x101)");
    }

    #[test]
    fn pointers_go_to_other_threads() {
        fn sent<T: Send + Sync + Copy>(_: T) {}
        sent(DevicePtr::<AnyElement>::dangling());
    }
}
