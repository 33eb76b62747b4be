//! Calls every core in a program that does not link the standard library: a use of it would be an undefined
//! symbol.
#![no_std]
#![no_builtins] // or the loops of `memory` would become calls of themselves

use core::hint::black_box;

use codec_core::{BlockIndex, Chunk, Coder, Frame, Models, Plane, PlaneParts, Predictor, Scaling, Side};
use pq_core::{
    Attention, Codebook, CodedTokens, Codes, ExactTokens, Hybrid, HybridScratch, LutPrecision, PqShape,
    QuantizedLut, Rows, RowsMut, Search, SearchScratch, SoftmaxStats, attend_exact_into, attend_into,
    attend_scratch_len, encode_into, hybrid_attend_into, hybrid_select_into, lut_into, scan_quantized_into,
    search_into,
};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The prebuilt `core` of a hosted target keeps unwind tables that name it; a bare-metal target does not.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    let _ = black_box((search(), scalar_codes(), project(), decode()));
    #[cfg(feature = "alloc")]
    let _ = black_box(with_alloc::calibrate());
    loop {}
}

/// What every environment of `core` must bring; on bare-metal targets it comes with the compiler.
mod memory {
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
        for i in 0..n {
            // SAFETY: the caller's contract, as in C.
            unsafe { *to.add(i) = *from.add(i) };
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
        for i in 0..n {
            let i = if (to as usize) < from as usize { i } else { n - 1 - i };
            // SAFETY: the caller's contract, as in C.
            unsafe { *to.add(i) = *from.add(i) };
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, byte: i32, n: usize) -> *mut u8 {
        for i in 0..n {
            // SAFETY: the caller's contract, as in C.
            unsafe { *to.add(i) = byte as u8 };
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
        for i in 0..n {
            // SAFETY: the caller's contract, as in C.
            let (a, b) = unsafe { (*a.add(i), *b.add(i)) };
            if a != b {
                return i32::from(a) - i32::from(b);
            }
        }
        0
    }

    /// What a comparison for equality alone becomes.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
        // SAFETY: the same contract.
        unsafe { memcmp(a, b, n) }
    }
}

fn search() -> Result<f32, pq_core::Error> {
    const SHAPE: PqShape = match PqShape::new(4, 2, 1) {
        Ok(shape) => shape,
        Err(_) => panic!("a valid shape"),
    };
    let mut storage = [0.0; SHAPE.codebook_storage_len()];
    let codebook = Codebook::new(SHAPE, &black_box([0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 1.0, 1.0]), &mut storage)?;
    let mut bytes = [0; SHAPE.codes_len(2)];
    encode_into(&codebook, &black_box([0.1_f32; 8]), 0, &mut bytes)?;
    let codes = Codes::new(SHAPE, 2, &bytes)?;
    let (mut tables, mut scores, mut tokens) = ([0.0; SHAPE.lut_len()], [0.0; 2], [0; 2]);
    let mut chosen = [0; 2];
    let luts = lut_into(&codebook, &black_box([1.0_f32; 4]), &mut tables)?;
    let mut integers = [0; SHAPE.quantized_lut_len(LutPrecision::U8)];
    let lut = QuantizedLut::new(&luts.lut(0), LutPrecision::U8, &mut integers)?;
    scan_quantized_into(&lut, &codes, &mut scores)?;
    let (mut out, mut stats) = ([0.0; 4], [SoftmaxStats::EMPTY]);
    let search = Search { k: 1, ..Search::default() };
    let mut floats = [0.0; SearchScratch::len(1, 2)];
    let mut found = SearchScratch::new(2, &mut floats, &mut stats)?;
    search_into(&luts, &codes, &search, &mut found, &mut tokens)?;
    let mut scratch = [0.0; attend_scratch_len(SHAPE, 1)];
    let tokens = CodedTokens::new(codes, codes, codebook)?;
    attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats)?;
    let (mut floats, mut step_stats) = ([0.0; HybridScratch::len(SHAPE, 1, 2)], [SoftmaxStats::EMPTY]);
    let mut step = HybridScratch::new(SHAPE, 2, &mut floats, &mut step_stats)?;
    let found = hybrid_select_into(&luts, &tokens, &Hybrid::default(), &mut step, &mut chosen)?;
    hybrid_attend_into(&tokens, &chosen[..found], &mut step, &mut out, &mut stats)?;
    Ok(out[0])
}

fn scalar_codes() -> Result<f32, pq_core::Error> {
    use pq_core::sq::{Block, Keys, Shape, Values, encode_keys_into, encode_values_into};
    let (shape, rows) = (Shape::uniform(16, 2)?, black_box([0.5; 32 * 16]));
    let (mut steps, mut norms, mut words) = ([0; 16], [0; 32], [[0; 32]; 2]);
    encode_keys_into(&shape, &rows, &mut steps, &mut words[0])?;
    encode_values_into(&shape, &rows, &mut norms, &mut words[1])?;
    let keys = Keys::new(shape, 32, &steps, &words[0])?;
    let block = Block::new(keys, Values::new(shape, &norms, &words[1])?)?;
    let (mut query, mut out, mut stats) = (black_box([0.25; 16]), [0.0; 16], [SoftmaxStats::EMPTY]);
    pq_core::sq::rotate_by(&[0.5; 8], -16, &mut query)?;
    svd_core::Hadamard::new(16).and_then(|transform| transform.forward(&mut query)).unwrap_or_default();
    let mut scratch = [0.0; 72]; // attend_scratch_len
    pq_core::sq::attend_into(&query, &block, &mut scratch, &mut out, &mut stats)?;
    Ok(out[0])
}

