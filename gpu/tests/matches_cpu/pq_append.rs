//! Appending keys and values writes the bytes of `Encode` on many tokens, which agrees with
//! `pq_core::encode_into`.

use kv_gpu::pq::{
    Append, AppendArguments, AppendShape, CodeLayout, Encode, EncodeArguments, EncodeShape, Pages, Paging,
    Side,
};
use kv_gpu::{Device, VectorElement};
use pq_core::PqShape;

use crate::common::{Buffer, Random, bytes_of, device, rounded};

/// More than the vectors for which `Encode` uses the kernel of `Append`.
const MANY: usize = 129;

fn run(device: &Device, random: &mut Random, shape: AppendShape) {
    let dim = shape.keys.dim();
    let (batch, heads) = (random.pick(&[1, 3, 40]), 1 + random.below(3));
    let firsts: Vec<u32> = (0..batch).map(|_| random.pick(&[0, 1, 31, 32, 100])).collect();
    let counts: Vec<u32> = (0..batch).map(|_| random.pick(&[0, 1, 1, 5, 32, 64])).collect();
    let max_count = *counts.iter().max().unwrap() as usize;
    let layout = |quantizer, side| {
        let whole = CodeLayout::new(quantizer, side).unwrap();
        if shape.paging == Paging::HalfTiles { whole.half_tiles().unwrap() } else { whole }
    };
    let paged = shape.paging != Paging::Contiguous;
    let capacity_tiles = (100 + MANY).div_ceil(layout(shape.keys, Side::Keys).tokens());
    let page_tiles = if paged { 1 + random.below(3) } else { capacity_tiles };
    let max_pages = capacity_tiles.div_ceil(page_tiles);
    let table: Vec<u32> = (0..(batch * max_pages) as u32).rev().collect();
    let table = Buffer::new(device, &table);
    let pages = || paged.then(|| Pages { table: table.pointer(), max_pages });
    let (firsts, counts) = (Buffer::new(device, &firsts), Buffer::new(device, &counts));

    let quantizers = [(shape.keys, Side::Keys), (shape.values, Side::Values)];
    let rows = (batch * heads * MANY) * dim;
    let sides = quantizers.map(|(quantizer, side)| {
        let mut vectors: Vec<f32> =
            random.normals(rows).into_iter().map(|x| rounded(shape.element, x)).collect();
        for spoiler in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            vectors[random.below(rows)] = spoiler;
        }
        let mut centroids = random.normals(heads * quantizer.codebook_len());
        let equal = centroids[..quantizer.dsub()].to_vec(); // two equal centroids: the first one wins
        centroids[quantizer.dsub()..][..quantizer.dsub()].copy_from_slice(&equal);
        let tile_len = layout(quantizer, side).tile_len();
        let before = random.bytes(batch * max_pages * heads * page_tiles * tile_len);
        let [appended, encoded] = [(); 2].map(|()| Buffer::new(device, &before));
        let vectors = Buffer::new(device, &bytes_of(shape.element, &vectors));
        (vectors, Buffer::new(device, &centroids), appended, encoded)
    });
    let [(keys, key_centroids, key_codes, _), (values, value_centroids, value_codes, _)] = &sides;
    let strides = [MANY * heads * dim, dim, heads * dim];
    let append = Append::new(device, shape).unwrap();
    let stream = device.stream().cu_stream();
    let arguments = AppendArguments {
        batch,
        heads,
        max_count,
        keys: keys.pointer().cast(),
        values: values.pointer().cast(),
        strides,
        key_centroids: key_centroids.pointer(),
        value_centroids: value_centroids.pointer(),
        firsts: firsts.pointer(),
        counts: counts.pointer(),
        key_codes: key_codes.pointer(),
        value_codes: value_codes.pointer(),
        tiles: page_tiles,
        pages: pages(),
        pdl: random.below(2) == 1,
    };
    // SAFETY: the buffers live until the codes have been read, and have the lengths that the shape requires.
    #[allow(unsafe_code)]
    unsafe { append.launch(stream, &arguments) }.unwrap();
    for ((quantizer, side), (vectors, centroids, appended, encoded)) in quantizers.into_iter().zip(&sides) {
        let encode = EncodeShape { quantizer, side, element: shape.element, paging: shape.paging };
        let arguments = EncodeArguments {
            batch,
            heads,
            max_count: MANY,
            vectors: vectors.pointer().cast(),
            strides,
            centroids: centroids.pointer(),
            firsts: firsts.pointer(),
            counts: counts.pointer(),
            codes: encoded.pointer(),
            tiles: page_tiles,
            pages: pages(),
        };
        let encode = Encode::new(device, encode).unwrap();
        // SAFETY: as above.
        #[allow(unsafe_code)]
        unsafe { encode.launch(stream, &arguments) }.unwrap();
        assert!(appended.read() == encoded.read(), "{side:?} of {shape:?}, batch {batch}, heads {heads}");
    }
}

fn quantizers(dim: usize) -> Vec<PqShape> {
    let subspaces = (0..8).map(|i| dim >> i);
    let all = subspaces.flat_map(|m| (1..=8).filter_map(move |nbits| PqShape::new(dim, m, nbits).ok()));
    let (element, paging) = (VectorElement::F32, Paging::Contiguous);
    let shape = |quantizer| AppendShape { keys: quantizer, values: quantizer, element, paging };
    all.filter(|&quantizer| shape(quantizer).program().is_ok()).collect()
}

#[test]
fn every_shape_agrees() {
    let Some(device) = device("every_shape_agrees") else { return };
    let mut random = Random(1);
    for dim in [64, 128] {
        let all = quantizers(dim);
        for &keys in &all {
            let element = random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]);
            let (values, paging) =
                (random.pick(&all), random.pick(&[Paging::Contiguous, Paging::Tiles, Paging::HalfTiles]));
            let mut shape = AppendShape { keys, values, element, paging };
            if shape.program().is_err() {
                shape.paging = Paging::Tiles; // a quantizer without half tiles
            }
            run(&device, &mut random, shape);
            run(&device, &mut random, AppendShape { keys: values, values: keys, ..shape });
        }
    }
}
