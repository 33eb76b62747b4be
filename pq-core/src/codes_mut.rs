//! Packed codes that are written in place: of one vector in all subspaces, or of many in one subspace.

use crate::layout::Layout;
use crate::pack::{pack_words, replace, set_in_runs};
use crate::simd::{BLOCK, Kernel, Run};
use crate::{Error, PqShape};

/// Mutable codes of a sequence in the pages of a pool. [`Codes::paged`](crate::Codes::paged) reads them.
///
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, Codes, CodesMut, PqShape, Rows};
/// let shape = PqShape::new(2, 2, 1)?; // the centroids of each component are 0 and 1
/// let codebook = CodebookBuf::new(shape, &[0.0, 1.0, 0.0, 1.0])?;
/// let keys: Vec<f32> = (0..20).flat_map(|t| if t < 18 { [0.1, 0.9] } else { [0.8, 0.2] }).collect();
/// let mut pool = vec![0; 10 * shape.page_len(16)]; // 10 pages of 16 tokens
/// let table = [7, 2]; // the pages of one sequence
/// let mut codes = CodesMut::paged(shape, &mut pool, &table, 16)?;
/// codes.encode(&codebook.view(), Rows::contiguous(&keys[..36], 2)?, 0)?; // a prompt of 18 tokens
/// codes.encode(&codebook.view(), Rows::contiguous(&keys[36..], 2)?, 18)?; // the next two
/// assert!(Codes::paged(shape, 20, &pool, &table, 16)?.iter_vector(19).eq([1, 0]));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Debug)]
pub struct CodesMut<'a> {
    pub(crate) shape: PqShape,
    pub(crate) n: usize, // capacity in vectors
    bytes: &'a mut [u8],
    layout: Layout<'a>,
}

impl<'a> CodesMut<'a> {
    /// The pages of `table`, in the order of the sequence, of `page_tokens` vectors each: 16, 32, or a
    /// multiple of [`BLOCK`].
    ///
    /// # Shapes
    /// `pool` whole pages of [`PqShape::page_len`] bytes.
    /// # Errors
    /// [`Error::Zero`] or [`Error::PageTokens`] for `page_tokens`, [`Error::Page`] for a page that the pool
    /// does not have.
    pub fn paged(
        shape: PqShape,
        pool: &'a mut [u8],
        table: &'a [u32],
        page_tokens: usize,
    ) -> Result<Self, Error> {
        let n = table.len().checked_mul(page_tokens).ok_or(Error::TooLarge)?;
        let layout = Layout::paged(shape, n, pool.len(), table, page_tokens)?;
        Ok(Self { shape, n, bytes: pool, layout })
    }

    /// Codes in contiguous memory: as many whole blocks as `bytes` holds.
    pub(crate) const fn new(shape: PqShape, bytes: &'a mut [u8]) -> Self {
        Self { shape, n: bytes.len() / shape.block_size() * BLOCK, bytes, layout: Layout::whole(shape) }
    }

    /// The run of subspace `j` in block `b`.
    fn run(&mut self, b: usize, j: usize) -> &mut [u8] {
        let run_len = self.layout.vectors() / 8 * self.shape.nbits() as usize;
        &mut self.bytes[self.layout.at(b) + j * run_len..][..run_len]
    }

