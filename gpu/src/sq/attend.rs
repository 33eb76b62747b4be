//! Attention of a decode step to scalar codes.

use cudarc::driver::sys::CUstream;
use half::f16;
use pq_core::sq;

use super::KeyTable;
use crate::compile::source;
use crate::device::Kernel;
use crate::launch::Operation;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::{Addends, Pages};
use crate::{Device, Element, Error, Program};

/// The most slots of keys: bits of each byte lane of a tile, 8 bits of 128 components.
const MAX_KEY_SLOTS: usize = 64;

/// Compile-time shape of [`Attend`].
///
/// # Examples
/// ```
/// use kv_gpu::{Element, sq::AttendShape};
/// let keys = pq_core::sq::Shape::uniform(128, 3)?; // or of any mix of widths: `pq_core::sq::allot`
/// let (dim, key_slots, value_bits, block, group) = (keys.dim(), keys.slots(), 2, 256, 4);
/// let (element, mean_errors, addends, paged) = (Element::F16, true, false, false);
/// let shape =
///     AttendShape { dim, key_slots, value_bits, block, group, element, mean_errors, addends, paged };
/// assert!(shape.check().is_ok());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// Components of a row: 64, 96, 128 or 256.
    pub dim: usize,
    /// [`Shape::slots`](pq_core::sq::Shape::slots) of the keys, the same for all heads. The widths of their
    /// components are data: a [`KeyTable`] per head.
    pub key_slots: usize,
    /// Bits of the values' components, 1 to 4.
    pub value_bits: usize,
    /// Tokens of a block, which have the same steps and queries: a multiple of 32, at most 256.
    pub block: usize,
    /// Query heads per KV head, 1 to 16.
    pub group: usize,
    /// Element type of the outputs.
    pub element: Element,
    /// Whether values have a mean error per block
    /// ([`mean_error_into`](pq_core::sq::mean_error_into)).
    pub mean_errors: bool,
    /// Whether terms of the scores are given ([`Addends`]).
    pub addends: bool,
    /// Whether blocks are in pages.
    pub paged: bool,
}

impl AttendShape {
    /// Checks that a kernel supports the shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        let supported = if !matches!(self.dim, 64 | 96 | 128 | 256) {
            "64, 96, 128 or 256 components"
        } else if !(1..=MAX_KEY_SLOTS.min(self.dim / 2)).contains(&self.key_slots) {
            "keys of 1 to 64 slots, of at most 8 bits per component"
        } else if !(1..=4).contains(&self.value_bits) {
            "values of 1 to 4 bits"
        } else if !self.block.is_multiple_of(sq::TILE) || !(1..=sq::MAX_BLOCK).contains(&self.block) {
            "blocks of a multiple of 32 tokens, at most 256"
        } else if !(1..=16).contains(&self.group) {
            "1 to 16 query heads per key/value head"
        } else {
            return Ok(());
        };
        Err(Error::Unsupported { operation: format!("{self:?}"), supported })
    }

    /// Queries of a block of threads, whose limbs fill one or two MMAs of 8 columns. A thread has no registers
    /// for the sums of 8 queries of 256 components.
    const fn queries(&self) -> usize {
        if self.group <= 4 || self.dim > 128 { 4 } else { 8 }
    }

    /// Warps of a block of threads: fewer if a thread needs more registers for a tile and its sums.
    fn warps(&self) -> usize {
        let codes = 4 * self.key_table().row_count() + self.dim / 32 * self.value_bits;
        let sums = self.dim * self.queries() / 32;
        let addends = if self.addends && self.queries() == 8 { 20 } else { 0 };
        match codes + sums + addends {
            0..=40 => 16,
            41..=54 => 12,
            _ => 8,
        }
    }

    /// Threads of a block.
    fn threads(&self) -> u32 {
        self.warps() as u32 * 32
    }

    /// `RESULT` of the kernel.
    const fn result_len(&self) -> usize {
        self.dim + 4
    }

    /// The layout of the tables of the keys.
    #[must_use]
    pub const fn key_table(&self) -> KeyTable {
        KeyTable::new(self.dim, self.key_slots)
    }

    /// `SHARED` of the kernel.
    fn shared_bytes(&self) -> usize {
        let of_warp = self.queries() * self.result_len() + self.queries() / 4 * self.dim * 2;
        (self.warps() * of_warp + self.key_table().table_len() + 16) * 4
    }

    /// The kernel, for [`compile`](crate::compile) without a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn program(&self) -> Result<Program, Error> {
        self.check()?;
        let defines = [
            ("HEAD_DIM", self.dim),
            ("ELEMENT", self.element as usize),
            ("QUERIES", self.queries()),
            ("KEY_SLOTS", self.key_slots),
            ("VALUE_BITS", self.value_bits),
            ("BLOCK", self.block),
            ("WARPS", self.warps()),
            ("MEAN_ERRORS", usize::from(self.mean_errors)),
            ("ADDENDS", usize::from(self.addends)),
            ("SHARED_BYTES", self.shared_bytes()),
        ];
        Ok(Program::new(source!("sq_attend/attend.cu"), &defines).define_if(self.paged, "PAGED"))
    }
}

