//! Kernel text to machine code, without a device.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::{result, sys};

use crate::Error;
use crate::library::has_nvrtc;

/// A kernel file and the shape it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    pub(crate) options: Vec<String>,
    /// Uses what only devices of exactly the architecture have, such as products of a warpgroup on sm_90.
    of_architecture_alone: bool,
}

impl Program {
    pub(crate) fn new(name: &'static str, text: &'static str, defines: &[(&str, usize)]) -> Self {
        let options = defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        Self { name, text, options, of_architecture_alone: false }
    }

    /// Compiled for the architecture with all that is its alone (`sm_90a`).
    pub(crate) const fn of_architecture_alone(mut self) -> Self {
        self.of_architecture_alone = true;
        self
    }

    /// With one more symbol defined, if `when`.
    pub(crate) fn define_if(mut self, when: bool, symbol: &str) -> Self {
        if when {
            self.options.push(format!("-D{symbol}"));
        }
        self
    }

    /// With every product rounded before it is added, as codec-core defines its results.
    pub(crate) fn without_fused_multiply_add(mut self) -> Self {
        self.options.push("--fmad=false".into());
        self
    }

    /// What the compiler is given beside the text.
    pub(crate) fn options(&self, architecture: &str) -> Vec<String> {
        let alone = if self.of_architecture_alone { "a" } else { "" };
        let mut options =
            vec![format!("--gpu-architecture={architecture}{alone}"), "--ptxas-options=-v".into()];
        options.extend(self.options.iter().cloned());
        options
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.options.join(" "))
    }
}

/// Machine code for one architecture.
#[derive(Clone, Debug)]
pub struct Image {
    /// What the driver loads.
    pub cubin: Vec<u8>,
    /// What the compiler said, with the registers and spills of every kernel.
    pub log: String,
}

impl Image {
    /// Bytes of registers that the kernels keep in memory: 0 for a kernel that is to be fast.
    #[must_use]
    pub fn spilled_bytes(&self) -> usize {
        let before_each = self.log.match_indices(" bytes spill stores").map(|(at, _)| &self.log[..at]);
        before_each.filter_map(|before| before.rsplit([' ', ',']).next()?.parse::<usize>().ok()).sum()
    }
}

/// The version of the NVRTC library.
pub(crate) fn nvrtc_version() -> Result<(i32, i32), Error> {
    check_nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there, and the pointers are to two integers.
    let status = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    status
        .result()
        .map_err(|e| Error::Compile { program: "version of NVRTC".into(), log: format!("{e:?}") })?;
    Ok((major, minor))
}

fn check_nvrtc() -> Result<(), Error> {
    if has_nvrtc() { Ok(()) } else { Err(Error::NoNvrtc) }
}

/// An NVRTC program, destroyed when dropped.
struct Handle(sys::nvrtcProgram);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `create_program` and destroyed once; nothing is left to do about a failure.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles a program for an architecture, such as `sm_80`. Needs NVRTC but no device.
///
/// # Errors
/// [`Error::NoNvrtc`] or [`Error::Compile`].
pub fn compile(program: &Program, architecture: &str) -> Result<Image, Error> {
    check_nvrtc()?;
    let failed = |log: String| Error::Compile { program: format!("{program} for {architecture}"), log };
    let text = CString::new(program.text).map_err(|e| failed(e.to_string()))?;
    let name = CString::new(format!("{}.cu", program.name)).map_err(|e| failed(e.to_string()))?;
    let handle = result::create_program(&text, Some(&name)).map_err(|e| failed(format!("{e:?}")))?;
    let handle = Handle(handle);
    // SAFETY: the program lives until `handle` is dropped; options hold no zero bytes, being made by this module.
    let compiled = unsafe { result::compile_program(handle.0, &program.options(architecture)) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(handle.0) }.map_or_else(|e| format!("{e:?}"), text_of);
    if compiled.is_err() {
        return Err(failed(log));
    }
    let mut size = 0;
    // SAFETY: as above; `size` is written.
    unsafe { sys::nvrtcGetCUBINSize(handle.0, &raw mut size) }
        .result()
        .map_err(|e| failed(format!("{e:?}")))?;
    let mut cubin = vec![0_u8; size];
    // SAFETY: the buffer has the size that was asked for.
    unsafe { sys::nvrtcGetCUBIN(handle.0, cubin.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| failed(format!("{e:?}")))?;
    Ok(Image { cubin, log })
}

fn text_of(characters: Vec<c_char>) -> String {
    let bytes: Vec<u8> = characters.into_iter().map(|c| c.to_ne_bytes()[0]).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
