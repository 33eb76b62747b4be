//! Invalid arguments are typed errors that name the argument and the length it needs.

use pq_core::*;

fn codebook(shape: PqShape) -> CodebookBuf {
    let centroids: Vec<f32> = (0..shape.codebook_len()).map(|i| (i as f32 * 0.37).sin()).collect();
    CodebookBuf::new(shape, &centroids).unwrap()
}

#[test]
fn bad_arguments_are_errors() {
    let shape = PqShape::new(8, 4, 6).unwrap();
    let book = codebook(shape);
    let mut packed = vec![0; shape.codes_len(2)];
    assert_eq!(
        encode_into(&book.view(), &[0.0_f32; 9], 0, &mut packed),
        Err(Error::PartialRow { what: "vectors", row: 8, actual: 9 })
    );
    assert!(matches!(
        encode_into(&book.view(), &[0.0_f32; 16], 64, &mut packed),
        Err(Error::TooShort { .. })
    ));
    assert!(matches!(
        encode_into(&book.view(), &[0.0_f32; 16], usize::MAX, &mut packed),
        Err(Error::TooShort { .. })
    ));
    let codes = Codes::new(shape, 2, &packed).unwrap();
    let other = PqShape::new(8, 4, 5).unwrap();
    let table = vec![0.0; other.lut_len()];
    let lut = Lut::new(other, &table).unwrap();
    assert_eq!(scan_into(&lut, &codes, &mut [0.0; 2]), Err(Error::ShapeMismatch));
    let many = PqShape::new(300, 300, 1).unwrap();
    let table = vec![0.0; many.lut_len()];
    let mut storage = vec![0; many.quantized_lut_len(LutPrecision::U8)];
    let lut = Lut::new(many, &table).unwrap();
    let wrong = QuantizedLut::new(&lut, LutPrecision::U8, &mut storage);
    assert!(matches!(wrong, Err(Error::TooManySubspaces { m: 300, max: 257 })));
    let mut table = vec![0.0; other.lut_len()];
    table[7] = f32::NAN;
    let mut storage = vec![0; other.quantized_lut_len(LutPrecision::U8)];
    let wrong = QuantizedLut::new(&Lut::new(other, &table).unwrap(), LutPrecision::U8, &mut storage);
    assert!(matches!(wrong, Err(Error::NotFinite { index: 7, .. })));
    assert!(matches!(train(shape, &[] as &[f32], &TrainOptions::default()), Err(Error::Zero { .. })));
    assert!(matches!(train(shape, &[f32::NAN; 8], &TrainOptions::default()), Err(Error::NotFinite { .. })));
    let short = TrainOptions { start: Start::From(&[0.0; 3]), ..Default::default() };
    assert!(matches!(train(shape, &[0.0_f32; 8], &short), Err(Error::Length { .. })));
    for backend in Backend::ALL.into_iter().filter(|backend| !backend.is_available()) {
        assert_eq!(top_k_into_with(backend, &[1.0], 1, &mut [0]), Err(Error::BackendUnavailable));
    }
}

