//! Tokens that lead all others by their codes, by far more than by their rows, or that the selection leaves
//! to their codes: the outputs are those of the definition, in `f64`, at every lead.

use half::f16;
use kv_gpu::pq::Side;
use kv_gpu::{Device, Element};
use pq_core::{CodebookBuf, Codes, GroupRule, PqShape, decode_into, decode_norm};

use super::case::{Case, Index, Inputs, Outputs};
use crate::common::{Random, device, from_element, relative_error};

/// Leads in natural logarithms.
const LEADS: [f64; 13] = [0.0, 2.0, 8.0, 11.0, 13.0, 20.0, 22.0, 28.0, 40.0, 60.0, 88.0, 90.0, 120.0];
/// Maximum relative error of an output vector, and absolute error of its log-sum-exp.
const TOLERANCE: f64 = 2e-3;
/// How a query's component that meets the leading tokens differs between the queries of a group: some lead by
/// half, and some not at all.
const SHARES: [f32; 4] = [1.0, 0.5, 0.0, 0.25];

/// How attention follows the selection.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// Concurrent with it on sm_90, for rows in device memory of few heads.
    Beside,
    /// After it: there are too many heads.
    ManyHeads,
    /// After it, before the rows arrive.
    Arriving,
    /// After it: it determines the number of rows.
    Bound,
}

/// A step with leading tokens.
struct Lead {
    case: Case,
    lead: f64,
    leaders: Vec<usize>,
    row: f32, // the leading component of the leaders' exact rows
}

impl Lead {
    fn new(form: Form, group: usize, values: (usize, u32), lead: f64, leaders: Vec<usize>) -> Self {
        let n = 1500;
        let mut case = Case::random(&mut Random(3));
        case.shape.keys = PqShape::new(128, 16, 8).unwrap();
        case.shape.values = PqShape::new(128, values.0, values.1).unwrap();
        (case.shape.group, case.shape.element) = (group, Element::F16);
        (case.shape.rule, case.shape.paged) = (GroupRule::SumOfSoftmax, group.is_multiple_of(2));
        (case.batch, case.heads) = (1, if form == Form::ManyHeads { 40 } else { 2 });
        (case.capacity, case.lengths, case.selected_len) = (n, vec![n as u32], n);
        case.page_tiles = if case.shape.paged { 3 } else { n.div_ceil(32) };
        (case.ks, case.exact_capacity, case.exact_lengths) = (vec![leaders.len() as u32 + 7], 7, vec![7]);
        (case.has_errors, case.has_code_queries, case.spread) = (false, false, 1.0);
        case.index = if form == Form::Arriving { Index::Order } else { Index::Token };
        if form == Form::Bound {
            case.adapt(0.2);
            case.ks = vec![n as u32];
        }
        Self { case, lead, leaders, row: -256.0 }
    }

    /// Component 0 of the keys is `lead` in the leaders' codes, 0 in those of the others.
    fn inputs(&self) -> Inputs {
        let (case, mut random) = (&self.case, Random(7));
        let (dim, group, m) = (case.shape.keys.dim(), case.shape.group, case.shape.keys.m());
        let mut inputs = case.inputs(&mut random, |queries| {
            for (i, query) in queries.chunks_exact_mut(dim).enumerate() {
                query[0] = SHARES[i % group % SHARES.len()];
            }
        });
        for books in &mut inputs.books {
            let mut centroids = books[Side::Keys as usize].centroids();
            let (dsub, last) = (dim / m, case.shape.keys.ksub() - 1);
            centroids[..dsub].fill(0.0);
            centroids[last * dsub..][..dsub].fill(0.0);
            centroids[last * dsub] = exact_component(self.lead, case.scale());
            books[Side::Keys as usize] = CodebookBuf::new(case.shape.keys, &centroids).unwrap();
        }
        for codes in &mut inputs.codes {
            self.lead_in(&mut codes[Side::Keys as usize], |t| self.leaders.contains(&t));
        }
        case.decode_rows(&mut inputs);
        for rows in inputs.rows[0].chunks_exact_mut(case.capacity * dim) {
            self.leaders.iter().for_each(|t| rows[t * dim] = self.row);
        }
        inputs
    }

