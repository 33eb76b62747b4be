//! Attention on codes of any shape agrees with `pq_core::attend_into`, scales and bias included.

use kv_gpu::Error;
use kv_gpu::pq::{AttendGeneric, AttendGenericArguments, AttendGenericShape};
use pq_core::{
    Backend, CodebookBuf, CodedTokens, Codes, Luts, PqShape, SoftmaxStats, attend_into_with,
    attend_scratch_len,
};

use crate::common::{Buffer, Random, SIDES, device, launch, relative_error};

/// Maximum relative error of an output vector and of the log-sum-exp: float sums have another order.
const TOLERANCE: f64 = 1e-4;

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    const SHAPES: [(usize, usize, u32); 9] = [
        (64, 2, 6),
        (128, 32, 12),
        (80, 5, 7),
        (64, 64, 1),
        (96, 48, 8),
        (128, 64, 8),
        (256, 16, 3),
        (32, 4, 11),
        (6, 3, 5),
    ];
    for seed in 0..40 {
        let mut random = Random(seed);
        let [keys, values] = SIDES.map(|_| {
            let (dim, m, nbits) = random.pick(&SHAPES);
            PqShape::new(dim, m, nbits).unwrap()
        });
        let shape = AttendGenericShape { keys, values, group: 1 + random.below(16) };
        let (group, dim) = (shape.group, values.dim());
        let (batch, heads) = (1 + random.below(3), 1 + random.below(3));
        let capacity = random.pick(&[1, 63, 64, 65, 256, 300, 600]);
        let lengths: Vec<u32> = (0..batch).map(|_| random.below(capacity + 1) as u32).collect();
        let pairs = batch * heads;
        let luts: Vec<f32> = random.normals(pairs * group * keys.lut_len()).iter().map(|x| 0.5 * x).collect();
        let books: Vec<Vec<f32>> = (0..heads).map(|_| random.normals(values.codebook_len())).collect();
        let codes = [keys, values].map(|shape| random.bytes(pairs * shape.codes_len(capacity)));
        let mut some = |n: usize| (random.below(2) == 1).then(|| random.normals(n));
        let scales = [some(pairs * capacity), some(pairs * capacity)];
        let mut bias = some(pairs * group * capacity);
        if let Some(bias) = &mut bias {
            (0..bias.len() / 5).for_each(|i| bias[5 * i] = f32::NEG_INFINITY); // a mask
        }

        let luts_there = Buffer::new(&device, &luts);
        let codes_there = codes.each_ref().map(|codes| Buffer::new(&device, codes));
        let centroids = Buffer::new(&device, &books.concat());
        let lengths_there = Buffer::new(&device, &lengths);
        let optional = [&scales[0], &scales[1], &bias].map(|x| x.as_ref().map(|x| Buffer::new(&device, x)));
        let pointer = |i: usize| optional[i].as_ref().map(Buffer::pointer);
        let out = Buffer::new(&device, &vec![f32::NAN; pairs * group * dim]);
        let log_sum_exp = Buffer::new(&device, &vec![f32::NAN; pairs * group]);
        let attend = AttendGeneric::new(&device, shape).unwrap();
        let arguments = AttendGenericArguments {
            batch,
            heads,
            capacity,
            luts: luts_there.pointer(),
            key_codes: codes_there[0].pointer(),
            value_codes: codes_there[1].pointer(),
            centroids: centroids.pointer(),
            lengths: lengths_there.pointer(),
            key_scales: pointer(0),
            value_scales: pointer(1),
            bias: pointer(2),
            out: out.pointer(),
            log_sum_exp: Some(log_sum_exp.pointer()),
        };
        launch!(device, attend, &arguments);
        let (out, log_sum_exp) = (out.read(), log_sum_exp.read());

        let mut scratch = vec![0.0; attend_scratch_len(values, group)];
        for pair in 0..pairs {
            let n = lengths[pair / heads] as usize;
            let [key_codes, value_codes] = SIDES.map(|side| {
                let (shape, codes) = ([keys, values][side as usize], &codes[side as usize]);
                Codes::new(shape, n, &codes[pair * shape.codes_len(capacity)..][..shape.codes_len(n)])
                    .unwrap()
            });
            let scales = scales.each_ref().map(|x| x.as_ref().map(|x| &x[pair * capacity..][..n]));
            let bias: Option<Vec<f32>> = bias.as_ref().map(|bias| {
                (0..group).flat_map(|g| bias[(pair * group + g) * capacity..][..n].to_vec()).collect()
            });
            let book = CodebookBuf::new(values, &books[pair % heads]).unwrap();
            let tokens = CodedTokens::new(key_codes, value_codes, book.view()).unwrap();
            let tokens = tokens.with_key_scales(scales[0]).unwrap().with_value_scales(scales[1]).unwrap();
            let tokens = tokens.with_bias(bias.as_deref());
            let luts = &luts[pair * group * keys.lut_len()..][..group * keys.lut_len()];
            let luts = Luts::new(keys, luts).unwrap();
            let (mut expected, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
            attend_into_with(Backend::Scalar, &luts, &tokens, &mut scratch, &mut expected, &mut stats)
                .unwrap();
            for (query, (expected, stats)) in expected.chunks_exact_mut(dim).zip(&stats).enumerate() {
                stats.normalize(expected);
                let place = format!("seed {seed}: {shape:?}, {n} tokens, pair {pair} query {query}");
                let error = relative_error(&out[(pair * group + query) * dim..][..dim], expected);
                assert!(error <= TOLERANCE, "{place}: error {error}");
                let (got, want) = (log_sum_exp[pair * group + query], stats.log_sum_exp());
                let close = f64::from((got - want).abs()) <= TOLERANCE * f64::from(want.abs().max(1.0));
                assert!(got == want || close, "{place}: log-sum-exp {got} for {want}");
            }
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let (small, large) = (PqShape::new(64, 2, 6).unwrap(), PqShape::new(1024, 2, 6).unwrap());
    for (values, group) in [(small, 0), (small, 17), (large, 1)] {
        let shape = AttendGenericShape { keys: small, values, group };
        assert!(matches!(shape.program(), Err(Error::Unsupported { .. })), "{shape:?}");
    }
}
