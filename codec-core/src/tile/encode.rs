//! Encoding of tiles, with the smallest of the plane's models, the tile's own families, and a fixed width.

use alloc::vec;
use alloc::vec::Vec;

use crate::model::cost::{COST_BITS, cost, deviation, deviation_under, log2};
use crate::model::family;
use crate::model::family_model;
use crate::model::slots::PRECISION;
use crate::model::tables::{ESCAPE, LANES, Row, TileTables};
use crate::quant::{self, MAX_BIN, code, zigzag};
use crate::range;
use crate::simd::Kernel;
use crate::tile::{Bins, Coder, FIXED, OWN_RANS, PLANE_RANGE, PLANE_RANS};
use crate::{Backend, Models, rans};

/// The finite values of a tile, and their statistics.
pub(crate) struct TileValues {
    /// (tokens, lanes): differences from the prediction. A value beyond the range of codes exceeds
    /// +-[`MAX_BIN`].
    pub bins: Vec<Bins>,
    /// (tokens, lanes): the values in steps.
    pub steps: Vec<[f32; LANES]>,
    /// Sum of the squares of each lane's bins.
    pub squares: [f32; LANES],
    /// The smallest value of each lane, at most 0, in steps.
    pub lowest: [f32; LANES],
    /// The largest value of each lane, at least 0, in steps.
    pub highest: [f32; LANES],
}

/// The parameters of a tile.
pub(crate) struct TileEncoder<'a> {
    pub models: &'a Models<'a>,
    pub coder: Coder,
    pub backend: Backend,
    /// Channel of the first lane.
    pub first: usize,
    pub lanes: usize,
}

impl TileEncoder<'_> {
    /// Appends the tile to `out`, an even number of bytes.
    pub fn encode(&self, values: &TileValues, out: &mut Vec<u8>) {
        let fixed = Fixed::of(values, self.lanes);
        let start = out.len();
        let fits = values.bins.as_flattened().iter().fold(true, |fits, bin| fits & (bin.abs() <= MAX_BIN));
        if fits {
            self.encode_coded(values, out);
        }
        if !fits || out.len() - start > fixed.len() {
            out.truncate(start);
            fixed.write(out);
        }
    }

    fn encode_coded(&self, values: &TileValues, out: &mut Vec<u8>) {
        if self.models.contexts() > 1 {
            let tables = TileTables::<3>::new(self.models, self.first, self.lanes);
            return self.encode_under(PLANE_RANS, &tables, &values.bins, &[], out);
        }
        let tables = TileTables::<1>::new(self.models, self.first, self.lanes);
        // The format has no range-coded tile with its own families.
        let own = if self.coder == Coder::InterleavedRans { self.own_families(values) } else { None };
        match own {
            Some(own) => {
                let tables = TileTables::of_families(&own[..self.lanes]);
                self.encode_under(OWN_RANS, &tables, &values.bins, &own, out);
            }
            None => self.encode_under(PLANE_RANS, &tables, &values.bins, &[], out),
        }
    }

    fn encode_under<const C: usize>(
        &self,
        kind: u8,
        tables: &TileTables<C>,
        bins: &[Bins],
        own: &[u8],
        out: &mut Vec<u8>,
    ) {
        let mut codes = vec![[0; LANES]; bins.len()];
        let escaped = self.backend.run(CodesOfBins { tables, bins, codes: &mut codes });
        let escapes: Vec<i16> = if escaped {
            let flat = codes.as_flattened().iter().zip(bins.as_flattened());
            flat.filter(|(code, _)| **code == ESCAPE).map(|(_, &bin)| bin as i16).collect()
        } else {
            vec![]
        };
        let start = out.len();
        let kind = if self.coder == Coder::Range { PLANE_RANGE } else { kind };
        out.extend_from_slice(&[kind, 0]);
        out.extend_from_slice(&(escapes.len() as u16).to_le_bytes());
        out.extend_from_slice(own);
        match self.coder {
            Coder::InterleavedRans => rans::encode(tables, self.backend, &codes, out),
            Coder::Range => encode_range(tables, &codes, out),
        }
        pad(start, out);
        escapes.iter().for_each(|escape| out.extend_from_slice(&escape.to_le_bytes()));
    }

    /// The tile's own families, padded to an even number of bytes, if they take fewer bits than the plane's
    /// models, including their own bytes.
    ///
    /// Most tiles match the plane, so a cheap estimate decides first: the cost of a Gaussian under another
    /// deviation.
    fn own_families(&self, values: &TileValues) -> Option<Vec<u8>> {
        let n = values.bins.len() as f64;
        let price = 8 * self.lanes.next_multiple_of(2) as i64;
        let lanes = || (0..self.lanes).map(|lane| (lane, self.models.channel(self.first + lane, 0)));
        let deviation = |lane: usize| deviation(values.squares[lane].into(), n);
        let estimate = |(lane, model)| {
            let ratio = (deviation(lane) / deviation_under(model)).max(1e-3);
            n * (core::f64::consts::LOG2_E * (ratio * ratio - 1.0) - 2.0 * log2(ratio)) / 2.0
        };
        if lanes().map(estimate).sum::<f64>() <= price as f64 {
            return None;
        }
        let mut own = vec![0; self.lanes.next_multiple_of(2)];
        let mut gain = -(price << COST_BITS);
        for (lane, model) in lanes() {
            let column = || values.bins.iter().map(|bins| bins[lane]);
            own[lane] = family::nearest(self.models.shape(self.first + lane), deviation(lane));
            gain += cost(model, column()) - cost(family_model(own[lane]), column());
        }
        (gain > 0).then_some(own)
    }
}

