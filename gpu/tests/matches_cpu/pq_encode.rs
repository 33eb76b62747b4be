//! Encoding agrees with `pq_core::encode_into`, keeps the codes of earlier tokens, and writes the layout that
//! attention reads.

use kv_gpu::pq::{CodeLayout, Encode, EncodeArguments, EncodeShape, Pages, Paging, Side};
use kv_gpu::{Device, Error, VectorElement};
use pq_core::{Backend, CodebookBuf, Codes, PqShape, encode_into_with};

use crate::common::{Buffer, Random, bytes_of, device, rounded};

/// Another centroid than the nearest one may be chosen if its squared distance is greater by at most this
/// fraction of the squared norms of point and centroid: the rounding of sums of `dsub` products.
const TIE: f64 = 1e-5;

fn layout_of(shape: &EncodeShape) -> Result<CodeLayout, Error> {
    let whole = CodeLayout::new(shape.quantizer, shape.side)?;
    if shape.paging == Paging::HalfTiles { whole.half_tiles() } else { Ok(whole) }
}

fn run(device: &Device, random: &mut Random, shape: EncodeShape) {
    let quantizer = shape.quantizer;
    let (dim, layout) = (quantizer.dim(), layout_of(&shape).unwrap());
    let (batch, heads) = (1 + random.below(3), 1 + random.below(3));
    let firsts: Vec<u32> = (0..batch).map(|_| random.pick(&[0, 1, 31, 32, 100])).collect();
    // Few tokens per sequence take another kernel.
    let choices: &[u32] = if random.below(2) == 0 { &[0, 1, 5, 64] } else { &[0, 1, 5, 32, 33, 128, 300] };
    let counts: Vec<u32> = (0..batch).map(|_| random.pick(choices)).collect();
    let max_count = *counts.iter().max().unwrap() as usize;
    let capacity_tiles = (100 + max_count).div_ceil(layout.tokens());
    let paged = shape.paging != Paging::Contiguous;
    let page_tiles = if paged { 1 + random.below(3) } else { capacity_tiles };
    let max_pages = capacity_tiles.div_ceil(page_tiles);
    let pages: Vec<u32> = (0..(batch * max_pages) as u32).rev().collect();

    let mut vectors: Vec<f32> = random
        .normals(batch * heads * max_count * dim)
        .into_iter()
        .map(|x| rounded(shape.element, x))
        .collect();
    for spoiler in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        if !vectors.is_empty() {
            let at = random.below(vectors.len());
            vectors[at] = spoiler;
        }
    }
    let books: Vec<Vec<f32>> = (0..heads).map(|_| random.normals(quantizer.codebook_len())).collect();

    // (batch, vectors, heads, dim) on the device, so that strides matter.
    let mut there = vec![0.0_f32; vectors.len()];
    for (i, row) in vectors.chunks_exact(dim).enumerate() {
        let (sequence, head, vector) = (i / max_count / heads, i / max_count % heads, i % max_count);
        there[((sequence * max_count + vector) * heads + head) * dim..][..dim].copy_from_slice(row);
    }
    let there = Buffer::new(device, &bytes_of(shape.element, &there));
    let before = random.bytes(batch * max_pages * heads * page_tiles * layout.tile_len());
    let tiles = Buffer::new(device, &before);
    let centroids = Buffer::new(device, &books.concat());
    let (firsts_there, counts_there) = (Buffer::new(device, &firsts), Buffer::new(device, &counts));
    let pages_there = Buffer::new(device, &pages);
    let encode = Encode::new(device, shape).unwrap();
    let arguments = EncodeArguments {
        batch,
        heads,
        max_count,
        vectors: there.pointer().cast(),
        strides: [max_count * heads * dim, dim, heads * dim],
        centroids: centroids.pointer(),
        firsts: firsts_there.pointer(),
        counts: counts_there.pointer(),
        codes: tiles.pointer(),
        tiles: page_tiles,
        pages: paged.then(|| Pages { table: pages_there.pointer(), max_pages }),
    };
    let stream = device.background_stream().unwrap();
    device.stream().synchronize().unwrap();
    // SAFETY: the buffers live until the stream has been waited for, and have the lengths that the shape
    // requires.
    #[allow(unsafe_code)]
    unsafe { encode.launch(stream.cu_stream(), &arguments) }.unwrap();
    stream.synchronize().unwrap();
    let after = tiles.read();

    for sequence in 0..batch {
        for head in 0..heads {
            let (first, count) = (firsts[sequence] as usize, counts[sequence] as usize);
            let tile_at = |tile: usize| {
                let page =
                    if paged { pages[sequence * max_pages + tile / page_tiles] as usize } else { sequence };
                ((page * heads + head) * page_tiles + tile % page_tiles) * layout.tile_len()
            };
            let n = first + count;
            let unpacked = |memory: &[u8]| {
                let tiles: Vec<u8> = (0..n.div_ceil(layout.tokens()))
                    .flat_map(|tile| memory[tile_at(tile)..][..layout.tile_len()].to_vec())
                    .collect();
                let mut codes = vec![0; quantizer.codes_len(n)];
                layout.unpack_into(&tiles, n, &mut codes).unwrap();
                codes
            };
            let (old, new) = (unpacked(&before), unpacked(&after));
            let old = Codes::new(quantizer, n, &old).unwrap();
            let new = Codes::new(quantizer, n, &new).unwrap();
            let rows = &vectors[(sequence * heads + head) * max_count * dim..][..count * dim];
            let book = CodebookBuf::new(quantizer, &books[head]).unwrap();
            let mut expected = vec![0; quantizer.codes_len(n)];
            encode_into_with(Backend::Scalar, &book.view(), rows, first, &mut expected).unwrap();
            let expected = Codes::new(quantizer, n, &expected).unwrap();
            for token in 0..n {
                if token < first {
                    assert!(
                        new.iter_vector(token).eq(old.iter_vector(token)),
                        "{shape:?}: token {token} was there"
                    );
                    continue;
                }
                let row = &rows[(token - first) * dim..][..dim];
                for (j, (got, want)) in new.iter_vector(token).zip(expected.iter_vector(token)).enumerate() {
                    if got == want {
                        continue;
                    }
                    let finite = |x: f32| if x.is_finite() { f64::from(x) } else { 0.0 };
                    let x = &row[j * quantizer.dsub()..][..quantizer.dsub()];
                    let distance = |code: usize| {
                        let centroid = book.view().centroid(j, code).map(f64::from).collect::<Vec<_>>();
                        let square = |x: f64| x * x;
                        let distance: f64 =
                            x.iter().zip(&centroid).map(|(&x, y)| square(finite(x) - y)).sum();
                        let scale: f64 =
                            x.iter().zip(&centroid).map(|(&x, y)| square(finite(x)) + y * y).sum();
                        (distance, scale)
                    };
                    let ((got_at, scale), (want_at, _)) = (distance(got), distance(want));
                    assert!(
                        got_at - want_at <= TIE * scale,
                        "{shape:?}: token {token} subspace {j}: {got} at {got_at} for {want} at {want_at}"
                    );
                }
            }
        }
    }
}