    /// The place of the codes of vector `i`.
    #[inline(always)]
    pub(crate) fn vector(&mut self, i: usize) -> VectorMut<'_> {
        let (vectors, nbits) = (self.layout.vectors(), self.shape.nbits());
        let block = &mut self.bytes[self.layout.at(i / vectors)..][..self.layout.block_size()];
        VectorMut { block, nbits, vectors, at: i % vectors }
    }

    /// The place of the codes of vectors `first` to `first + count - 1`, at most 64, in whole blocks of codes
    /// of at most 8 bits.
    #[inline(always)]
    pub(crate) fn place(&self, first: usize, count: usize) -> Option<Place> {
        let nbits = self.shape.nbits();
        if self.layout.vectors() != BLOCK || nbits > 8 {
            return None;
        }
        let (b, at) = (first / BLOCK, first % BLOCK);
        let mut ones = [0; 2 * BLOCK];
        ones[at..at + count].fill(u8::MAX);
        let mut blocks = [None; 2];
        for ((b, ones), block) in (b..).zip(words(&ones)).zip(&mut blocks) {
            // An array's `!=` may call bcmp, which does not exist without the standard library.
            if ones.iter().any(|&word| word != 0) {
                // Codes of all ones pack into the mask of the bits to change.
                *block = Some((self.layout.at(b), pack_words(&ones, nbits)));
            }
        }
        Some(Place { at, blocks })
    }

    /// Writes codes of subspace `j` that have been [staged](Place::stage).
    #[inline(always)]
    pub(crate) fn set_staged(&mut self, place: &Place, j: usize, staged: &Staged) {
        let nbits = self.shape.nbits() as usize;
        for (codes, block) in words(staged).iter().zip(&place.blocks) {
            let Some((block, changed)) = block else { continue };
            let packed = pack_words(codes, nbits as u32);
            let run = self.bytes[block + j * 8 * nbits..][..8 * nbits].as_chunks_mut().0;
            for ((run, new), changed) in run.iter_mut().zip(packed).zip(changed) {
                let old = u64::from_ne_bytes(*run);
                *run = ((old & !changed) | (new & changed)).to_ne_bytes();
            }
        }
    }

    /// Writes the codes of subspace `j` from vector `first` on.
    #[inline(always)]
    pub(crate) fn set(&mut self, on: impl Run + Copy, first: usize, j: usize, codes: &[u32]) {
        let (len, nbits) = (self.layout.vectors(), self.shape.nbits());
        let (mut first, mut rest) = (first, codes);
        while !rest.is_empty() {
            let (codes, later) = rest.split_at(rest.len().min(len - first % len));
            let run = self.run(first / len, j);
            on.run(ReplaceInRun { run, nbits, len, first: first % len, codes });
            (first, rest) = (first + codes.len(), later);
        }
    }
}

/// Writes the codes of a run from token `first` on and leaves the others unchanged.
struct ReplaceInRun<'a> {
    run: &'a mut [u8],
    nbits: u32,
    len: usize, // of the run: 64, 32 or 16 codes
    first: usize,
    codes: &'a [u32], // each below `1 << nbits`; first + their number <= len
}

impl Kernel for ReplaceInRun<'_> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let Self { run, nbits, len, first, codes } = self;
        // Compile-time lengths are worth their own instantiation.
        match <&[u32; BLOCK]>::try_from(codes) {
            Ok(codes) => replace(run, nbits, BLOCK, 0, codes),
            Err(_) => replace(run, nbits, len, first, codes),
        }
    }
}

/// The codes of one subspace in bytes, from the block of the first on.
pub(crate) type Staged = [u8; 2 * BLOCK];

/// The codes of two blocks as words of memory.
#[inline(always)]
fn words(staged: &Staged) -> [[u64; 8]; 2] {
    let words: [u64; 16] = core::array::from_fn(|i| {
        let mut word = [0; 8];
        word.copy_from_slice(&staged[8 * i..][..8]);
        u64::from_ne_bytes(word)
    });
    let mut blocks = [[0; 8]; 2];
    blocks.as_flattened_mut().copy_from_slice(&words);
    blocks
}

/// The place of up to 64 vectors in the runs of their blocks.
pub(crate) struct Place {
    at: usize,                              // of the first vector in its block
    blocks: [Option<(usize, [u64; 8])>; 2], // the first byte of a block, and the bits of a run that change
}

impl Place {
    /// Stages the leading `codes` for [`CodesMut::set_staged`]. Several subspaces are staged before the first
    /// is written, since a load that spans several recent stores cannot be forwarded from them.
    #[inline(always)]
    pub fn stage<const N: usize>(&self, codes: &[u32; N], staged: &mut Staged) {
        for (byte, &code) in staged[self.at..][..N].iter_mut().zip(codes) {
            *byte = code as u8;
        }
    }
}

/// Mutable codes of one vector.
pub(crate) struct VectorMut<'a> {
    block: &'a mut [u8], // with the codes of other vectors
    nbits: u32,
    vectors: usize, // of the block
    at: usize,
}

impl VectorMut<'_> {
    /// Writes the codes from subspace `first` on.
    #[inline(always)]
    pub fn set(&mut self, first: usize, codes: &[u32]) {
        let Self { nbits, vectors, at, .. } = *self;
        let runs = &mut self.block[first * (vectors / 8 * nbits as usize)..];
        match vectors {
            // A compile-time length needs no division.
            BLOCK => set_in_runs(runs, nbits, BLOCK, at, codes),
            _ => set_in_runs(runs, nbits, vectors, at, codes),
        }
    }
}
