//! Compiles kernel text to machine code, without a device.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::{result, sys};

use crate::Error;
use crate::library::has_nvrtc;

/// The text of a file of `kernels/`, which NVRTC gets from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    /// Its path below `kernels/`, as in `#include`.
    pub(crate) path: &'static str,
    pub(crate) text: &'static str,
}

/// The [`Source`] at a path below `kernels/`.
macro_rules! source {
    ($path:literal) => {
        $crate::compile::Source {
            path: $path,
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/kernels/", $path)),
        }
    };
}
pub(crate) use source;

/// All files that kernels include. NVRTC gets the ones that a program includes, so nothing has to be
/// installed.
const HEADERS: &[Source] = &[
    source!("codec/decode_points.cuh"),
    source!("codec/decode_rows.cuh"),
    source!("codec/decode_stream.cuh"),
    source!("codec/encode_bins.cuh"),
    source!("codec/encode_families.cuh"),
    source!("codec/encode_stream.cuh"),
    source!("codec/encode_tile.cuh"),
    source!("codec/frame.cuh"),
    source!("codec/maps.cuh"),
    source!("codec/place.cuh"),
    source!("codec/points.cuh"),
    source!("codec/rope.cuh"),
    source!("codec/tile.cuh"),
    source!("eight_elements.cuh"),
    source!("element.cuh"),
    source!("gather.cuh"),
    source!("mbarrier_sm90.cuh"),
    source!("mean_block.cuh"),
    source!("pq_attend/adjustments.cuh"),
    source!("pq_attend/codes.cuh"),
    source!("pq_attend/exact.cuh"),
    source!("pq_attend/finish.cuh"),
    source!("pq_attend/plan.cuh"),
    source!("pq_attend/scores.cuh"),
    source!("pq_attend/shape.cuh"),
    source!("pq_attend/sums.cuh"),
    source!("pq_attend/tables.cuh"),
    source!("pq_attend/tile_places.cuh"),
    source!("pq_codes.cuh"),
    source!("pq_hybrid/addends.cuh"),
    source!("pq_hybrid/budget.cuh"),
    source!("pq_hybrid/code_weights.cuh"),
    source!("pq_hybrid/coded_rows.cuh"),
    source!("pq_hybrid/codes.cuh"),
    source!("pq_hybrid/lut.cuh"),
    source!("pq_hybrid/norms.cuh"),
    source!("pq_hybrid/plan.cuh"),
    source!("pq_hybrid/recenter.cuh"),
    source!("pq_hybrid/rows.cuh"),
    source!("pq_hybrid/scored_tile.cuh"),
    source!("pq_hybrid/selection.cuh"),
    source!("pq_hybrid/shape.cuh"),
    source!("pq_hybrid/stats.cuh"),
    source!("pq_hybrid/values.cuh"),
    source!("pq_nearest.cuh"),
    source!("pq_search/keys.cuh"),
    source!("pq_search/radix.cuh"),
    source!("pq_search/select.cuh"),
    source!("pq_search/tables.cuh"),
    source!("primitives_sm80.cuh"),
    source!("random.cuh"),
    source!("scheduler.cuh"),
    source!("softmax_reduce.cuh"),
    source!("sq_attend/keys.cuh"),
    source!("sq_attend/queries.cuh"),
    source!("sq_attend/ring.cuh"),
    source!("sq_attend/shape.cuh"),
    source!("sq_attend/uniform_codes.cuh"),
    source!("sq_attend/values.cuh"),
    source!("sq_blocks.cuh"),
    source!("sq_encode.cuh"),
    source!("sq_key_table.cuh"),
    source!("sq_levels.cuh"),
    source!("sq_tile.cuh"),
    source!("svd_gram/gram.cuh"),
    source!("svd_gram/join.cuh"),
    source!("svd_prefill/merge.cuh"),
    source!("svd_prefill/wgmma.cuh"),
    source!("tile_attention.cuh"),
    source!("tile_code.cuh"),
    source!("tile_indices.cuh"),
    source!("types.cuh"),
    source!("warp.cuh"),
    source!("wave.cuh"),
    source!("wgmma_sm90.cuh"),
];

