//! Attention with some rows still in pinned host memory equals attention with all rows on the device, and
//! stores these rows in their slots.

use cudarc::driver::PinnedHostSlice;
use kv_gpu::pq::{GatherAttend, GatherAttendArguments, GatherAttendShape, MissingRows, Prefetch};
use kv_gpu::{Device, DevicePtr, Element, Error};

use crate::common::{Buffer, Random, SIDES, device, from_element, relative_error, to_element};

/// Maximum relative error of an output vector, by element type: the rounding of weights and of the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 1.2e-2)];

/// The contents of a slot before its row arrives.
const EMPTY: u16 = u16::MAX; // NaN

/// Sizes of a launch, and its rows and queries.
struct Case {
    shape: GatherAttendShape,
    heads: usize,
    group: usize,
    first_slot: usize,
    n_slots: usize,
    list_len: usize,
    head_rows: usize,
    exact_lengths: Vec<u32>, // (batch,)
    counts: Vec<u32>,        // (batch,)
    tokens: Vec<u32>,        // (batch, heads, list_len)
    slots: Vec<u32>,         // (batch, heads, list_len)
    exact: [Vec<u16>; 2],    // (batch, heads, first_slot, dim)
    host: [Vec<u16>; 2],     // (batch, heads, head_rows, dim)
    queries: Vec<u16>,       // (batch, heads, group, dim)
}

/// The first `len` of the numbers below `n`, shuffled.
fn some_of(random: &mut Random, n: usize, len: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..n as u32).collect();
    (0..len).for_each(|i| all.swap(i, i + random.below(n - i)));
    all.truncate(len);
    all
}

impl Case {
    fn random(random: &mut Random, batches: &[usize], most: usize) -> Self {
        let element = random.pick(&[Element::F16, Element::Bf16]);
        let shape = GatherAttendShape { dim: random.pick(&[64, 128]), element };
        let (batch, heads, group) = (random.pick(batches), 1 + random.below(5), 1 + random.below(12));
        let (first_slot, list_len) = (1 + random.below(80), 1 + random.below(most));
        let (n_slots, head_rows) = (list_len + random.below(50), list_len + random.below(500));
        let mut up_to = |most: usize| -> Vec<u32> {
            let mut below = || random.below(most + 1);
            (0..batch).map(|_| [0, most, below()][below() % 3] as u32).collect()
        };
        let (exact_lengths, counts) = (up_to(first_slot), up_to(list_len));
        let mut lists = |n: usize| -> Vec<u32> {
            (0..batch * heads).flat_map(|_| some_of(random, n, list_len)).collect()
        };
        let (tokens, slots) = (lists(head_rows), lists(n_slots));
        let mut elements = |rows: usize, size: f32| -> Vec<u16> {
            let numbers = random.normals(rows * shape.dim);
            numbers.into_iter().map(|x| to_element(element, size * x)).collect()
        };
        let exact = SIDES.map(|_| elements(batch * heads * first_slot, 1.0));
        let host = SIDES.map(|_| elements(batch * heads * head_rows, 1.0));
        let queries = elements(batch * heads * group, 2.0);
        Self {
            shape,
            heads,
            group,
            first_slot,
            n_slots,
            list_len,
            head_rows,
            exact_lengths,
            counts,
            tokens,
            slots,
            exact,
            host,
            queries,
        }
    }

    fn batch(&self) -> usize {
        self.counts.len()
    }

    fn capacity(&self) -> usize {
        self.first_slot + self.n_slots
    }

    /// The row of a chosen token.
    fn chosen(&self, side: usize, head: usize, i: usize) -> &[u16] {
        let token = self.tokens[head * self.list_len + i] as usize;
        &self.host[side][(head * self.head_rows + token) * self.shape.dim..][..self.shape.dim]
    }