fn project() -> Result<f32, svd_core::Error> {
    let (mut projected, mut out) = ([0.0_f32; 1], [0.0; 1]);
    let columns = black_box([1.0, 0.5]);
    let map = svd_core::Map::new(&columns, 2, 1)?;
    let row = black_box([2.0_f32, 3.0]);
    map.project_into(Rows::from(&row[..]), RowsMut::from(&mut projected[..]))?;
    let (keys, values) = (black_box([1.0_f32; 2]), black_box([2.0; 2]));
    let tokens = ExactTokens::contiguous(&keys, 1, &values, 1)?;
    let (attention, mut scratch, mut stats) = (Attention::default(), [0.0], [SoftmaxStats::EMPTY]);
    attend_exact_into(&attention, Rows::from(&projected[..]), &tokens, &mut scratch, &mut out, &mut stats)?;
    Ok(out[0])
}

fn decode() -> Result<f32, codec_core::Error> {
    let parts = PlaneParts {
        transform: None,
        mean: &[0.5],
        predictor: Predictor::Previous(&[0.5]),
        scaling: Scaling::Steps(&[0.1]),
        centroids: [0.0; 2],
        models: Models::families(&[16]),
        coder: Coder::InterleavedRans,
    };
    let plane = Plane::new(parts)?;
    let bytes = black_box([0_u8; 128]);
    let frame = Frame::parse(&bytes, 8)?;
    let mut out = [0.0; 8];
    let index = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
    frame.decode_block_into(&plane, index, None, &mut out)?;
    Ok(out[0] + Chunk::parse(&bytes)?.len() as f32)
}

#[cfg(feature = "alloc")]
mod with_alloc {
    use core::alloc::{GlobalAlloc, Layout};
    use core::hint::black_box;

    struct Nothing;

    // SAFETY: an allocator may always refuse.
    unsafe impl GlobalAlloc for Nothing {
        unsafe fn alloc(&self, _: Layout) -> *mut u8 {
            core::ptr::null_mut()
        }
        unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
    }

    #[global_allocator]
    static ALLOCATOR: Nothing = Nothing;

    pub fn calibrate() -> bool {
        let rows = black_box([1.0; 16]);
        let shape = pq_core::PqShape::new(2, 1, 1);
        let options = pq_core::TrainOptions { iterations: 2, ..Default::default() };
        let trained = shape.and_then(|shape| pq_core::train(shape, &rows, &options)).is_ok();
        let gram = svd_core::Gram::<svd_core::PostRope>::new(2);
        let rotated = gram.and_then(|gram| svd_core::Rotation::score_optimal(&gram, &gram)).is_ok();
        let cached = low_rank(&rows).is_ok();
        let head = svd_core::DecodeHead { tokens: rows.len(), cost: 2 };
        let model = svd_core::TaskCost { per_task: 1, granule: 1 };
        let planned = svd_core::schedule_decode(&[head], 2, model).is_ok();
        let options = codec_core::FitOptions {
            predictor: codec_core::PredictorKind::Previous,
            steps: codec_core::Steps::Deviations(0.5),
            models: codec_core::ModelKind::Families,
            coder: codec_core::Coder::InterleavedRans,
        };
        let plane = codec_core::PlaneBuf::fit(&rows, 2, None, &options);
        trained && rotated && cached && planned && plane.is_ok()
    }

    fn low_rank(rows: &[f32]) -> Result<f32, svd_core::Error> {
        use svd_core::{Attention, Budget, LayerCalibration, LowRankLayerCache, Rows, Window, Workspace};
        let rows = Rows::contiguous(rows, 2)?;
        let mut calibration = LayerCalibration::new(1, 1, [2, 2])?;
        calibration.add(rows, rows, rows)?;
        let rotations = calibration.rotations()?;
        let maps = rotations.maps(&rotations.ranks(1.0, Budget::Fraction(0.5), 1)?)?;
        let mut cache = LowRankLayerCache::new(&maps, Window { sinks: 1, recent: 2, batch: 1 })?;
        cache.append(rows, rows)?;
        let restored = LowRankLayerCache::<f32>::from_bytes(&cache.to_bytes(), &maps)?;
        let (attention, mut workspace, mut out) = (Attention::default(), Workspace::default(), [0.0; 2]);
        restored.attend_into(&attention, rows.slice(0..1)?, &mut workspace, &mut out)?;
        Ok(out[0])
    }
}
