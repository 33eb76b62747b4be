//! The operations of an instruction set that the vector kernels use.
//!
//! A kernel is written once, over [`Simd`], next to its scalar definition; `dispatch` compiles it for each
//! instruction set. The file of each set implements the operations.
//!
//! Codes come in runs of [`BLOCK`] (see `pack`), so the types here hold 64 elements: [`Simd::Bytes`] holds 64
//! bytes in token order, [`Simd::Block`] 64 floats in *block order*, an order specific to the set in which
//! bytes are widened to floats without crossing 128-bit lanes.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

/// Codes in a run, and vectors in a block of codes.
pub const BLOCK: usize = 64;

/// An operation in its scalar and its vector form. `vector` must be `#[inline(always)]`, so that it is
/// compiled with the features of the function that it is inlined into.
pub(crate) trait Kernel {
    type Output;

    /// The portable form, which defines the result.
    fn scalar(self) -> Self::Output;

    /// The same on the registers of `s`. By default this is the definition, which must then be
    /// `#[inline(always)]`.
    #[inline(always)]
    fn vector<S: Simd>(self, _s: S) -> Self::Output
    where
        Self: Sized,
    {
        self.scalar()
    }
}

/// Runs a kernel on a backend.
pub(crate) trait Run {
    /// Runs `kernel` compiled for this instruction set, or its scalar form if the machine lacks the set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
}

/// Runs a kernel inside another one.
impl<S: Simd> Run for S {
    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.vector(self)
    }
}

/// Evaluates an expression with the width of the codes, at most 8 bits, as a constant.
macro_rules! for_nbits {
    ($nbits:expr, $N:ident => $e:expr) => {
        match $nbits {
            1 => for_nbits!(@ $N = 1, $e),
            2 => for_nbits!(@ $N = 2, $e),
            3 => for_nbits!(@ $N = 3, $e),
            4 => for_nbits!(@ $N = 4, $e),
            5 => for_nbits!(@ $N = 5, $e),
            6 => for_nbits!(@ $N = 6, $e),
            7 => for_nbits!(@ $N = 7, $e),
            _ => for_nbits!(@ $N = 8, $e),
        }
    };
    (@ $N:ident = $value:literal, $e:expr) => {{
        const $N: u32 = $value;
        $e
    }};
}
pub(crate) use for_nbits;

/// Bytes of a plane or row that tables are loaded from: the smallest table reads 16.
pub(crate) const fn row_len(ksub: usize) -> usize {
    if ksub < 16 { 16 } else { ksub }
}

/// Quads of integers as two words each: the first and the third in the halves of one, the second and the
/// fourth in those of the other. So the halves of a word are as far apart as every other byte of one.
#[inline(always)]
pub(crate) fn pairs(integers: [i32; 16]) -> [u32; 8] {
    let pair = |low: i32, high: i32| (low as u32 & 0xffff) | (high as u32) << 16;
    core::array::from_fn(|i| {
        let first = i / 2 * 4 + i % 2;
        pair(integers[first], integers[first + 2])
    })
}

/// Writes element `i` of each of four rows of equal lengths to `out[64 * i..][..4]`, from element `first` on.
#[inline(always)]
pub(crate) fn transpose_rows(rows: [&[f32]; 4], first: usize, out: &mut [f32]) {
    for (i, out) in out.chunks_mut(BLOCK).enumerate().skip(first) {
        out[..4].copy_from_slice(&rows.map(|row| row[i]));
    }
}

/// From (`PARTS`, units) to (units, `PARTS`), where a unit has `UNIT` bytes.
#[inline(always)]
pub(crate) fn interleave<const UNIT: usize, const PARTS: usize>(parts: [&[u8]; PARTS], out: &mut [u8]) {
    let out = out.as_chunks_mut::<UNIT>().0.as_chunks_mut::<PARTS>().0;
    let mut units = [&[][..]; PARTS];
    for (units, part) in units.iter_mut().zip(parts) {
        *units = &part.as_chunks::<UNIT>().0[..out.len()];
    }
    for (i, out) in out.iter_mut().enumerate() {
        for (unit, units) in out.iter_mut().zip(units) {
            *unit = units[i];
        }
    }
}