/// A kernel file and the shape it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    source: Source,
    headers: &'static [(&'static str, &'static str)], // an engine's own
    options: Vec<String>,
    /// Whether it needs architecture-specific features, such as wgmma of `sm_90a`.
    arch_specific: bool,
}

impl Program {
    /// An engine's own kernel file, which [`Device::kernel`](crate::Device::kernel) compiles and caches like
    /// those of this crate. It may include any file of `src/kernels` by its path there, such as `"warp.cuh"`,
    /// and `headers` (path and text); neither it nor they need to be installed.
    #[must_use]
    pub fn own(
        path: &'static str,
        text: &'static str,
        headers: &'static [(&'static str, &'static str)],
        defines: &[(&str, usize)],
    ) -> Self {
        Self { headers, ..Self::new(Source { path, text }, defines) }
    }

    pub(crate) fn new(source: Source, defines: &[(&str, usize)]) -> Self {
        let options = defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        Self { source, headers: &[], options, arch_specific: false }
    }

    /// Enables architecture-specific features (`sm_90a`).
    pub(crate) const fn arch_specific(mut self) -> Self {
        self.arch_specific = true;
        self
    }

    /// Defines a preprocessor symbol if `when`.
    #[must_use]
    pub fn define_if(mut self, when: bool, symbol: &str) -> Self {
        if when {
            self.options.push(format!("-D{symbol}"));
        }
        self
    }

    /// Compiles with `--fmad=false`: every product is rounded before it is added, as the CPU definitions
    /// require.
    pub(crate) fn without_fused_multiply_add(mut self) -> Self {
        self.options.push("--fmad=false".into());
        self
    }

    /// The kernel file's path below `src/kernels`.
    #[must_use]
    pub const fn path(&self) -> &'static str {
        self.source.path
    }

    /// The options apart from the architecture: `-D` definitions of the shape, and `--fmad`.
    #[must_use]
    pub fn shape_options(&self) -> &[String] {
        &self.options
    }

    /// The kernel file without its folder and extension.
    pub(crate) fn name(&self) -> &'static str {
        let path = self.source.path;
        let file = path.rsplit_once('/').map_or(path, |(_, file)| file);
        file.split_once('.').map_or(file, |(name, _)| name)
    }

    /// The compiler's options.
    pub(crate) fn options(&self, architecture: &str) -> Vec<String> {
        let specific = if self.arch_specific { "a" } else { "" };
        let mut options = vec![format!("--gpu-architecture={architecture}{specific}")];
        if !is_virtual(architecture) {
            options.push("--ptxas-options=-v".into());
        }
        options.extend(self.options.iter().cloned());
        options
    }

    /// The header at a path: the engine's own before this crate's.
    fn header(&self, path: &str) -> Option<Source> {
        let own = self.headers.iter().map(|&(path, text)| Source { path, text });
        own.chain(HEADERS.iter().copied()).find(|header| header.path == path)
    }

    /// All headers that the file includes, directly or indirectly, each once.
    fn headers(&self) -> Vec<Source> {
        let mut reached: Vec<Source> = vec![];
        let mut texts = vec![self.source.text];
        while let Some(text) = texts.pop() {
            let included =
                text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
            for header in included.filter_map(|path| self.header(path)) {
                if !reached.contains(&header) {
                    reached.push(header);
                    texts.push(header.text);
                }
            }
        }
        reached
    }

    /// Options, source texts and the version of the compiler, which together determine the machine code: the
    /// key of a cache of compiled kernels.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`]; [`Error::Compile`] if NVRTC does not tell its version.
    pub fn key(&self, architecture: &str) -> Result<Vec<u8>, Error> {
        let mut key = format!("kv-gpu {:?}\n{}\n", nvrtc_version()?, self.options(architecture).join(" "));
        for Source { path, text } in [self.source].into_iter().chain(self.headers()) {
            key.extend([path, "\n", text, "\n"]);
        }
        key.push('\0');
        Ok(key.into_bytes())
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.source.path, self.options.join(" "))
    }
}

/// A compiled program for one architecture.
#[derive(Clone, Debug)]
pub struct Image {
    /// The driver loads this: a cubin for a real architecture (`sm_80`), PTX for a virtual one
    /// (`compute_80`).
    pub code: Vec<u8>,
    /// The compiler's output, with the registers and spills of every kernel of a real architecture.
    pub log: String,
}