/// Computes the codes of all rows; returns whether any of them is an escape.
struct CodesOfBins<'a, 'b, const C: usize> {
    tables: &'a TileTables<C>,
    bins: &'a [Bins],
    codes: &'b mut [Row],
}

impl<const C: usize> Kernel for CodesOfBins<'_, '_, C> {
    type Output = bool;

    #[inline(always)]
    fn scalar(self) -> bool {
        let Self { tables, bins, codes } = self;
        let (mut any, mut last) = (false, [0; LANES]);
        for (codes, bins) in codes.iter_mut().zip(bins) {
            for lane in 0..LANES {
                let bits = tables.low_bits[lane];
                let context = TileTables::<C>::context_after(last[lane], bits);
                let code = code(bins[lane], bits);
                let escaped = code >> bits >= u32::from(tables.escape[context][lane]);
                codes[lane] = if escaped { ESCAPE } else { code as u16 };
                any |= escaped;
            }
            last = *codes;
        }
        any
    }
}

fn encode_range<const C: usize>(tables: &TileTables<C>, codes: &[Row], out: &mut Vec<u8>) {
    let mut coder = range::Encoder::new(out);
    let mut last = [0; LANES];
    for row in codes {
        for lane in 0..tables.lanes {
            let (code, bits) = (row[lane], tables.low_bits[lane]);
            let context = TileTables::<C>::context_after(last[lane], bits);
            let symbol = (code >> bits).min(tables.escape[context][lane]);
            let (start, end) = tables.slots(context, symbol.into(), lane);
            coder.encode(start, end - start, PRECISION);
            if code != ESCAPE {
                coder.encode(u32::from(code) & ((1 << bits) - 1), 1, bits);
            }
        }
        last = *row;
    }
    coder.finish();
}

/// Pads a tile to an even number of bytes and records that in its second byte.
pub(crate) fn pad(start: usize, out: &mut Vec<u8>) {
    if (out.len() - start) % 2 == 1 {
        out[start + 1] = 1;
        out.push(0);
    }
}

/// A tile with bins of a fixed width.
struct Fixed<'a> {
    steps: &'a [[f32; LANES]],
    lanes: usize,
    exponent: u8,
    factor: f32, // 2^-exponent
    width: u32,
}

impl<'a> Fixed<'a> {
    /// Chooses the smallest power of two for the step that keeps all bins in 16 bits.
    fn of(values: &'a TileValues, lanes: usize) -> Self {
        let lowest = values.lowest.iter().copied().fold(0.0, f32::min);
        let highest = values.highest.iter().copied().fold(0.0, f32::max);
        let (mut exponent, mut factor) = (0_u8, 1.0_f32);
        while highest.max(-lowest) * factor > MAX_BIN as f32 {
            exponent += 1;
            factor *= 0.5;
        }
        let largest = zigzag(quant::bin(lowest * factor)).max(zigzag(quant::bin(highest * factor)));
        Self { steps: &values.steps, lanes, exponent, factor, width: 32 - largest.leading_zeros() }
    }

    fn len(&self) -> usize {
        4 + (self.steps.len() * self.lanes * self.width as usize).div_ceil(8).next_multiple_of(2)
    }

    fn write(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.len();
        out.extend_from_slice(&[FIXED, self.width as u8, self.exponent, 0]);
        let (mut buffer, mut filled) = (0_u32, 0);
        for x in self.steps.iter().flat_map(|row| &row[..self.lanes]) {
            buffer |= zigzag(quant::bin(x * self.factor)) << filled;
            filled += self.width;
            while filled >= 8 {
                out.push(buffer as u8);
                buffer >>= 8;
                filled -= 8;
            }
        }
        out.push(buffer as u8);
        out.resize(end, 0);
    }
}