const OPERATION: Operation = Operation("sq::Attend");

/// Pointers and sizes of one launch of [`Attend`].
///
/// Arrays of blocks begin with (pages or batch, heads, `blocks`): the blocks of a page, or of a sequence
/// without pages. The last block of a sequence may be incomplete; its other tokens may be anything.
#[derive(Clone, Copy, Debug)]
pub struct AttendArguments {
    /// Number of sequences.
    pub batch: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Blocks of a page, or of a sequence without pages.
    pub blocks: usize,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block): codes
    /// of the keys.
    pub keys: DevicePtr<u32>,
    /// Bytes (pages or batch, heads, blocks, dim): steps of the keys.
    pub steps: DevicePtr<u8>,
    /// Words (pages or batch, heads, blocks, [`words_len`](pq_core::sq::Shape::words_len) of a block): codes
    /// of the values.
    pub values: DevicePtr<u32>,
    /// Bytes (pages or batch, heads, blocks, tokens of a block): norms of the values.
    pub norms: DevicePtr<u8>,
    /// `f16` (pages or batch, heads, blocks, dim): mean errors of the values, given if and only if the shape
    /// has them.
    pub mean_errors: Option<DevicePtr<f16>>,
    /// Terms that are added to the scores, such as those of the keys' mean, given if and only if the shape has
    /// them: [`pq::RopeMeanScores`](crate::pq::RopeMeanScores) writes them.
    pub addends: Option<Addends>,
    /// `u32` (heads, [`KeyTable::table_len`]): where the codes of keys are.
    pub key_tables: DevicePtr<u32>,
    /// `f32` (batch, heads, `query_blocks`, group, dim): the queries in the dual basis of each block: rotated
    /// by minus the position of its middle, times the dual of the keys' basis.
    pub queries: DevicePtr<f32>,
    /// Blocks that `queries` has room for, the same for all sequences.
    pub query_blocks: usize,
    /// `u32` (batch,): the number of coded tokens of each sequence. The kernel reads them, so that a captured
    /// graph stays valid as sequences grow.
    pub lengths: DevicePtr<u32>,
    /// The page table, given if and only if the shape has pages.
    pub pages: Option<Pages>,
    /// Factor of the scores: `1 / sqrt(head_dim)`, if the queries are not scaled.
    pub scale: f32,
    /// Elements (batch, heads, group, dim), fully written, in the basis of the values. A sequence without
    /// tokens gives zeros.
    pub out: DevicePtr<AnyElement>,
    /// `f32` (batch, heads, group), fully written: the log-sum-exp of the scores (natural logarithm), to
    /// merge the result with attention over other tokens.
    pub log_sum_exp: Option<DevicePtr<f32>>,
    /// Programmatic dependent launch (PDL), on sm_90: blocks may start before the previous kernel on the
    /// stream ends. They read lengths *before* they wait for it (`griddepcontrol.wait`), so that kernel must
    /// not write these. They read everything else after the wait.
    pub pdl: bool,
    /// Bytes ([`Attend::workspace_len`],), zeroed before the first launch; every launch leaves it ready for
    /// the next one. Launches on one stream can share it; concurrent launches need one each.
    pub workspace: DevicePtr<u8>,
}

/// `Arguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    keys: DevicePtr<u32>,
    values: DevicePtr<u32>,
    steps: DevicePtr<u8>,
    norms: DevicePtr<u8>,
    mean_errors: Option<DevicePtr<f16>>,
    addends: Option<DevicePtr<f16>>,
    queries: DevicePtr<f32>,
    key_tables: DevicePtr<u32>,
    lengths: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    partials: DevicePtr<f32>,
    arrived: DevicePtr<u32>,
    out: DevicePtr<AnyElement>,
    log_sum_exp: Option<DevicePtr<f32>>,
    batch: u32,
    heads: u32,
    group: u32,
    blocks: u32,
    max_pages: u32,
    query_blocks: u32,
    addend_tiles: u32,
    padding: u32,
    scale: f32,
    value_step: f32,
}

const _: () = assert!(size_of::<KernelArguments>() == 152);

