//! Training agrees with `pq_core::train`, and encoding with any quantizer with `pq_core::encode_into`.

use kv_gpu::pq::{
    EncodeGeneric, EncodeGenericArguments, EncodeGenericShape, Train, TrainArguments, TrainShape,
};
use kv_gpu::{Device, Error, VectorElement};
use pq_core::{Backend, CodebookBuf, Codes, PqShape, Start, TrainOptions, encode_into_with, train};

use crate::common::{Buffer, Random, bytes_of, device, launch, rounded, where_it_fits};

/// Another centroid than the nearest one may be chosen if its squared distance is greater by at most this
/// fraction of the squared norms of point and centroid.
const TIE: f64 = 1e-5;

/// Quantizers of every number of bits that training takes, with subspaces of all sizes.
fn quantizer(random: &mut Random) -> PqShape {
    let (dim, m, nbits) = random.pick(&[
        (128, 2, 6),
        (128, 64, 8),
        (64, 4, 8),
        (24, 3, 4),
        (10, 2, 3),
        (16, 1, 1),
        (32, 32, 5),
        (12, 4, 10),
        (128, 1, 4),
        (66, 2, 7),
    ]);
    PqShape::new(dim, m, nbits).unwrap()
}

/// Trains on the device: centroids and errors of all sets.
fn run(
    device: &Device,
    (kernel, shape): (&Train, TrainShape),
    (vectors, n): (&[f32], usize),
    start: &[f32],
    starts: Option<&[u32]>,
    iterations: usize,
) -> (Vec<f32>, Vec<f64>) {
    let quantizer = shape.quantizer;
    let (dim, sets) = (quantizer.dim(), vectors.len() / (n * quantizer.dim()));
    // (n, sets, dim) on the device, so that strides matter.
    let mut there = vec![0.0; vectors.len()];
    for (i, row) in vectors.chunks_exact(dim).enumerate() {
        there[(i % n * sets + i / n) * dim..][..dim].copy_from_slice(row);
    }
    let there = Buffer::new(device, &bytes_of(shape.element, &there));
    let centroids = Buffer::new(device, &start.repeat(sets));
    let errors = Buffer::new(device, &vec![0.0_f64; sets * quantizer.m()]);
    let workspace = Buffer::scratch(device, kernel.workspace_len(sets, n));
    let starts = starts.map(|starts| Buffer::new(device, starts));
    let arguments = TrainArguments {
        sets,
        n,
        vectors: there.pointer().cast(),
        strides: [dim, sets * dim],
        starts: starts.as_ref().map(Buffer::pointer),
        centroids: centroids.pointer(),
        errors: Some(errors.pointer()),
        iterations,
        tolerance: 0.0,
        workspace: workspace.pointer(),
    };
    launch!(device, kernel, &arguments);
    (centroids.read(), errors.read())
}

#[test]
fn training_takes_the_steps_of_the_cpu() {
    let Some(device) = device("training_takes_the_steps_of_the_cpu") else { return };
    for seed in 0..25 {
        let mut random = Random(seed);
        let quantizer = quantizer(&mut random);
        let element = random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]);
        let shape = TrainShape { quantizer, element };
        let Some(kernel) = where_it_fits(&device, Train::new(&device, shape)) else { continue };
        let (sets, n) = (1 + random.below(3), random.pick(&[1, 5, 100, 257, 2049, 4500]));
        let vectors: Vec<f32> =
            random.normals(sets * n * quantizer.dim()).into_iter().map(|x| rounded(element, x)).collect();
        let mut start = random.normals(quantizer.codebook_len());
        if random.below(3) == 0 {
            start.fill(0.25); // all points go to the first centroid
        }
        let options =
            |iterations| TrainOptions { iterations, start: Start::From(&start), ..Default::default() };
        for iterations in [1, 6] {
            let (centroids, errors) = run(&device, (&kernel, shape), (&vectors, n), &start, None, iterations);
            let again = run(&device, (&kernel, shape), (&vectors, n), &start, None, iterations);
            assert!((&centroids, &errors) == (&again.0, &again.1), "{shape:?}: another result");
            for (set, rows) in vectors.chunks_exact(n * quantizer.dim()).enumerate() {
                let expected = train(quantizer, rows, &options(iterations)).unwrap();
                let error: f64 = errors[set * quantizer.m()..][..quantizer.m()].iter().sum();
                // Later iterations may diverge after a tie.
                let tolerance = if iterations == 1 { 1e-5 } else { 0.02 };
                let scale = rows.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
                assert!(
                    (error - expected.error).abs() <= tolerance * expected.error + 1e-5 * scale,
                    "{shape:?}, {n} vectors, {iterations} iterations: error {error} for {}",
                    expected.error
                );
                if iterations == 1 {
                    let got = &centroids[set * quantizer.codebook_len()..][..quantizer.codebook_len()];
                    let far =
                        got.iter().zip(&expected.centroids).filter(|(a, b)| (*a - *b).abs() > 1e-4).count();
                    // A point at equal distance from two centroids may go to either.
                    assert!(
                        far * 100 <= got.len(),
                        "{shape:?}, {n} vectors, seed {seed}: {far} of {}",
                        got.len()
                    );
                }
            }
        }
    }
}

