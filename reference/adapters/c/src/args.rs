//! Pointers of callers, checked as far as they can be, as references and slices.

use std::ffi::{CStr, c_char};

use crate::error::{Error, Result};

/// The value behind a pointer, such as a handle.
pub(crate) unsafe fn get<'a, T>(pointer: *const T, what: &'static str) -> Result<&'a T> {
    check(pointer, what)?;
    Ok(&*pointer)
}

/// The same, to be changed.
pub(crate) unsafe fn get_mut<'a, T>(pointer: *mut T, what: &'static str) -> Result<&'a mut T> {
    check(pointer, what)?;
    Ok(&mut *pointer)
}

/// Where to write an output, which may be uninitialized.
pub(crate) unsafe fn out<T>(pointer: *mut T, what: &'static str) -> Result<Out<T>> {
    check(pointer, what)?;
    Ok(Out(pointer))
}

/// Where to write a handle: NULL until the call succeeds.
pub(crate) unsafe fn out_handle<T>(pointer: *mut *mut T) -> Result<OutHandle<T>> {
    check(pointer, "the pointer to the new handle")?;
    pointer.write(std::ptr::null_mut());
    Ok(OutHandle(pointer))
}

/// A checked pointer to an output.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub unsafe fn write(self, value: T) {
        self.0.write(value);
    }
}

/// A checked pointer to a new handle.
pub(crate) struct OutHandle<T>(*mut *mut T);

impl<T> OutHandle<T> {
    pub unsafe fn write(self, value: T) {
        self.0.write(Box::into_raw(Box::new(value)));
    }
}

/// Frees a handle.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    // A defect in a destructor does not cross the border.
    let _ = crate::error::call(|| {
        if !handle.is_null() {
            check(handle, "the handle")?;
            drop(Box::from_raw(handle));
        }
        Ok(())
    });
}

/// A buffer to read.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, len: usize, what: &'static str) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_len::<T>(len)?;
    check(pointer, what)?;
    Ok(std::slice::from_raw_parts(pointer, len))
}

/// A buffer to write.
pub(crate) unsafe fn slice_mut<'a, T>(
    pointer: *mut T,
    len: usize,
    what: &'static str,
) -> Result<&'a mut [T]> {
    if len == 0 {
        return Ok(&mut []);
    }
    check_len::<T>(len)?;
    check(pointer, what)?;
    Ok(std::slice::from_raw_parts_mut(pointer, len))
}

/// A text that ends in NUL.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &'static str) -> Result<&'a str> {
    check(pointer, what)?;
    CStr::from_ptr(pointer).to_str().map_err(|_| Error::Text(what))
}

fn check<T>(pointer: *const T, what: &'static str) -> Result {
    if pointer.is_null() {
        return Err(Error::Null(what));
    }
    if pointer.is_aligned() { Ok(()) } else { Err(Error::Misaligned(what)) }
}

/// No buffer has more bytes than `isize::MAX`.
fn check_len<T>(len: usize) -> Result {
    match len.checked_mul(size_of::<T>()) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(pq_core::Error::TooLarge.into()),
    }
}