/// Decode attention over scalar codes, `pq_core::sq::attend_into`, for a ragged batch.
///
/// Codes are multiplied as they are stored, by int8 tensor cores: the queries are integers of 15 bits, as on
/// the CPU, and the weights integers of 16 bits of the largest of 32 tokens. The kernel splits the tokens of a
/// batch evenly over its blocks. A launch allocates nothing and does not synchronize, and a captured graph
/// stays valid. The same inputs give the same bytes.
///
/// # Cost
/// Every code is read once for up to 8 query heads of its group, 4 with 256 components.
/// # Source
/// Transform coding, as `pq_core::sq` describes it; limbs as in the int8 emulation of wider products.
pub struct Attend {
    kernel: Kernel,
    shape: AttendShape,
    sm_count: usize,
}

impl Attend {
    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: AttendShape) -> Result<Self, Error> {
        let kernel = device.kernel(&shape.program()?, "sq_attend", shape.shared_bytes())?;
        let kernel = kernel.prefer_l1(shape.threads())?;
        Ok(Self { kernel, shape, sm_count: device.sm_count() })
    }

    /// Blocks of a slice of a group, and slices.
    fn grid(&self) -> (usize, usize) {
        let slices = self.shape.group.div_ceil(self.shape.queries());
        ((self.sm_count / slices).max(1), slices)
    }

    /// Floats of the partial results of blocks that share a sequence.
    fn partials_len(&self) -> usize {
        let (blocks, slices) = self.grid();
        (blocks * slices).saturating_mul(2 * self.shape.queries() * self.shape.result_len())
    }

    /// Bytes of workspace for launches of up to `batch` sequences with up to `heads` KV heads.
    #[must_use]
    pub fn workspace_len(&self, batch: usize, heads: usize) -> usize {
        let counters = batch.saturating_mul(heads).saturating_mul(self.grid().1);
        self.partials_len().saturating_add(counters).saturating_mul(4)
    }

    /// Launches the attention on a stream.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds, with every pointer aligned to 16 bytes. Lengths
    /// do not exceed the blocks of a sequence or of its pages, of its queries, or the tiles of its addends, and
    /// every page number refers to an existing page: the kernel does not clamp them. The tables are of
    /// [`AttendShape::key_table`]. The workspace was zeroed before the first launch, and no other launch uses
    /// it at the same time.
    pub unsafe fn launch(&self, stream: CUstream, arguments: &AttendArguments) -> Result<(), Error> {
        let a = arguments;
        if a.batch == 0 || a.heads == 0 {
            return Ok(());
        }
        if self.shape.paged != a.pages.is_some() {
            return Err(OPERATION.error("pages are given exactly when it is compiled for them"));
        }
        if self.shape.mean_errors != a.mean_errors.is_some() {
            return Err(OPERATION.error("mean errors are given exactly when it is compiled for them"));
        }
        if self.shape.addends != a.addends.is_some() {
            return Err(OPERATION.error("addends are given exactly when it is compiled for them"));
        }
        if a.blocks == 0 {
            return Err(OPERATION.error("no room for a block"));
        }
        let in_32_bits = |what, size| OPERATION.in_32_bits(what, size);
        let max_pages = a.pages.map_or(1, |pages| pages.max_pages);
        let tiles = a.blocks.saturating_mul(max_pages).saturating_mul(self.shape.block / sq::TILE);
        // The kernel counts work in 32 bits: a tile is a unit, and the cost of an entry 20.
        let units = tiles.saturating_add(20).saturating_mul(a.batch.saturating_mul(a.heads));
        in_32_bits("units of work (1 for 32 tokens of a head, 20 for the head)", units)?;
        let (blocks, slices) = self.grid();
        let grid = OPERATION.grid(&[("blocks", blocks), ("slices of a group", slices)])?;
        let partials = a.workspace.cast::<f32>();
        let step = sq::STEPS[self.shape.value_bits] / (self.shape.dim as f32).sqrt();
        let kernel_arguments = KernelArguments {
            keys: a.keys,
            values: a.values,
            steps: a.steps,
            norms: a.norms,
            mean_errors: a.mean_errors,
            addends: a.addends.map(|addends| addends.values),
            queries: a.queries,
            key_tables: a.key_tables,
            lengths: a.lengths,
            pages: a.pages.map(|pages| pages.table),
            partials,
            arrived: partials.offset(self.partials_len()).cast(),
            out: a.out,
            log_sum_exp: a.log_sum_exp,
            batch: a.batch as u32,
            heads: a.heads as u32,
            group: self.shape.group as u32,
            blocks: in_32_bits("blocks", a.blocks)?,
            max_pages: in_32_bits("pages", max_pages)?,
            query_blocks: in_32_bits("blocks of queries", a.query_blocks)?,
            addend_tiles: in_32_bits("tiles of addends", a.addends.map_or(0, |addends| addends.tiles))?,
            padding: 0,
            scale: a.scale * std::f32::consts::LOG2_E,
            value_step: step,
        };
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, self.shape.threads(), a.pdl, &kernel_arguments) }
    }
}