    /// Gives the tokens that `leads` the component of the leaders, in the codes of a head's keys.
    fn lead_in(&self, codes: &mut [u8], leads: impl Fn(usize) -> bool) {
        // A block of tokens has one run of codes per subspace.
        let keys = self.case.shape.keys;
        let (block, run) = (keys.block_size(), keys.block_size() / keys.m());
        for (i, codes) in codes.chunks_exact_mut(block).enumerate() {
            for (t, code) in codes[..run].iter_mut().enumerate() {
                *code = if leads(i * run + t) { u8::MAX } else { 0 };
            }
        }
    }

    /// Runs the step and checks it; `None` if the shape does not fit the device.
    fn check(&self, device: &Device) -> Option<Outputs> {
        self.check_within(device, &self.inputs(), TOLERANCE)
    }

    fn check_within(&self, device: &Device, inputs: &Inputs, tolerance: f64) -> Option<Outputs> {
        let (case, lead) = (&self.case, self.lead);
        let graph = case.index == Index::Token && !case.shape.paged;
        let outputs = case.run_on_device(device, inputs, graph)?;
        let (group, dim) = (case.shape.group, case.shape.keys.dim());
        for head in 0..case.heads {
            for (g, (out, log_sum_exp)) in defined(case, inputs, &outputs, head).into_iter().enumerate() {
                let query = head * group + g;
                let bits = &outputs.out[query * dim..][..dim];
                let got: Vec<f32> = bits.iter().map(|&x| from_element(case.shape.element, x)).collect();
                let (error, log) = (relative_error(&got, &out), f32::from_bits(outputs.log_sum_exp[query]));
                let place = format!("lead {lead}, head {head}, query {g}: {case:?}");
                assert!(error <= tolerance, "error {error} at {place}");
                let error = (f64::from(log) - log_sum_exp).abs();
                assert!(error <= tolerance, "log-sum-exp {log} for {log_sum_exp} at {place}");
            }
        }
        Some(outputs)
    }
}

/// Nearly `lead` over `scale`, such that the table entry that it causes, a multiple of log2(e), is an f16:
/// what is tested is not the rounding of the table.
fn exact_component(lead: f64, scale: f32) -> f32 {
    let wanted = f16::from_f64(lead / f64::from(scale)).to_bits();
    let candidates = (wanted.saturating_sub(40)..=wanted).map(|bits| f16::from_bits(bits).to_f32());
    let rounding = |&x: &f32| {
        let entry = x * (scale * std::f32::consts::LOG2_E);
        (f16::from_f32(entry).to_f32() - entry).abs()
    };
    candidates.min_by(|a, b| rounding(a).total_cmp(&rounding(b))).unwrap()
}

/// The output and log-sum-exp of every query of a head: one softmax over the exact rows of sinks and window
/// and of the selected tokens, and the decoded rows of the others.
fn defined(case: &Case, inputs: &Inputs, outputs: &Outputs, head: usize) -> Vec<(Vec<f32>, f64)> {
    let (n, dim, group) = (case.lengths[0] as usize, case.shape.keys.dim(), case.shape.group);
    let selected = &outputs.selected[head * case.selected_len..][..outputs.found[head] as usize];
    let mut rows = [0, 1].map(|side| {
        let shape = [case.shape.keys, case.shape.values][side];
        let codes = Codes::new(shape, n, &inputs.codes[head][side][..shape.codes_len(n)]).unwrap();
        let mut rows = vec![0.0; n * dim];
        decode_into(&inputs.books[head][side].view(), &codes, 0, &mut rows).unwrap();
        for (row, norm) in rows.chunks_exact_mut(dim).zip(&inputs.norms[side][head * case.capacity..]) {
            row.iter_mut().for_each(|x| *x *= norm);
        }
        for &token in selected {
            let exact = &inputs.rows[side][(head * case.capacity + token as usize) * dim..][..dim];
            rows[token as usize * dim..][..dim].copy_from_slice(exact);
        }
        rows
    });
    for (rows, exact) in rows.iter_mut().zip(&inputs.exact) {
        let exact = &exact[head * case.exact_capacity * dim..];
        rows.extend_from_slice(&exact[..case.exact_lengths[0] as usize * dim]);
    }
    let attend = |query: &[f32]| {
        let dot = |key: &[f32]| -> f64 {
            key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>()
                * f64::from(case.scale())
        };
        let scores: Vec<f64> = rows[0].chunks_exact(dim).map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0_f64; dim];
        for (value, weight) in rows[1].chunks_exact(dim).zip(&weights) {
            out.iter_mut().zip(value).for_each(|(out, x)| *out += weight / sum * f64::from(*x));
        }
        (out.into_iter().map(|x| x as f32).collect(), max + sum.ln())
    };
    inputs.queries[head * group * dim..][..group * dim].chunks_exact(dim).map(attend).collect()
}

