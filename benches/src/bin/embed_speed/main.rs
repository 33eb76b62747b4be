//! Overheads of embedding the cores in an engine: batches of keys of any length and offset, pages,
//! interleaved heads, the owning caches against plain slices, and views of the codec's planes. Prints
//! `benches/results/embed.md`, or the tables named as arguments.
//!
//! Every table compares times of one run on one thread; each time is the minimum of many rounds, in which the
//! cases alternate.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

mod exact_layouts;
mod low_rank;
mod planes;

use std::cell::RefCell;
use std::time::Instant;

use kv_benches::keys;
use pq_core::*;

const DIM: usize = 128;
/// Heads per interleaved row.
const HEADS: usize = 8;

/// The minimum seconds of each case over `rounds` rounds, in which the cases alternate.
fn least(rounds: usize, cases: &mut [Box<dyn FnMut() + '_>]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; cases.len()];
    for _ in 0..rounds {
        for (best, run) in best.iter_mut().zip(cases.iter_mut()) {
            let start = Instant::now();
            run();
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    best
}

fn backends() -> impl Iterator<Item = Backend> {
    [Backend::Avx512, Backend::Avx2, Backend::Neon].into_iter().filter(|backend| backend.is_available())
}

/// A codebook of `shape` and packed codes of `rows`.
fn coded(shape: PqShape, rows: &[f32]) -> (CodebookBuf, Vec<u8>) {
    let options = TrainOptions { iterations: 4, max_vectors: Some(1024), encode: true, ..Default::default() };
    let trained = train(shape, rows, &options).unwrap();
    (CodebookBuf::new(shape, &trained.centroids).unwrap(), trained.codes)
}

/// The name of a table, and the function that measures and prints it.
type Table = (&'static str, fn(&[f32]));

fn main() {
    let rows = keys(4096, DIM);
    println!(
        "# The cores in an engine\n\nMade by `cargo run --release -p kv-benches --bin embed_speed`: one thread, minimum of 40 rounds in which"
    );
    println!(
        "the cases of a table alternate; keys of {DIM} components. Only the ratios within a row carry over to other machines."
    );
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    let tables: [Table; 8] = [
        ("runs", runs),
        ("pages", pages),
        ("layouts", layouts),
        ("exact-layouts", exact_layouts::measure),
        ("cache", cache),
        ("low-rank-layouts", low_rank::layouts),
        ("low-rank-cache", low_rank::cache),
        ("planes", planes::views),
    ];
    for (name, table) in tables {
        if chosen.is_empty() || chosen.iter().any(|chosen| chosen == name) {
            table(&rows);
        }
    }
}

/// Encoding by batch length, at the best and the worst offset in a block.
fn runs(rows: &[f32]) {
    const RUNS: [usize; 6] = [1, 16, 32, 64, 65, 1000];
    println!(
        "\n## Encoding a run of keys at any offset\n\nMicroseconds per key at the best and the worst offset in a block, and the ratio of"
    );
    println!(
        "the worst to an aligned run of 64.\n\n| shape, backend | aligned 64 | 1 | 16 | 32 | 64 | 65 | 1,000 |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    for (m, nbits) in [(64, 8), (32, 8), (16, 8), (64, 4)] {
        let shape = PqShape::new(DIM, m, nbits).unwrap();
        let (book, codes) = coded(shape, rows);
        for backend in backends() {
            let mut aligned = f64::INFINITY;
            let mut extremes = vec![];
            for run in RUNS {
                let mut packed = codes.clone();
                let (step, rounds) = if run < 1000 { (1, 40) } else { (7, 10) };
                let mut best: Vec<f64> = vec![f64::INFINITY; BLOCK.div_ceil(step)];
                for _ in 0..rounds {
                    for (best, first) in best.iter_mut().zip((0..BLOCK).step_by(step)) {
                        let start = Instant::now();
                        encode_into_with(backend, &book.view(), &rows[..run * DIM], first, &mut packed)
                            .unwrap();
                        *best = best.min(start.elapsed().as_secs_f64() / run as f64);
                    }
                }
                if run == BLOCK {
                    aligned = best[0];
                }
                extremes.push(best.iter().fold((f64::MAX, 0.0_f64), |(a, b), &x| (a.min(x), b.max(x))));
            }
            let cell =
                |(low, high)| format!("{:.2} to {:.2} ({:.1}x)", low * 1e6, high * 1e6, high / aligned);
            let cells: Vec<String> = extremes.into_iter().map(cell).collect();
            println!("| {m}x{nbits} {backend:?} | {:.2} | {} |", aligned * 1e6, cells.join(" | "));
        }
    }
}

/// Attention and scan on pages, against contiguous codes.
fn pages(rows: &[f32]) {
    const PAGES: [usize; 5] = [16, 32, 64, 128, 256];
    println!(
        "\n## Pages\n\n4,096 tokens in pages in random order; microseconds for contiguous codes, and the factor of pages.\n"
    );
    println!(
        "| what | shape, backend | contiguous | 16 tokens | 32 | 64 | 128 | 256 |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    let n = rows.len() / DIM;
    for (m, nbits) in [(64, 8), (32, 8), (64, 4)] {
        let shape = PqShape::new(DIM, m, nbits).unwrap();
        let (book, packed) = coded(shape, rows);
        for backend in backends() {
            let tables = PAGES.map(|page| {
                let count = n / page;
                (0..count as u32).map(|i| (i * 37 + 5) % count as u32).collect::<Vec<_>>()
            });
            let mut views = vec![Codes::new(shape, n, &packed).unwrap()];
            for (page, table) in PAGES.iter().zip(&tables) {
                views.push(Codes::paged(shape, n, &packed, table, *page).unwrap());
            }
            for group in [1, 4] {
                let mut table = vec![0.0; group * shape.lut_len()];
                let luts = lut_into_with(backend, &book.view(), &rows[..group * DIM], &mut table).unwrap();
                let (luts, book) = (&luts, book.view());
                // A shared scratch: one per case would not fit in L2.
                let scratch = RefCell::new(vec![0.0; attend_scratch_len(shape, group)]);
                let mut cases: Vec<Box<dyn FnMut()>> = vec![];
                for &codes in &views {
                    let scratch = &scratch;
                    let (mut out, mut stats) = (vec![0.0; group * DIM], vec![SoftmaxStats::EMPTY; group]);
                    cases.push(Box::new(move || {
                        let mut scratch = scratch.borrow_mut();
                        let tokens = CodedTokens::new(codes, codes, book).unwrap();
                        attend_into_with(backend, luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
                    }));
                }
                line(&format!("attention, {group} queries"), shape, backend, &least(40, &mut cases));
            }
            let mut table = vec![0.0; shape.lut_len()];
            let luts = lut_into_with(backend, &book.view(), &rows[..DIM], &mut table).unwrap();
            let lut = luts.lut(0);
            let mut cases: Vec<Box<dyn FnMut()>> = vec![];
            for codes in &views {
                let (lut, mut scores) = (&lut, vec![0.0; n]);
                cases.push(Box::new(move || scan_into_with(backend, lut, codes, &mut scores).unwrap()));
            }
            line("scan", shape, backend, &least(40, &mut cases));
        }
    }
}

fn line(what: &str, shape: PqShape, backend: Backend, seconds: &[f64]) {
    let factors: Vec<String> = seconds[1..].iter().map(|x| format!("{:.2}x", x / seconds[0])).collect();
    let (m, nbits) = (shape.m(), shape.nbits());
    println!("| {what} | {m}x{nbits} {backend:?} | {:.0} | {} |", seconds[0] * 1e6, factors.join(" | "));
}

/// Encoding one head of interleaved rows, against contiguous rows.
fn layouts(rows: &[f32]) {
    println!(
        "\n## Tokens first (NHD) against heads first (HND)\n\nEncoding 512 keys of one of {HEADS} heads: microseconds, and the factor.\n"
    );
    println!("| shape, backend | HND | NHD |\n| --- | --- | --- |");
    for (m, nbits) in [(64, 8), (16, 8)] {
        let shape = PqShape::new(DIM, m, nbits).unwrap();
        let (book, codes) = coded(shape, rows);
        let interleaved = Rows::contiguous(rows, HEADS * DIM).unwrap().columns(3 * DIM, DIM).unwrap();
        let gathered: Vec<f32> = interleaved.iter().flatten().copied().collect();
        let contiguous = Rows::contiguous(&gathered, DIM).unwrap();
        for backend in backends() {
            let mut cases: Vec<Box<dyn FnMut()>> = vec![];
            for rows in [contiguous, interleaved] {
                let (book, mut packed) = (book.view(), codes.clone());
                cases.push(Box::new(move || {
                    encode_rows_into_with(backend, &book, rows, 0, &mut packed).unwrap();
                }));
            }
            let seconds = least(40, &mut cases);
            let factor = seconds[1] / seconds[0];
            println!("| {m}x{nbits} {backend:?} | {:.0} | {factor:.2}x |", seconds[0] * 1e6);
        }
    }
}

/// `HeadCache` and `LayerCache` against direct calls on slices.
fn cache(rows: &[f32]) {
    println!(
        "\n## LayerCache against the bare slices\n\nOne head of 4,096 tokens (4 sinks, 64 to 95 recent), 4 queries; microseconds, and the factor.\n"
    );
    println!("| shape, backend | slices | LayerCache |\n| --- | --- | --- |");
    let group = 4;
    for (m, nbits) in [(64, 8), (32, 8), (64, 4)] {
        let shape = PqShape::new(DIM, m, nbits).unwrap();
        let (book, _) = coded(shape, rows);
        let books = [std::sync::Arc::new(HeadBooks::new(book.clone(), book))];
        let mut cache = LayerCache::new(&books, Window { sinks: 4, recent: 64, batch: 32 }).unwrap();
        let all = Rows::contiguous(rows, DIM).unwrap();
        cache.append(all, all).unwrap();
        let queries: Vec<f32> = rows[..group * DIM].iter().map(|x| x / 16.0).collect();
        let head = &cache.heads()[0];
        let (key_codes, value_codes) = (head.store().keys(), head.store().values());
        let coded = CodedTokens::new(key_codes, value_codes, books[0].values()).unwrap();
        let (sinks, recent) = (&rows[..4 * DIM], &rows[rows.len() - head.recent() * DIM..]);
        for backend in backends() {
            let (mut expected, mut out) = (vec![0.0; group * DIM], vec![0.0; group * DIM]);
            let mut workspace = Workspace::default();
            let mut tables = vec![0.0; group * shape.lut_len()];
            let mut scratch = vec![0.0; attend_scratch_len(shape, group)];
            let mut stats = vec![SoftmaxStats::EMPTY; group];
            let mut cases: Vec<Box<dyn FnMut()>> = vec![
                Box::new(|| {
                    expected.fill(0.0);
                    stats.fill(SoftmaxStats::EMPTY);
                    let luts = lut_into_with(backend, &books[0].keys(), &queries, &mut tables).unwrap();
                    attend_into_with(backend, &luts, &coded, &mut scratch, &mut expected, &mut stats)
                        .unwrap();
                    for rows in [sinks, recent] {
                        let tokens = ExactTokens::contiguous(rows, DIM, rows, DIM).unwrap();
                        let (attention, queries) = (Attention::default(), Rows::from(&queries[..]));
                        attend_exact_into_with(
                            backend,
                            &attention,
                            queries,
                            &tokens,
                            &mut scratch,
                            &mut expected,
                            &mut stats,
                        )
                        .unwrap();
                    }
                    normalize_all(&stats, &mut expected).unwrap();
                }),
                Box::new(|| {
                    let (caches, attention) = ([&cache], Attention::default());
                    let queries = Rows::from(&queries[..]);
                    attend_batch_into_with(backend, &caches, &attention, queries, &mut workspace, &mut out)
                        .unwrap();
                }),
            ];
            let seconds = least(200, &mut cases);
            drop(cases);
            assert_eq!(expected, out);
            let factor = seconds[1] / seconds[0];
            println!("| {m}x{nbits} {backend:?} | {:.1} | {factor:.3}x |", seconds[0] * 1e6);
        }
    }
}
