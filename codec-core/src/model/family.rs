//! Distributions of bins named by one byte.
//!
//! A family is a shape and a standard deviation in bins: byte `64 * shape + scale`, deviation `2^((scale -
//! 16) / 5)`. For deviations above 5.3 bins the low bits of a bin are nearly uniform and are coded with equal
//! probabilities ([`shift`]); the table is that of the deviation divided by the same power of two. All
//! arithmetic is on integers, so that every machine has the same models.

#[cfg(feature = "alloc")]
use crate::model::cost::log2;
use crate::model::slots::{Distribution, MAX_SYMBOLS};

/// Number of shapes.
#[cfg(feature = "alloc")]
pub(crate) const SHAPE_COUNT: usize = SHAPES.len();

const SCALES: usize = 64;
/// Scales per octave of the deviation.
const OCTAVE: usize = 5;
/// The scale of a deviation of one bin.
const ONE: usize = 16;
/// The largest scale that needs no shift.
const WIDEST: usize = 28;

/// The number of low bits of the family's bins.
pub(crate) const fn shift(family: u8) -> u32 {
    let scale = family as usize % SCALES;
    if scale > WIDEST { (scale - WIDEST).div_ceil(OCTAVE) as u32 } else { 0 }
}

/// The symbols of a family.
pub(crate) fn distribution(family: u8) -> &'static Distribution {
    let (shape, scale) = (usize::from(family) / SCALES, usize::from(family) % SCALES);
    &DISTRIBUTIONS[shape][scale - OCTAVE * shift(family) as usize]
}

/// The family of `shape` whose deviation is nearest to `deviation` bins on a logarithmic scale.
#[cfg(feature = "alloc")]
pub(crate) fn nearest(shape: usize, deviation: f64) -> u8 {
    let scale = libm::round(OCTAVE as f64 * log2(deviation.max(1e-9))) + ONE as f64;
    (SCALES * shape) as u8 + scale.clamp(0.0, (SCALES - 1) as f64) as u8
}

/// The shape of a family.
#[cfg(feature = "alloc")]
pub(crate) fn shape(family: u8) -> usize {
    usize::from(family) / SCALES
}

static DISTRIBUTIONS: [[Distribution; WIDEST + 1]; SHAPES.len()] = {
    let mut all = [[Distribution::EMPTY; WIDEST + 1]; SHAPES.len()];
    let mut shape = 0;
    while shape < SHAPES.len() {
        let mut scale = 0;
        while scale <= WIDEST {
            all[shape][scale] = integrate(SHAPES[shape], scale);
            scale += 1;
        }
        shape += 1;
    }
    all
};

/// The probabilities of bins `0, -1, 1, -2, 2, ...` and of the escape.
const fn integrate(tail: &[u32; GRID + 1], scale: usize) -> Distribution {
    let mut counts = [0; MAX_SYMBOLS];
    let mut n = 1;
    let mut inner = beyond(tail, scale, 0);
    counts[0] = (1 << 20) - 2 * inner;
    while n + 2 < MAX_SYMBOLS {
        let outer = beyond(tail, scale, n.div_ceil(2));
        if inner - outer < RAREST {
            break;
        }
        counts[n] = inner - outer;
        counts[n + 1] = inner - outer;
        inner = outer;
        n += 2;
    }
    counts[n] = 2 * inner;
    Distribution::from_counts(&counts, n + 1)
}

/// Bins with a lower probability, in parts of 2^20, are coded as escapes: it is a quarter of the share of the
/// least probable symbol.
const RAREST: u64 = 64;

/// The probability of bins above `bin`, that is of values above `bin + 1/2` steps, in units of 2^-20.
const fn beyond(tail: &[u32; GRID + 1], scale: usize, bin: usize) -> u64 {
    // (bin + 1/2) * 16 / deviation in parts of 2^16; 1 / deviation = 2^((ONE - scale) / OCTAVE)
    let exponent = ONE + OCTAVE * OCTAVE - scale; // made positive by OCTAVE octaves
    let root = ROOTS[exponent % OCTAVE] << (exponent / OCTAVE);
    let at = ((2 * bin as u64 + 1) * 8 * root) >> OCTAVE;
    let (i, fraction) = ((at >> 16) as usize, at & 0xffff);
    if i >= GRID {
        return 0;
    }
    let (left, right) = (tail[i] as u64, tail[i + 1] as u64);
    left - (((left - right) * fraction) >> 16)
}