/// Query heads per KV head, and quantizers of values. The weights of (8, 8) are summed by code for up to two
/// queries; all others are look-ups.
const SHAPES: [(usize, (usize, u32)); 10] = [
    (1, (8, 8)),
    (1, (32, 4)),
    (2, (8, 8)),
    (2, (32, 4)),
    (3, (16, 8)),
    (4, (16, 8)),
    (5, (8, 8)),
    (6, (8, 8)),
    (7, (8, 8)),
    (8, (16, 8)),
];

fn one_selected_token_leads(device: &Device, form: Form) {
    for (group, values) in SHAPES {
        for lead in LEADS {
            let step = Lead::new(form, group, values, lead, vec![733]);
            let Some(outputs) = step.check(device) else { break };
            let is_first = |selected: &[u32]| selected[..8].contains(&733);
            let mut heads = outputs.selected.chunks_exact(step.case.selected_len);
            assert!(form == Form::Bound || lead < 8.0 || heads.all(is_first), "lead {lead}, group {group}");
        }
    }
}

#[test]
fn one_selected_token_leads_beside_the_selection() {
    let Some(device) = device("one_selected_token_leads_beside_the_selection") else { return };
    one_selected_token_leads(&device, Form::Beside);
}

#[test]
fn one_selected_token_leads_while_rows_arrive() {
    let Some(device) = device("one_selected_token_leads_while_rows_arrive") else { return };
    one_selected_token_leads(&device, Form::Arriving);
}

#[test]
fn one_selected_token_leads_within_a_bound() {
    let Some(device) = device("one_selected_token_leads_within_a_bound") else { return };
    one_selected_token_leads(&device, Form::Bound);
}

#[test]
fn one_selected_token_leads_in_many_heads() {
    let Some(device) = device("one_selected_token_leads_in_many_heads") else { return };
    for ((group, values), lead) in SHAPES.into_iter().zip(LEADS.into_iter().skip(3)) {
        Lead::new(Form::ManyHeads, group, values, lead, vec![1499]).check(&device);
    }
}

const FORMS: [Form; 3] = [Form::Beside, Form::Arriving, Form::Bound];

/// Selected tokens lead in adjacent tiles, in every tile, and in the whole sequence but for a few tokens.
#[test]
fn many_selected_tokens_lead() {
    let Some(device) = device("many_selected_tokens_lead") else { return };
    let leaders: [Vec<usize>; 3] = [(40..80).collect(), (5..1500).step_by(32).collect(), (0..1493).collect()];
    for (form, leaders) in FORMS.into_iter().flat_map(|form| leaders.clone().map(|leaders| (form, leaders))) {
        for ((group, values), lead) in SHAPES.into_iter().zip([11.0, 20.0, 28.0, 60.0, 120.0].repeat(2)) {
            let mut step = Lead::new(form, group, values, lead, leaders.clone());
            step.case.ks = vec![leaders.len() as u32];
            step.check(&device);
        }
    }
}