    /// Rows on the device (batch, heads, capacity, dim), with the chosen rows for which `is_there` in their
    /// slots.
    fn rows(&self, side: usize, is_there: impl Fn(usize, usize) -> bool) -> Vec<u16> {
        let (dim, exact) = (self.shape.dim, self.first_slot * self.shape.dim);
        let mut rows = vec![EMPTY; self.batch() * self.heads * self.capacity() * dim];
        for (head, rows) in rows.chunks_exact_mut(self.capacity() * dim).enumerate() {
            rows[..exact].copy_from_slice(&self.exact[side][head * exact..][..exact]);
            for i in (0..self.counts[head / self.heads] as usize).filter(|&i| is_there(head, i)) {
                let at = exact + self.slots[head * self.list_len + i] as usize * dim;
                rows[at..][..dim].copy_from_slice(self.chosen(side, head, i));
            }
        }
        rows
    }

    /// Launches with the chosen rows for which `is_missing` in host memory only, or with all of them in
    /// slots, and checks the slots afterwards. Returns the output.
    fn run(
        &self,
        device: &Device,
        host: &[PinnedHostSlice<u16>; 2],
        is_missing: Option<&dyn Fn(usize, usize) -> bool>,
        pdl: bool,
    ) -> Vec<u16> {
        let is_there = |head: usize, i: usize| is_missing.is_none_or(|is_missing| !is_missing(head, i));
        let rows = [0, 1].map(|side| Buffer::new(device, &self.rows(side, is_there)));
        let words = self.list_len.div_ceil(32);
        let mut bits = vec![0_u32; self.batch() * self.heads * words];
        for head in 0..self.batch() * self.heads {
            for i in (0..self.counts[head / self.heads] as usize).filter(|&i| !is_there(head, i)) {
                bits[head * words + i / 32] |= 1 << (i % 32);
            }
        }
        let [exact_lengths, counts, tokens, slots, bits] =
            [&self.exact_lengths, &self.counts, &self.tokens, &self.slots, &bits]
                .map(|list| Buffer::new(device, list));
        let queries = Buffer::new(device, &self.queries);
        let out = Buffer::new(device, &vec![EMPTY; self.queries.len()]);
        let attend = GatherAttend::new(device, self.shape).unwrap();
        let workspace_len = attend.workspace_len(self.batch(), self.heads, self.group);
        let workspace = Buffer::new(device, &vec![0_u8; workspace_len]);
        let pinned = |side: usize| DevicePtr::<u16>::new(host[side].as_ptr().unwrap() as u64).unwrap().cast();
        let arguments = GatherAttendArguments {
            batch: self.batch(),
            heads: self.heads,
            group: self.group,
            capacity: self.capacity(),
            keys: rows[0].pointer().cast(),
            values: rows[1].pointer().cast(),
            first_slot: self.first_slot,
            exact_lengths: exact_lengths.pointer(),
            counts: counts.pointer(),
            slots: slots.pointer(),
            list_len: self.list_len,
            missing: is_missing.map(|_| MissingRows {
                keys: pinned(0),
                values: pinned(1),
                head_rows: self.head_rows,
                tokens: tokens.pointer(),
                bits: bits.pointer(),
                prefetch: Some(Prefetch { bytes: workspace.pointer(), len: workspace_len }),
            }),
            queries: queries.pointer().cast(),
            scale: 1.0 / (self.shape.dim as f32).sqrt(),
            out: out.pointer().cast(),
            pdl,
            workspace: workspace.pointer(),
        };
        // The second launch reuses the first one's workspace, and writes the same.
        for _ in 0..2 {
            // SAFETY: the buffers live until their contents have been read, and have the lengths that the
            // arguments say; slots of a list differ.
            #[allow(unsafe_code)]
            unsafe { attend.launch(device.stream().cu_stream(), &arguments) }.unwrap();
        }
        for (side, rows) in rows.iter().enumerate() {
            assert!(rows.read() == self.rows(side, |_, _| true), "side {side}: other rows in the slots");
        }
        out.read()
    }