impl Image {
    /// Bytes of registers that the kernels spill to local memory: 0 for a fast kernel.
    #[must_use]
    pub fn spilled_bytes(&self) -> usize {
        let before_each = self.log.match_indices(" bytes spill stores").map(|(at, _)| &self.log[..at]);
        before_each.filter_map(|before| before.rsplit([' ', ',']).next()?.parse::<usize>().ok()).sum()
    }
}

/// The version of the NVRTC library.
fn nvrtc_version() -> Result<(i32, i32), Error> {
    check_nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded, and the pointers are to two integers.
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
        // SAFETY: `nvrtcCreateProgram` made the handle, and it is destroyed once. A failure can be ignored.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Whether the architecture is virtual: the driver then compiles the PTX when it loads the program.
fn is_virtual(architecture: &str) -> bool {
    architecture.starts_with("compute_")
}

/// The first NVRTC with a cache of its own, next to the driver's, and with an option to bypass it.
const CACHING_NVRTC: (i32, i32) = (13, 0);

/// Compiles a program for an architecture, such as `sm_80`, or `compute_80` for PTX. This needs NVRTC but no
/// device.
///
/// # Errors
/// [`Error::NoNvrtc`] or [`Error::Compile`].
pub fn compile(program: &Program, architecture: &str) -> Result<Image, Error> {
    let mut options = program.options(architecture);
    if nvrtc_version()? >= CACHING_NVRTC {
        options.push("--no-cache".into()); // an image from the cache has no log
    }
    compile_with(program, architecture, &options)
}

/// Compiles a program to the image that the driver loads, or takes it from NVRTC's cache.
///
/// # Errors
/// As [`compile`].
pub(crate) fn code(program: &Program, architecture: &str) -> Result<Vec<u8>, Error> {
    Ok(compile_with(program, architecture, &program.options(architecture))?.code)
}

fn compile_with(program: &Program, architecture: &str, options: &[String]) -> Result<Image, Error> {
    check_nvrtc()?;
    let failed = |log: String| Error::Compile { program: format!("{program} for {architecture}"), log };
    let c_string = |text: &str| CString::new(text).map_err(|e| failed(e.to_string()));
    let (name, text) = (c_string(program.source.path)?, c_string(program.source.text)?);
    let headers = program.headers();
    let paths = headers.iter().map(|header| c_string(header.path)).collect::<Result<Vec<_>, _>>()?;
    let texts = headers.iter().map(|header| c_string(header.text)).collect::<Result<Vec<_>, _>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
    let mut handle = std::ptr::null_mut();
    // SAFETY: all pointers are to strings that live until the call has copied them, as many as there are
    // headers; `handle` is written.
    unsafe {
        sys::nvrtcCreateProgram(
            &raw mut handle,
            text.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            pointers(&texts).as_ptr(),
            pointers(&paths).as_ptr(),
        )
    }
    .result()
    .map_err(|e| failed(format!("{e:?}")))?;
    let handle = Handle(handle);
    // SAFETY: the program lives until `handle` is dropped; options hold no zero bytes, being made by this
    // module.
    let compiled = unsafe { result::compile_program(handle.0, options) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(handle.0) }.map_or_else(|e| format!("{e:?}"), text_of);
    if compiled.is_err() {
        return Err(failed(log));
    }
    let ptx = is_virtual(architecture);
    let mut size = 0;
    // SAFETY: as above; `size` is written.
    let status = unsafe {
        if ptx {
            sys::nvrtcGetPTXSize(handle.0, &raw mut size)
        } else {
            sys::nvrtcGetCUBINSize(handle.0, &raw mut size)
        }
    };
    status.result().map_err(|e| failed(format!("{e:?}")))?;
    let mut code = vec![0_u8; size];
    // SAFETY: the buffer has the size that was queried.
    let status = unsafe {
        if ptx {
            sys::nvrtcGetPTX(handle.0, code.as_mut_ptr().cast())
        } else {
            sys::nvrtcGetCUBIN(handle.0, code.as_mut_ptr().cast())
        }
    };
    status.result().map_err(|e| failed(format!("{e:?}")))?;
    Ok(Image { code, log })
}

fn text_of(characters: Vec<c_char>) -> String {
    let bytes: Vec<u8> = characters.into_iter().map(|c| c.to_ne_bytes()[0]).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pq::{AttendShape, HybridShape, MeanErrorsShape, Paging, SearchShape};
    use crate::{Element, sq, svd};
    use pq_core::{GroupRule, PqShape};

    #[test]
    fn every_header_compiles_alone() {
        let quantizer = PqShape::new(128, 64, 8).unwrap();
        let coarse = PqShape::new(128, 2, 6).unwrap();
        let element = Element::F16;
        let paging = Paging::HalfTiles;
        let (keys, values, group) = (quantizer, quantizer, 4);
        let (addends, norms, exact_fp8) = (true, true, true);
        let attend = AttendShape { keys, values, group, element, paging, addends, norms, exact_fp8 };
        let search = SearchShape { quantizer: coarse, group: 4, rule: GroupRule::SumOfSoftmax };
        let (keys, values) = (PqShape::new(128, 16, 8).unwrap(), PqShape::new(128, 8, 8).unwrap());
        let rule = GroupRule::SumOfSoftmax;
        let hybrid = HybridShape {
            keys,
            values,
            group: 4,
            element,
            rule,
            paged: true,
            addends: true,
            key_norms: true,
            value_norms: true,
            mean_errors: true,
            adaptive: true,
        };
        let hybrid = hybrid.programs((9, 0), 227 << 10).unwrap();
        let scalar = sq::AttendShape {
            dim: 128,
            key_slots: 23,
            uniform_keys: false,
            value_bits: 3,
            block: 64,
            group,
            element,
            mean_errors: true,
            addends: true,
            paged: true,
        };
        let side = sq::Side::Keys { slots: 23 };
        let coded = sq::EncodeShape { dim: 128, side, block: 64, paged: true };
        let programs = [
            attend.program(227 << 10).unwrap(),
            search.program((8, 0), 163 << 10).unwrap(),
            search.program((9, 0), 227 << 10).unwrap(),
            hybrid[0].clone(),
            hybrid[1].clone(),
            hybrid[2].clone(),
            hybrid[3].clone(),
            MeanErrorsShape { quantizer: values, element }.program().unwrap(),
            svd::GramShape { dim: 128, element }.program((9, 0)).unwrap(),
            svd::AttendShape { dim: 128, element }.program().unwrap(),
            scalar.programs(227 << 10).unwrap()[0].clone(),
            sq::DecodeShape { coded, element: element.into() }.program().unwrap(),
        ];
        for program in programs {
            for header in program.headers() {
                let alone = Program { source: header, ..program.clone() };
                match compile(&alone, "sm_90") {
                    Err(Error::NoNvrtc) => return eprintln!("SKIPPED: no NVRTC"),
                    result => drop(result.unwrap()),
                }
            }
        }
    }

    #[test]
    fn virtual_architectures_give_ptx() {
        let program = svd::AttendShape { dim: 128, element: Element::F16 }.program().unwrap();
        match compile(&program, "compute_80") {
            Err(Error::NoNvrtc) => eprintln!("SKIPPED: no NVRTC"),
            image => {
                let code = image.unwrap().code;
                assert_eq!(
                    code.iter().position(|&byte| byte == 0),
                    Some(code.len() - 1),
                    "the driver reads to a zero"
                );
                assert!(String::from_utf8_lossy(&code).contains(".target sm_80"));
            }
        }
    }

    #[test]
    fn the_key_covers_headers_and_options() {
        let shape = |dim| svd::AttendShape { dim, element: Element::F16 }.program().unwrap();
        let Ok(key) = shape(128).key("sm_90") else { return eprintln!("SKIPPED: no NVRTC") };
        let reaches = |text: &str| String::from_utf8_lossy(&key).contains(text);
        assert!(reaches("softmax_reduce.cuh\n") && reaches("struct Work"));
        assert!(key != shape(64).key("sm_90").unwrap() && key != shape(128).key("sm_80").unwrap());
    }
}