/// Every quantizer that the layout accepts.
fn quantizers() -> Vec<PqShape> {
    let all = [64, 128].into_iter().flat_map(|dim| {
        let subspaces = (0..8).map(move |i| dim >> i);
        subspaces.flat_map(move |m| (1..=8).filter_map(move |nbits| PqShape::new(dim, m, nbits).ok()))
    });
    let (element, paging) = (VectorElement::F32, Paging::Contiguous);
    let shape = |quantizer| EncodeShape { quantizer, side: Side::Keys, element, paging };
    all.filter(|&quantizer| shape(quantizer).program().is_ok()).collect()
}

#[test]
fn every_shape_agrees() {
    let Some(device) = device("every_shape_agrees") else { return };
    for (seed, quantizer) in (0..).zip(quantizers()) {
        for side in [Side::Keys, Side::Values] {
            let mut random = Random(seed);
            let element = random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]);
            for paging in [random.pick(&[Paging::Contiguous, Paging::Tiles]), Paging::HalfTiles] {
                let shape = EncodeShape { quantizer, side, element, paging };
                if layout_of(&shape).is_ok() {
                    run(&device, &mut random, shape);
                }
            }
        }
    }
}

#[test]
fn random_cases_agree() {
    let Some(device) = device("random_cases_agree") else { return };
    let quantizers = quantizers();
    for seed in 100..150 {
        let mut random = Random(seed);
        let mut shape = EncodeShape {
            quantizer: random.pick(&quantizers),
            side: random.pick(&[Side::Keys, Side::Values]),
            element: random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]),
            paging: random.pick(&[Paging::Contiguous, Paging::Tiles, Paging::HalfTiles]),
        };
        if layout_of(&shape).is_err() {
            shape.paging = Paging::Tiles; // a quantizer without half tiles
        }
        run(&device, &mut random, shape);
    }
}

#[test]
fn twenty_five_quantizers_have_a_kernel() {
    assert_eq!(quantizers().len(), 25);
}