/// An instruction set. A value proves that the CPU supports it: only `run` in the set's file constructs one,
/// after the backend has been found available.
pub(crate) trait Simd: Copy {
    /// `LANES` floats.
    type F32: Copy;
    /// `LANES` unsigned integers.
    type U32: Copy;
    /// Four codes of at most 8 bits in each lane.
    type Codes: Copy;
    /// `LANES` sums of products of codes with integers.
    type Products: Copy;
    /// 64 bytes in token order.
    type Bytes: Copy;
    /// A table of 256 bytes, or the lower part of one.
    type Table: Copy;
    /// A table of 256 floats, or the lower part of one.
    type FloatTable: Copy;
    /// 64 unsigned 16-bit sums.
    type Sums: Copy;
    /// 64 floats in block order, as `64 / LANES` registers.
    type Block: Copy + AsRef<[Self::F32]> + AsMut<[Self::F32]>;

    const LANES: usize;
    /// Whether there are 32 registers, not 16.
    const WIDE: bool;
    /// The widest codes whose tables of floats are looked up in registers; wider ones are gathered.
    const FLOAT_TABLE_BITS: u32;

    /// Calls `f`, which must be `#[inline(always)]`, as a separate function: an inner loop that kernels
    /// share, or that is instantiated per code width, is compiled once, separately from the surrounding
    /// loops.
    fn call<R>(self, f: impl FnOnce() -> R) -> R;

    fn splat(self, x: f32) -> Self::F32;
    /// # Safety
    /// `LANES` floats from `p` on are readable.
    unsafe fn load(self, p: *const f32) -> Self::F32;
    /// # Safety
    /// `LANES` floats from `p` on are writable.
    unsafe fn store(self, p: *mut f32, x: Self::F32);
    /// Reads `LANES` 16-bit integers as floats.
    ///
    /// # Safety
    /// They are readable from `p` on.
    unsafe fn load_u16(self, p: *const u16) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `c - a * b`, rounded once.
    fn neg_mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;

    /// The sum of the lanes, in an order specific to the set.
    fn sum(self, x: Self::F32) -> f32;

    /// The smaller one; `b` where `a` is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Whether `a < b` in any lane.
    fn any_less(self, a: Self::F32, b: Self::F32) -> bool;

    fn splat_u32(self, x: u32) -> Self::U32;
    /// # Safety
    /// `LANES` integers from `p` on are readable.
    unsafe fn load_u32(self, p: *const u32) -> Self::U32;
    /// # Safety
    /// `LANES` integers from `p` on are writable.
    unsafe fn store_u32(self, p: *mut u32, x: Self::U32);
    /// Where `candidate < best`, takes `candidate` and its `index`. A NaN is never taken.
    fn keep_smaller(
        self,
        best: (Self::F32, Self::U32),
        candidate: Self::F32,
        index: Self::U32,
    ) -> (Self::F32, Self::U32);

    /// The smallest lane of floats that are not NaN.
    fn min_lane(self, x: Self::F32) -> f32;
    /// The smallest lane of each of four registers, not NaN: once in `out`, and in all lanes.
    fn min_lanes(self, x: [Self::F32; 4], out: &mut [f32; 4]) -> [Self::F32; 4];
    /// One bit per lane, lane 0 lowest: whether `a == b`.
    fn equal(self, a: Self::F32, b: Self::F32) -> u32;

    /// Integers that order as the scores do (see `topk::key`).
    fn keys(self, scores: Self::F32) -> Self::U32;
    /// One bit per lane, lane 0 lowest: whether `x >= bound`.
    fn at_least(self, x: Self::U32, bound: Self::U32) -> u32;
    /// The indices of the lanes, from 0.
    fn lanes(self) -> Self::U32;
    fn add_u32(self, a: Self::U32, b: Self::U32) -> Self::U32;

    /// Integers of -16256 to 32512 as [`add_products`](Self::add_products) takes them: two words for every
    /// four.
    #[inline(always)]
    fn factors(self, integers: [i32; 16]) -> [u32; 8] {
        pairs(integers)
    }
    /// Codes in the four bytes of every lane: the bytes shifted right by `shift` bits, or left by `-shift`,
    /// up to 7, and masked. `mask` is the same in all bytes, and has no bits that a shift brings from another
    /// byte.
    fn codes(self, words: Self::U32, shift: i32, mask: u32) -> Self::Codes;
    fn no_products(self) -> Self::Products;
    /// Adds to each lane the products of its four codes with four integers.
    fn add_products(self, sum: Self::Products, codes: Self::Codes, factors: [Self::U32; 2])
    -> Self::Products;
    /// The sums, below 2^31 in magnitude.
    fn total(self, sum: Self::Products) -> Self::U32;

