//! Writing a tile: the smallest of what its models, families of its own and a fixed width give.

use alloc::vec;
use alloc::vec::Vec;

use crate::cost::{COST_BITS, cost};
use crate::fit::deviation;
use crate::model::{PRECISION, family_model};
use crate::quant::{self, MAX_BIN, code, zigzag};
use crate::range;
use crate::tables::{ESCAPE, LANES, Row, TileTables};
use crate::tile::{Bins, Coder, FIXED, OWN_LANES, PLANE_LANES, PLANE_RANGE};
use crate::{Backend, Error, Models, family, rans};

/// The numbers of a tile: (tokens, lanes).
pub(crate) struct TileNumbers<'a> {
    /// Differences to the prediction, as bins that are too large for a code where they must be.
    pub bins: &'a [Bins],
    /// The numbers themselves, in steps.
    pub steps: &'a [[f32; LANES]],
}

/// How a tile is coded.
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
    pub fn encode(&self, numbers: &TileNumbers<'_>, out: &mut Vec<u8>) -> Result<(), Error> {
        let fixed = Fixed::of(numbers.steps, self.first, self.lanes)?;
        let start = out.len();
        let fits = numbers.bins.iter().flatten().all(|bin| bin.abs() <= MAX_BIN);
        if fits {
            self.encode_coded(numbers.bins, out);
        }
        if !fits || out.len() - start > fixed.len() {
            out.truncate(start);
            fixed.write(out);
        }
        Ok(())
    }

    fn encode_coded(&self, bins: &[Bins], out: &mut Vec<u8>) {
        match (self.models.contexts(), self.coder) {
            (1, Coder::Lanes) => {
                let tables = TileTables::<1>::new(self.models, self.first, self.lanes);
                let own = self.own_families(bins);
                match own.map(|own| (TileTables::of_families(&own[..self.lanes]), own)) {
                    Some((tables, own)) => self.encode_lanes(OWN_LANES, &tables, bins, &own, out),
                    None => self.encode_lanes(PLANE_LANES, &tables, bins, &[], out),
                }
            }
            (1, Coder::Range) => {
                encode_range(&TileTables::<1>::new(self.models, self.first, self.lanes), bins, out);
            }
            (_, Coder::Lanes) => {
                let tables = TileTables::<3>::new(self.models, self.first, self.lanes);
                self.encode_lanes(PLANE_LANES, &tables, bins, &[], out);
            }
            (_, Coder::Range) => {
                encode_range(&TileTables::<3>::new(self.models, self.first, self.lanes), bins, out);
            }
        }
    }

    fn encode_lanes<const C: usize>(
        &self,
        kind: u8,
        tables: &TileTables<C>,
        bins: &[Bins],
        own: &[u8],
        out: &mut Vec<u8>,
    ) {
        let (codes, escapes) = codes(tables, bins);
        let start = out.len();
        out.extend_from_slice(&[kind, 0]);
        out.extend_from_slice(&(escapes.len() as u16).to_le_bytes());
        out.extend_from_slice(own);
        rans::encode(tables, self.backend, &codes, out);
        pad(start, out);
        escapes.iter().for_each(|escape| out.extend_from_slice(&escape.to_le_bytes()));
    }

    /// The families, padded to an even number, that code these bins in fewer bits than the plane's models do, with what
    /// writing them costs.
    fn own_families(&self, bins: &[Bins]) -> Option<Vec<u8>> {
        let mut own = vec![0; self.lanes.next_multiple_of(2)];
        let mut gain = -((8 * own.len() as i64) << COST_BITS);
        for lane in 0..self.lanes {
            let plane = self.models.channel(self.first + lane, 0);
            let column = || bins.iter().map(|bins| bins[lane]);
            own[lane] = family::nearest(self.models.shape(self.first + lane), deviation(column()));
            gain += cost(plane, column()) - cost(family_model(own[lane]), column());
        }
        (gain > 0).then_some(own)
    }
}

/// Codes of all rows, and the bins of those that escape.
fn codes<const C: usize>(tables: &TileTables<C>, bins: &[Bins]) -> (Vec<Row>, Vec<i16>) {
    let mut codes = vec![[0; LANES]; bins.len()];
    let mut escapes = vec![];
    let mut last = [0; LANES];
    for (codes, bins) in codes.iter_mut().zip(bins) {
        for lane in 0..tables.lanes {
            let bits = tables.low_bits[lane];
            let context = TileTables::<C>::context_after(last[lane], bits);
            let escapes_here = quant::symbol(bins[lane], bits) >= u32::from(tables.escape[context][lane]);
            codes[lane] = if escapes_here { ESCAPE } else { code(bins[lane], bits) as u16 };
            if escapes_here {
                escapes.push(bins[lane] as i16);
            }
        }
        last = *codes;
    }
    (codes, escapes)
}

fn encode_range<const C: usize>(tables: &TileTables<C>, bins: &[Bins], out: &mut Vec<u8>) {
    let (codes, escapes) = codes(tables, bins);
    let start = out.len();
    out.extend_from_slice(&[PLANE_RANGE, 0]);
    out.extend_from_slice(&(escapes.len() as u16).to_le_bytes());
    let mut coder = range::Encoder::new(out);
    let mut last = [0; LANES];
    for row in &codes {
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
    pad(start, out);
    escapes.iter().for_each(|escape| out.extend_from_slice(&escape.to_le_bytes()));
}

/// Makes a tile's bytes even in number, and says so in its second byte.
pub(crate) fn pad(start: usize, out: &mut Vec<u8>) {
    if (out.len() - start) % 2 == 1 {
        out[start + 1] = 1;
        out.push(0);
    }
}

/// A tile of bins of one width.
struct Fixed<'a> {
    steps: &'a [[f32; LANES]],
    lanes: usize,
    exponent: u8,
    factor: f32, // 2^-exponent
    width: u32,
}

impl<'a> Fixed<'a> {
    /// The smallest power of two of the step that keeps all bins in 16 bits.
    fn of(steps: &'a [[f32; LANES]], first: usize, lanes: usize) -> Result<Self, Error> {
        let (mut lowest, mut highest) = (0.0_f32, 0.0_f32);
        for row in steps {
            for (lane, &x) in row[..lanes].iter().enumerate() {
                if !x.is_finite() {
                    return Err(Error::OutOfRange { channel: first + lane });
                }
                (lowest, highest) = (lowest.min(x), highest.max(x));
            }
        }
        let (mut exponent, mut factor) = (0_u8, 1.0_f32);
        while highest.max(-lowest) * factor > MAX_BIN as f32 {
            exponent += 1;
            factor *= 0.5;
        }
        let largest = zigzag(quant::bin(lowest * factor)).max(zigzag(quant::bin(highest * factor)));
        Ok(Self { steps, lanes, exponent, factor, width: 32 - largest.leading_zeros() })
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
