//! Checks whether CUDA's libraries can be called.
//!
//! cudarc either loads them at run time or links them. Its features choose, for all crates of a build
//! together. Where it loads them, a call into a missing library panics, so `is_culib_present` has to be
//! called first. Where it links them, the program would not have started without them, and cudarc has no
//! `is_culib_present`. The glob imports below find cudarc's function where it exists; otherwise the name
//! refers to the function of this module.

/// Replaces cudarc's function where the libraries are linked.
#[allow(dead_code, reason = "cudarc's function shadows it where the libraries are loaded")]
const unsafe fn is_culib_present() -> bool {
    true
}

/// Whether the driver can be called.
pub(crate) fn has_driver() -> bool {
    #[allow(unused_imports, reason = "empty of what is used here where the libraries are linked")]
    use cudarc::driver::sys::*;
    // SAFETY: it loads the driver library, if there is one, and calls nothing in it.
    unsafe { is_culib_present() }
}

/// Whether NVRTC can be called.
pub(crate) fn has_nvrtc() -> bool {
    #[allow(unused_imports, reason = "empty of what is used here where the libraries are linked")]
    use cudarc::nvrtc::sys::*;
    // SAFETY: it loads the NVRTC library, if there is one, and calls nothing in it.
    unsafe { is_culib_present() }
}