    /// Writes the chosen lanes of `x` (a mask as of [`at_least`](Self::at_least)) contiguously. The elements
    /// after them, up to `LANES` in all, are undefined.
    ///
    /// # Safety
    /// `LANES` integers from `out` on are writable.
    unsafe fn write_chosen(self, out: *mut u32, x: Self::U32, chosen: u32);

    /// [`transpose_rows`] by registers.
    #[inline(always)]
    fn transpose_rows(self, rows: [&[f32]; 4], out: &mut [f32]) {
        transpose_rows(rows, 0, out);
    }

    /// [`interleave`] by registers.
    #[inline(always)]
    fn interleave<const UNIT: usize, const PARTS: usize>(self, parts: [&[u8]; PARTS], out: &mut [u8]) {
        interleave::<UNIT, PARTS>(parts, out);
    }

    /// 64 codes of `NBITS` bits, at most 8, from their packed run.
    ///
    /// # Safety
    /// `8 * NBITS` bytes from `run` on are readable.
    unsafe fn unpack<const NBITS: u32>(self, run: *const u8) -> Self::Bytes;
    /// The first `max(16, 1 << NBITS)` bytes from `p` on as a table.
    ///
    /// # Safety
    /// That many bytes are readable, for as long as the table is used.
    unsafe fn table<const NBITS: u32>(self, p: *const u8) -> Self::Table;
    /// `table[codes]` byte by byte; every code is below `1 << NBITS`.
    fn look_up<const NBITS: u32>(self, table: Self::Table, codes: Self::Bytes) -> Self::Bytes;

    fn no_sums(self) -> Self::Sums;
    /// Adds 64 bytes to 64 sums, wrapping at 2^16.
    fn add_bytes(self, sums: Self::Sums, bytes: Self::Bytes) -> Self::Sums;
    /// Writes the sums in token order.
    fn store_sums(self, out: &mut [u16; 64], sums: Self::Sums);

    /// A table of floats, given also as four planes of its bytes, lowest first, each of `max(16, 1 << NBITS)`
    /// bytes.
    ///
    /// # Safety
    /// `row` holds `1 << NBITS` floats, and both are readable for as long as the table is used.
    unsafe fn float_table<const NBITS: u32>(self, row: *const f32, planes: *const u8) -> Self::FloatTable;
    /// `table[codes]`; every code is below `1 << NBITS`.
    fn look_up_floats<const NBITS: u32>(self, table: Self::FloatTable, codes: Self::Bytes) -> Self::Block;
    fn zero_block(self) -> Self::Block;
    /// Reads floats that are in block order already.
    ///
    /// # Safety
    /// 64 floats from `p` on are readable.
    #[inline(always)]
    unsafe fn load_raw(self, p: *const f32) -> Self::Block {
        let mut block = self.zero_block();
        for (v, register) in block.as_mut().iter_mut().enumerate() {
            // SAFETY: 64 / LANES registers of LANES floats.
            *register = unsafe { self.load(p.add(v * Self::LANES)) };
        }
        block
    }
    /// Writes floats in block order.
    ///
    /// # Safety
    /// 64 floats from `p` on are writable.
    #[inline(always)]
    unsafe fn store_raw(self, p: *mut f32, block: Self::Block) {
        for (v, &register) in block.as_ref().iter().enumerate() {
            // SAFETY: 64 / LANES registers of LANES floats.
            unsafe { self.store(p.add(v * Self::LANES), register) };
        }
    }
    /// Reorders floats from token to block order.
    ///
    /// # Safety
    /// 64 floats from `p` on are readable.
    unsafe fn load_block(self, p: *const f32) -> Self::Block;
    /// Writes floats in token order.
    ///
    /// # Safety
    /// 64 floats from `p` on are writable.
    unsafe fn store_block(self, p: *mut f32, block: Self::Block);
}
