//! Dividing a budget among the parts of a cache: greedily, by what each next step of a part gains.

/// A size of one part of a cache, and what it loses there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice {
    /// Bits of an element.
    pub bits: f64,
    /// Divergence of the next token, in nats.
    pub loss: f64,
}

/// What to spend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Budget {
    /// At most so many bits, the mean of all parts.
    Bits(f64),
    /// As few bits as have at most this loss, the sum of all parts.
    Loss(f64),
}

/// The index of a choice for each part, of equal numbers of elements. Choices of a part have rising bits; it
/// begins with the first.
///
/// In each turn the part whose loss falls most for a bit goes to the choice where it does: along the lower
/// convex hulls of the parts, the optimum but for the last bits of the budget. If the budget is less than all
/// first choices take, or a loss is less than all last choices have, these are returned.
///
/// # Source
/// Shoham, Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Trans. ASSP 1988.
pub(super) fn allocate(parts: &[Vec<Choice>], budget: Budget) -> Vec<usize> {
    let mut chosen = vec![0; parts.len()];
    loop {
        let total = total(parts, &chosen);
        if matches!(budget, Budget::Loss(most) if total.loss <= most) {
            return chosen;
        }
        let room = match budget {
            Budget::Bits(mean) => mean * parts.len() as f64 - total.bits,
            Budget::Loss(_) => f64::INFINITY,
        };
        let steps = parts.iter().enumerate().filter_map(|(part, choices)| {
            let (next, gain) = best_step(choices, chosen[part], room)?;
            Some((part, next, gain))
        });
        match steps.max_by(|a, b| a.2.total_cmp(&b.2)) {
            Some((part, next, _)) => chosen[part] = next,
            None => return chosen,
        }
    }
}

/// Bits and loss of choices, summed over all parts.
pub(super) fn total(parts: &[Vec<Choice>], chosen: &[usize]) -> Choice {
    let sum = |of: fn(&Choice) -> f64| parts.iter().zip(chosen).map(|(part, &i)| of(&part[i])).sum();
    Choice { bits: sum(|choice| choice.bits), loss: sum(|choice| choice.loss) }
}

/// The choice after `from` that gains most for a bit, of those that take at most `room` more bits, and what
/// it gains.
fn best_step(choices: &[Choice], from: usize, room: f64) -> Option<(usize, f64)> {
    let here = choices[from];
    let after = choices.iter().enumerate().skip(from + 1);
    let gains = after.filter(|(_, choice)| choice.bits - here.bits <= room).map(|(i, choice)| {
        let bits = (choice.bits - here.bits).max(f64::MIN_POSITIVE);
        (i, (here.loss - choice.loss) / bits)
    });
    gains.filter(|(_, gain)| *gain > 0.0).max_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses that fall to a quarter with each bit, and one step of a part that is not convex.
    fn parts() -> Vec<Vec<Choice>> {
        let part = |cost: f64| {
            let loss = |bits: f64| cost * 0.25_f64.powf(bits) * if bits == 2.0 { 1.8 } else { 1.0 };
            (1..=6).map(f64::from).map(|bits| Choice { bits, loss: loss(bits) }).collect()
        };
        [1.0, 0.1, 3.0, 0.02].map(part).to_vec()
    }

    /// Every combination of choices.
    fn all(parts: &[Vec<Choice>]) -> Vec<Vec<usize>> {
        parts.iter().fold(vec![vec![]], |all, part| {
            let with =
                |begun: &Vec<usize>| (0..part.len()).map(|i| [&begun[..], &[i]].concat()).collect::<Vec<_>>();
            all.iter().flat_map(with).collect()
        })
    }

    #[test]
    fn a_budget_is_spent_nearly_as_well_as_any_choice_spends_it() {
        let parts = parts();
        for mean in [1.0, 1.5, 2.0, 2.75, 3.0, 4.5, 6.0, 8.0] {
            let chosen = total(&parts, &allocate(&parts, Budget::Bits(mean)));
            assert!(chosen.bits <= mean * 4.0 + 1e-9, "{chosen:?} of {mean}");
            let fits = all(&parts).into_iter().map(|chosen| total(&parts, &chosen));
            let best =
                fits.filter(|of| of.bits <= mean * 4.0).map(|of| of.loss).fold(f64::INFINITY, f64::min);
            assert!(chosen.loss <= 1.35 * best, "{mean} bits: {} for {best}", chosen.loss);
        }
    }

    #[test]
    fn a_loss_is_met_with_few_bits() {
        let parts = parts();
        for loss in [1.0, 0.1, 0.01, 0.002] {
            let chosen = total(&parts, &allocate(&parts, Budget::Loss(loss)));
            assert!(chosen.loss <= loss, "{chosen:?}");
            let fits = all(&parts).into_iter().map(|chosen| total(&parts, &chosen));
            let best = fits.filter(|of| of.loss <= loss).map(|of| of.bits).fold(f64::INFINITY, f64::min);
            assert!(chosen.bits <= best + 2.0, "{loss}: {} bits for {best}", chosen.bits);
        }
    }

    #[test]
    fn what_cannot_be_met_is_met_as_far_as_it_goes() {
        let parts = parts();
        assert_eq!(allocate(&parts, Budget::Bits(0.5)), [0; 4]);
        assert_eq!(allocate(&parts, Budget::Loss(1e-9)), [5; 4]);
        assert_eq!(allocate(&[], Budget::Bits(1.0)), [0; 0]);
        let worthless = vec![vec![Choice { bits: 1.0, loss: 0.0 }, Choice { bits: 2.0, loss: 0.0 }]];
        assert_eq!(allocate(&worthless, Budget::Bits(8.0)), [0]);
    }
}