#[test]
fn views_that_do_not_fit_are_errors() {
    let (shape, other) = (PqShape::new(8, 4, 6).unwrap(), PqShape::new(8, 4, 5).unwrap());
    let (book, tables) = (codebook(shape), vec![0.0; 2 * shape.lut_len()]);
    let bytes = vec![0; shape.codes_len(3)];
    let codes = Codes::new(shape, 3, &bytes).unwrap();
    assert!(matches!(Luts::new(shape, &tables[1..]), Err(Error::PartialRow { what: "luts", .. })));
    let no_query = lut_into::<f32>(&book.view(), &[], &mut []).map(|luts| luts.group());
    assert_eq!(no_query, Err(Error::Zero { what: "number of queries" }));
    let luts = Luts::new(shape, &tables).unwrap();
    assert_eq!(luts.group(), 2);

    let (mut floats, mut stats) = (vec![0.0; SearchScratch::len(2, 3)], vec![SoftmaxStats::EMPTY; 2]);
    let short = SearchScratch::new(3, &mut floats[1..], &mut stats);
    assert!(matches!(short, Err(Error::TooShort { needed: 9, actual: 8, .. })));
    let huge = SearchScratch::new(usize::MAX, &mut floats, &mut stats);
    assert!(matches!(huge, Err(Error::TooShort { needed: usize::MAX, .. })));
    let search = Search { k: 2, ..Search::default() };
    let mut scratch = SearchScratch::new(3, &mut floats, &mut stats).unwrap();
    let found = search_into(&luts, &codes, &search, &mut scratch, &mut [0]);
    assert_eq!(found, Err(Error::TooShort { what: "tokens", needed: 2, actual: 1 }));
    let one = Luts::new(shape, &tables[..shape.lut_len()]).unwrap();
    assert!(matches!(
        search_into(&one, &codes, &search, &mut scratch, &mut [0; 2]),
        Err(Error::Length { .. })
    ));
    let wrong = Luts::new(other, &tables).unwrap();
    assert_eq!(search_into(&wrong, &codes, &search, &mut scratch, &mut [0; 2]), Err(Error::ShapeMismatch));
    let rerank = Rerank { k: 2, rule: GroupRule::SumOfSoftmax };
    let kept = rerank_into(&[0.0; 4], &[0.0_f32; 6], &rerank, &mut scratch, &mut [0]);
    assert_eq!(kept, Err(Error::TooShort { what: "kept", needed: 2, actual: 1 }));
    let kept = rerank_into(&[0.0; 5], &[0.0_f32; 6], &rerank, &mut scratch, &mut [0; 2]);
    assert!(matches!(kept, Err(Error::PartialRow { what: "queries", .. })));

    let fewer = Codes::new(shape, 2, &bytes).unwrap();
    assert!(matches!(CodedTokens::new(codes, fewer, book.view()), Err(Error::Length { .. })));
    let of_other = codebook(other);
    assert!(matches!(CodedTokens::new(codes, codes, of_other.view()), Err(Error::ShapeMismatch)));
    let tokens = CodedTokens::new(codes, codes, book.view()).unwrap();
    assert!(matches!(
        tokens.with_key_scales(&[1.0_f32; 2][..]),
        Err(Error::Length { what: "key scales", .. })
    ));
    assert!(matches!(tokens.with_value_scales(&[1.0_f32; 4][..]), Err(Error::Length { .. })));
    assert!(tokens.with_key_scales(None::<&[f32]>).is_ok());
    let (mut out, mut stats) = (vec![0.0; 16], vec![SoftmaxStats::EMPTY; 2]);
    let mut scratch = vec![0.0; attend_scratch_len(shape, 2) + 1];
    let bias = [0.0_f32; 5];
    let masked = tokens.with_bias(&bias[..]);
    let result = attend_into(&luts, &masked, &mut scratch, &mut out, &mut stats);
    assert_eq!(result, Err(Error::Length { what: "bias", expected: 6, actual: 5 }));
    assert_eq!(attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats), Ok(()));
    let result = attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats[1..]);
    assert!(matches!(result, Err(Error::Length { what: "stats", .. })));
    let result = attend_into(&wrong, &tokens, &mut scratch, &mut out, &mut stats);
    assert_eq!(result, Err(Error::ShapeMismatch));
}

#[test]
fn errors_name_the_length_that_is_needed() {
    let (expected, needed, actual) = (4, 4, 3);
    let exact = Error::Length { what: "scores", expected, actual };
    assert_eq!(exact.to_string(), "scores has length 3, expected exactly 4");
    let short = Error::TooShort { what: "tokens", needed, actual };
    assert_eq!(short.to_string(), "tokens has length 3, expected at least 4");
    let partial = Error::PartialRow { what: "vectors", row: 2, actual };
    assert_eq!(partial.to_string(), "vectors has length 3, expected a multiple of 2");
}