    /// Attention of a query in f64.
    fn expected(&self, head: usize, query: usize) -> Vec<f32> {
        let (dim, element) = (self.shape.dim, self.shape.element);
        let number = |bits: &u16| f64::from(from_element(element, *bits));
        let query = &self.queries[(head * self.group + query) * dim..][..dim];
        let exact = |side: usize, i: usize| &self.exact[side][(head * self.first_slot + i) * dim..][..dim];
        let (n_exact, n_chosen) =
            (self.exact_lengths[head / self.heads] as usize, self.counts[head / self.heads] as usize);
        let side = |side: usize| -> Vec<&[u16]> {
            let chosen = (0..n_chosen).map(|i| self.chosen(side, head, i));
            (0..n_exact).map(|i| exact(side, i)).chain(chosen).collect()
        };
        let dot = |key: &&[u16]| -> f64 { query.iter().zip(*key).map(|(q, k)| number(q) * number(k)).sum() };
        let scores: Vec<f64> = side(0).iter().map(|key| dot(key) / (dim as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; dim];
        for (weight, value) in weights.iter().zip(side(1)) {
            out.iter_mut().zip(value).for_each(|(out, x)| *out += weight / total * number(x));
        }
        out.into_iter().map(|x| x as f32).collect()
    }
}

fn check(device: &Device, random: &mut Random, batches: &[usize], most: usize) {
    let case = Case::random(random, batches, most);
    // SAFETY: written before it is read.
    #[allow(unsafe_code)]
    let mut host =
        case.host.each_ref().map(|rows| unsafe { device.context().alloc_pinned::<u16>(rows.len()) }.unwrap());
    for (pinned, rows) in host.iter_mut().zip(&case.host) {
        pinned.as_mut_slice().unwrap().copy_from_slice(rows);
    }
    let pdl = random.below(2) == 1;
    let seed = random.next() as usize;
    let half = |head: usize, i: usize| Random((seed + 1000 * head + i) as u64).below(2) == 0;
    let out = case.run(device, &host, None, pdl);
    let some: [&dyn Fn(usize, usize) -> bool; 4] = [&half, &|_, i| i % 16 == 3, &|_, _| true, &|_, _| false];
    for is_missing in some {
        assert!(case.run(device, &host, Some(is_missing), pdl) == out, "{:?}: other bytes", case.shape);
    }
    let tolerance = TOLERANCES.iter().find(|(e, _)| *e == case.shape.element).unwrap().1;
    for (index, got) in out.chunks_exact(case.shape.dim).enumerate() {
        let (head, query) = (index / case.group, index % case.group);
        let got: Vec<f32> = got.iter().map(|&bits| from_element(case.shape.element, bits)).collect();
        let error = relative_error(&got, &case.expected(head, query));
        let Case { shape, exact_lengths, counts, group, .. } = &case;
        assert!(
            error <= tolerance,
            "{shape:?}, exact {exact_lengths:?}, chosen {counts:?}, {group} queries: head {head}, query {query}: {error}"
        );
    }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..40 {
        check(&device, &mut Random(seed), &[1, 2, 5], [20, 300, 3000][seed as usize % 3]);
    }
}

#[test]
fn more_heads_than_multiprocessors_agree() {
    let Some(device) = device("more_heads_than_multiprocessors_agree") else { return };
    for seed in 100..103 {
        check(&device, &mut Random(seed), &[70], 100);
    }
}

#[test]
fn a_query_that_is_not_finite_gives_nan() {
    let Some(device) = device("a_query_that_is_not_finite_gives_nan") else { return };
    let mut case = Case::random(&mut Random(5), &[1], 300);
    case.exact_lengths = vec![case.first_slot as u32];
    let dim = case.shape.dim;
    case.queries[3] = to_element(case.shape.element, f32::NAN);
    // SAFETY: never read.
    #[allow(unsafe_code)]
    let host = SIDES.map(|_| unsafe { device.context().alloc_pinned::<u16>(8) }.unwrap());
    let out = case.run(&device, &host, None, false);
    let is_nan = |bits: &u16| from_element(case.shape.element, *bits).is_nan();
    assert!(out[..dim].iter().all(is_nan));
    assert!(!out[dim * case.group..].iter().any(is_nan), "other heads");
}

#[test]
fn other_dimensions_are_errors() {
    for dim in [0, 32, 96, 256] {
        let shape = GatherAttendShape { dim, element: Element::F16 };
        assert!(matches!(shape.program(), Err(Error::Unsupported { .. })), "{dim}");
    }
}