/// A leading token keeps its code where none, or too few, are selected.
#[test]
fn tokens_that_are_not_selected_lead() {
    let Some(device) = device("tokens_that_are_not_selected_lead") else { return };
    for (form, lead) in FORMS.into_iter().flat_map(|form| LEADS.map(|lead| (form, lead))) {
        for (shape, k, leaders) in [(0, 0, vec![9]), (3, 2, vec![0, 31, 32, 700, 1499]), (5, 1, vec![64, 65])]
        {
            let (group, values) = SHAPES[shape];
            let mut step = Lead::new(form, group, values, lead, leaders);
            step.case.ks = vec![k];
            step.check(&device);
        }
    }
}

/// Norms are factors of the values of leading tokens, too, whether these are selected or not.
#[test]
fn leading_values_have_norms() {
    let Some(device) = device("leading_values_have_norms") else { return };
    for (form, lead) in FORMS.into_iter().flat_map(|form| LEADS.map(|lead| (form, lead))) {
        for (shape, k, leaders) in
            [(0, 8, vec![733]), (5, 8, vec![40, 41]), (3, 0, vec![9]), (9, 2, vec![0, 31, 700])]
        {
            let (group, values) = SHAPES[shape];
            let mut step = Lead::new(form, group, values, lead, leaders);
            (step.case.ks, step.case.shape.value_norms) = (vec![k], true);
            step.check(&device);
            // The largest that a byte stands for.
            let mut inputs = step.inputs();
            inputs.norms[Side::Values as usize].fill(f16::from_f32(decode_norm(u8::MAX)).to_f32());
            step.check_within(&device, &inputs, TOLERANCE);
        }
    }
}

/// Tokens lead by the norms of their keys: without these all have the same component that the queries meet.
#[test]
fn tokens_lead_by_the_norms_of_their_keys() {
    let Some(device) = device("tokens_lead_by_the_norms_of_their_keys") else { return };
    const NORM: f32 = 0.25; // of tokens that do not lead
    for (form, lead) in FORMS.into_iter().flat_map(|form| LEADS.map(|lead| (form, lead))) {
        for (shape, k, leaders) in
            [(0, 8, vec![733]), (3, 8, vec![40, 41]), (5, 0, vec![9]), (9, 2, vec![0, 31, 700])]
        {
            let (group, values) = SHAPES[shape];
            let mut step = Lead::new(form, group, values, lead / f64::from(1.0 - NORM), leaders);
            (step.case.ks, step.case.shape.key_norms) = (vec![k], true);
            let mut inputs = step.inputs();
            let norms = &mut inputs.norms[Side::Keys as usize];
            norms.fill(NORM);
            for norms in norms.chunks_exact_mut(step.case.capacity) {
                step.leaders.iter().for_each(|&t| norms[t] = 1.0);
            }
            for codes in &mut inputs.codes {
                step.lead_in(&mut codes[Side::Keys as usize], |_| true);
            }
            step.check_within(&device, &inputs, TOLERANCE);
        }
    }
}

/// A token of sinks or window leads as far as one of the codes.
#[test]
fn an_exact_token_leads() {
    let Some(device) = device("an_exact_token_leads") else { return };
    for (form, lead) in FORMS.into_iter().flat_map(|form| LEADS.map(|lead| (form, lead))) {
        for (group, values) in [SHAPES[0], SHAPES[5]] {
            let step = Lead::new(form, group, values, lead, vec![733]);
            let (mut inputs, dim) = (step.inputs(), step.case.shape.keys.dim());
            for rows in inputs.exact[0].chunks_exact_mut(step.case.exact_capacity * dim) {
                rows[3 * dim] = exact_component(lead, step.case.scale());
            }
            step.check_within(&device, &inputs, TOLERANCE);
        }
    }
}

/// Scores so far below the leading one that they are stored with 10 bits of mantissa still decide.
#[test]
fn beyond_every_likely_lead_the_others_remain() {
    let Some(device) = device("beyond_every_likely_lead_the_others_remain") else { return };
    for form in FORMS {
        for (group, values) in [SHAPES[0], SHAPES[3], SHAPES[5]] {
            let step = Lead::new(form, group, values, 400.0, vec![733]);
            step.check_within(&device, &step.inputs(), 0.3);
        }
    }
}