/// 2^(i / 5) in parts of 2^16.
const ROOTS: [u64; OCTAVE] = [65536, 75281, 86475, 99334, 114105];

/// Grid points of a tail: 16 per deviation.
const GRID: usize = 160;

/// The probability of values above `i / 16` under distributions of variance 1, in units of 2^-20.
const SHAPES: [&[u32; GRID + 1]; 4] = [&GAUSSIAN, &LOGISTIC, &LAPLACE, &STUDENT];

/// `erfc(u / sqrt 2) / 2`
#[rustfmt::skip]
static GAUSSIAN: [u32; GRID + 1] = [
    524288, 498160, 472134, 446310, 420787, 395659, 371018, 346947, 323525, 300824, 278906, 257828, 237636, 218368,
    200055, 182715, 166362, 151000, 136624, 123224, 110782, 99275, 88674, 78945, 70052, 61955, 54611, 47976, 42005,
    36652, 31873, 27622, 23855, 20531, 17609, 15050, 12818, 10879, 9201, 7754, 6511, 5448, 4543, 3774, 3125, 2577,
    2118, 1735, 1415, 1151, 932, 752, 605, 485, 387, 308, 244, 193, 151, 119, 93, 72, 56, 43, 33, 25, 19, 15, 11, 8,
    6, 5, 4, 3, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// `1 / (1 + exp(pi u / sqrt 3))`
#[rustfmt::skip]
static LOGISTIC: [u32; GRID + 1] = [
    524288, 494602, 465107, 435986, 407415, 379556, 352555, 326537, 301607, 277848, 255321, 234065, 214102, 195433,
    178044, 161909, 146989, 133237, 120600, 109019, 98432, 88776, 79987, 72003, 64763, 58208, 52280, 46928, 42101,
    37751, 33836, 30314, 27149, 24307, 21756, 19468, 17416, 15577, 13930, 12455, 11134, 9952, 8895, 7949, 7102, 6346,
    5669, 5065, 4524, 4041, 3610, 3224, 2879, 2572, 2297, 2051, 1832, 1636, 1460, 1304, 1165, 1040, 929, 829, 740,
    661, 590, 527, 471, 420, 375, 335, 299, 267, 238, 213, 190, 170, 151, 135, 121, 108, 96, 86, 77, 69, 61, 55, 49,
    44, 39, 35, 31, 28, 25, 22, 20, 18, 16, 14, 13, 11, 10, 9, 8, 7, 6, 6, 5, 5, 4, 4, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0,
];

/// `exp(-sqrt 2 u) / 2`
#[rustfmt::skip]
static LAPLACE: [u32; GRID + 1] = [
    524288, 479936, 439336, 402170, 368149, 337006, 308497, 282399, 258510, 236641, 216623, 198298, 181523, 166167,
    152110, 139242, 127463, 116680, 106810, 97774, 89503, 81932, 75001, 68656, 62848, 57531, 52665, 48209, 44131,
    40398, 36980, 33852, 30988, 28367, 25967, 23771, 21760, 19919, 18234, 16691, 15279, 13987, 12804, 11721, 10729,
    9821, 8991, 8230, 7534, 6896, 6313, 5779, 5290, 4843, 4433, 4058, 3715, 3400, 3113, 2849, 2608, 2388, 2186, 2001,
    1832, 1677, 1535, 1405, 1286, 1177, 1078, 987, 903, 827, 757, 693, 634, 581, 531, 486, 445, 408, 373, 342, 313,
    286, 262, 240, 220, 201, 184, 168, 154, 141, 129, 118, 108, 99, 91, 83, 76, 70, 64, 58, 53, 49, 45, 41, 37, 34,
    31, 29, 26, 24, 22, 20, 18, 17, 15, 14, 13, 12, 11, 10, 9, 8, 8, 7, 6, 6, 5, 5, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2,
    2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0,
];

/// Student's t with four degrees of freedom
#[rustfmt::skip]
static STUDENT: [u32; GRID + 1] = [
    524288, 489589, 455225, 421521, 388771, 357236, 327134, 298633, 271853, 246868, 223706, 202360, 182788, 164926,
    148688, 133978, 120691, 108717, 97948, 88278, 79605, 71832, 64870, 58636, 53053, 48054, 43575, 39560, 35959,
    32727, 29823, 27212, 24862, 22744, 20834, 19109, 17549, 16137, 14857, 13696, 12641, 11681, 10807, 10010, 9282,
    8617, 8008, 7451, 6939, 6470, 6038, 5640, 5274, 4936, 4625, 4336, 4070, 3823, 3594, 3382, 3184, 3001, 2830, 2671,
    2523, 2385, 2256, 2135, 2023, 1917, 1818, 1726, 1639, 1557, 1480, 1408, 1341, 1277, 1217, 1160, 1107, 1056, 1009,
    964, 921, 881, 843, 807, 772, 740, 709, 680, 652, 626, 601, 577, 554, 533, 512, 493, 474, 456, 439, 423, 408, 393,
    379, 366, 353, 340, 329, 317, 306, 296, 286, 277, 267, 259, 250, 242, 234, 227, 220, 213, 206, 200, 194, 188, 182,
    177, 172, 167, 162, 157, 153, 148, 144, 140, 136, 132, 129, 125, 122, 118, 115, 112, 109, 106, 103, 101, 98, 96,
    93, 91, 88, 86, 84, 82, 80, 78, 76,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables match the formulas in their comments.
    #[test]
    fn tails_are_those_of_the_named_distributions() {
        let student = |u: f64| {
            let x = u * 2_f64.sqrt();
            let s = x / (4.0 + x * x).sqrt();
            0.5 - (0.75 * s - 0.25 * s.powi(3))
        };
        let formulas: [&dyn Fn(f64) -> f64; 4] = [
            &|u| libm::erfc(u / 2_f64.sqrt()) / 2.0,
            &|u| 1.0 / (1.0 + (core::f64::consts::PI * u / 3_f64.sqrt()).exp()),
            &|u| (-2_f64.sqrt() * u).exp() / 2.0,
            &student,
        ];
        for (tail, formula) in SHAPES.iter().zip(formulas) {
            for (i, &x) in tail.iter().enumerate() {
                assert!((f64::from(x) - (1 << 20) as f64 * formula(i as f64 / 16.0)).abs() < 0.51, "{i}");
            }
        }
    }

    #[test]
    fn the_nearest_family_has_the_deviation_asked_for() {
        for (deviation, scale) in [(1.0, 16), (2.0, 21), (0.0, 0), (1e9, 63), (5.2, 28)] {
            assert_eq!(nearest(2, deviation), 128 + scale);
        }
        assert_eq!((shift(28), shift(29), shift(33), shift(34), shift(63)), (0, 1, 1, 2, 7));
    }

    /// The mean code length under the family of a Gaussian's deviation is near its differential entropy.
    #[test]
    fn a_gaussian_costs_its_entropy() {
        for deviation in [3.0_f64, 10.0, 40.0, 300.0] {
            let family = nearest(0, deviation);
            let (shift, table) = (shift(family), distribution(family));
            let density = |x: f64| (-x * x / 2.0).exp() / core::f64::consts::TAU.sqrt();
            let cost: f64 = (-4000..=4000)
                .map(|bin: i32| {
                    let p = density(f64::from(bin) / deviation) / deviation;
                    let symbol = crate::quant::symbol(bin, shift) as usize;
                    let symbol = symbol.min(table.symbols() - 1);
                    let width = f64::from(table.width(symbol)) / 4096.0;
                    p * (f64::from(shift) - width.log2())
                })
                .sum();
            let entropy = (core::f64::consts::TAU * core::f64::consts::E).sqrt().log2() + deviation.log2();
            assert!((0.0..0.03).contains(&(cost - entropy)), "{deviation}: {cost} {entropy}");
        }
    }
}