#[test]
fn training_may_start_at_chosen_vectors() {
    let Some(device) = device("training_may_start_at_chosen_vectors") else { return };
    let mut random = Random(5);
    let quantizer = PqShape::new(32, 4, 4).unwrap();
    let shape = TrainShape { quantizer, element: VectorElement::F32 };
    let kernel = Train::new(&device, shape).unwrap();
    let vectors = random.normals(500 * 32);
    let starts: Vec<u32> = (0..16).map(|_| random.below(500) as u32).collect();
    let start: Vec<f32> = (0..4)
        .flat_map(|j| starts.iter().flat_map(move |&i| (0..8).map(move |d| i as usize * 32 + j * 8 + d)))
        .map(|at| vectors[at])
        .collect();
    let zeros = vec![0.0; start.len()];
    let chosen = run(&device, (&kernel, shape), (&vectors, 500), &zeros, Some(&starts), 3);
    assert!(chosen == run(&device, (&kernel, shape), (&vectors, 500), &start, None, 3));
}

#[test]
fn any_quantizer_encodes_as_on_the_cpu() {
    let Some(device) = device("any_quantizer_encodes_as_on_the_cpu") else { return };
    for seed in 0..40 {
        let mut random = Random(seed);
        let quantizer =
            if random.below(4) == 0 { PqShape::new(64, 4, 12).unwrap() } else { quantizer(&mut random) };
        let shape = EncodeGenericShape {
            quantizer,
            element: random.pick(&[VectorElement::F32, VectorElement::F16, VectorElement::Bf16]),
        };
        let Some(kernel) = where_it_fits(&device, EncodeGeneric::new(&device, shape)) else { continue };
        let dim = quantizer.dim();
        let (batch, heads) = (1 + random.below(3), 1 + random.below(3));
        let firsts: Vec<u32> = (0..batch).map(|_| random.pick(&[0, 1, 63, 64, 300])).collect();
        let counts: Vec<u32> = (0..batch).map(|_| random.pick(&[0, 1, 5, 64, 100, 400])).collect();
        let (max_count, capacity) = (*counts.iter().max().unwrap() as usize, 700);
        let mut vectors: Vec<f32> = random
            .normals(batch * heads * max_count * dim)
            .into_iter()
            .map(|x| rounded(shape.element, x))
            .collect();
        if !vectors.is_empty() {
            let at = random.below(vectors.len());
            vectors[at] = f32::NAN;
        }
        let books: Vec<Vec<f32>> = (0..heads).map(|_| random.normals(quantizer.codebook_len())).collect();
        let there = Buffer::new(&device, &bytes_of(shape.element, &vectors));
        let centroids = Buffer::new(&device, &books.concat());
        let (firsts_there, counts_there) = (Buffer::new(&device, &firsts), Buffer::new(&device, &counts));
        let codes_len = quantizer.codes_len(capacity);
        let before = random.bytes(batch * heads * codes_len);
        let codes = Buffer::new(&device, &before);
        let arguments = EncodeGenericArguments {
            batch,
            heads,
            max_count,
            vectors: there.pointer().cast(),
            strides: [heads * max_count * dim, max_count * dim, dim],
            centroids: centroids.pointer(),
            firsts: firsts_there.pointer(),
            counts: counts_there.pointer(),
            capacity,
            codes: codes.pointer(),
        };
        launch!(device, kernel, &arguments);
        let after = codes.read();
        for row in 0..batch * heads {
            let (first, count) = (firsts[row / heads] as usize, counts[row / heads] as usize);
            let part = row * codes_len..(row + 1) * codes_len;
            let old = Codes::new(quantizer, capacity, &before[part.clone()]).unwrap();
            let new = Codes::new(quantizer, capacity, &after[part]).unwrap();
            let untouched = (0..capacity).filter(|token| !(first..first + count).contains(token));
            for token in untouched {
                assert!(new.iter_vector(token).eq(old.iter_vector(token)), "{shape:?}: token {token}");
            }
            let rows = &vectors[row * max_count * dim..][..count * dim];
            let book = CodebookBuf::new(quantizer, &books[row % heads]).unwrap();
            let mut expected = vec![0; quantizer.codes_len(first + count)];
            encode_into_with(Backend::Scalar, &book.view(), rows, first, &mut expected).unwrap();
            let expected = Codes::new(quantizer, first + count, &expected).unwrap();
            for (i, row) in rows.chunks_exact(dim).enumerate() {
                let codes = new.iter_vector(first + i).zip(expected.iter_vector(first + i));
                for (j, (got, want)) in codes.enumerate().filter(|(_, (got, want))| got != want) {
                    let x = &row[j * quantizer.dsub()..][..quantizer.dsub()];
                    let finite = |x: f32| if x.is_finite() { f64::from(x) } else { 0.0 };
                    let distance = |code: usize| -> f64 {
                        let centroid = book.view().centroid(j, code).map(f64::from);
                        x.iter().zip(centroid).map(|(&x, y)| (finite(x) - y).powi(2)).sum()
                    };
                    let centroid = book.view().centroid(j, want).map(f64::from);
                    let lengths: f64 = x.iter().zip(centroid).map(|(&x, y)| finite(x).powi(2) + y * y).sum();
                    assert!(
                        distance(got) <= distance(want) + TIE * lengths,
                        "{shape:?}, seed {seed}, vector {i}, subspace {j}: {got} for {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    for (dim, m, nbits) in [(128, 1, 12), (512, 1, 4), (1 << 50, 1, 12)] {
        let shape =
            TrainShape { quantizer: PqShape::new(dim, m, nbits).unwrap(), element: VectorElement::F16 };
        assert!(matches!(shape.program(), Err(Error::Unsupported { .. })), "{shape:?}");
    }
}
