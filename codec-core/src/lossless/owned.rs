//! Owned lossless planes. FORMAT.md, "Lossless plane", specifies their bytes.

use alloc::vec::Vec;

use super::{LosslessPlane, element_of, mantissa_bits};
use crate::error::check_len;
use crate::model::cost::cost_of_counts;
use crate::model::slots::{Distribution, MAX_SYMBOLS, Starts};
use crate::model::tables::{ESCAPE, LANES};
use crate::model::{Kind, TABLE_LEN};
use crate::reader::{Reader, seal};
use crate::{ElementType, Error, Models};

const MAGIC: [u8; 4] = *b"KVCL";
const VERSION: u8 = 1;

/// Signs are symbols where that saves more than a part in `WORTH_SIGNS` of a tile: they double the alphabet,
/// and the time to decode grows with it.
const WORTH_SIGNS: u64 = 100;

/// How often the exponents and signs of a channel occur in a sample.
struct Column {
    top: u16,
    counts: [[u64; 2]; EXPONENTS], // (distance from the top, sign)
}

/// Exponents of bf16, which has more of them than f16.
const EXPONENTS: usize = 256;

impl Column {
    fn count(rows: &[u16], channels: usize, channel: usize, mantissa: u32) -> Self {
        let exponent = |bits: u16| bits >> mantissa & (ESCAPE >> (mantissa + 1));
        let column = || rows.iter().skip(channel).step_by(channels);
        let top = column().map(|&bits| exponent(bits)).max().unwrap_or(0);
        let mut counts = [[0; 2]; EXPONENTS];
        column().for_each(|&bits| counts[usize::from(top - exponent(bits))][usize::from(bits >> 15)] += 1);
        Self { top, counts }
    }

    /// The model of symbols above `low_bits`, and an estimate of the sample's size under it.
    fn model(&self, mantissa: u32, low_bits: u32) -> (Distribution, u64) {
        let most = (MAX_SYMBOLS - 1).min(usize::from(ESCAPE - 1) >> low_bits); // symbols before the escape
        let mut counts = [0; MAX_SYMBOLS];
        for (distance, signs) in self.counts.iter().enumerate() {
            for (sign, &n) in signs.iter().enumerate() {
                let symbol = if low_bits > mantissa { distance } else { 2 * distance + sign };
                counts[symbol.min(most)] += 16 * n;
            }
        }
        // A decoder compares with eight symbols at a time; those beyond the sample cost less than escapes.
        let seen = (0..most).rev().find(|&s| counts[s] > 0).map_or(1, |s| s + 1);
        let escape = ((seen + 1).next_multiple_of(8) - 1).min(most);
        let escapes = if escape < most { core::mem::take(&mut counts[most]) } else { 0 };
        counts[escape] += escapes + 1;
        let model = Distribution::from_counts(&counts, escape + 1);
        (model, cost_of_counts(&counts, low_bits, Starts(&model.0)))
    }
}

/// An owned [`LosslessPlane`]. It is fitted once to the keys or values of a layer and serves all sequences of
/// the model.
#[derive(Clone, Debug, PartialEq)]
pub struct LosslessPlaneBuf {
    mantissa: u32,
    tops: Vec<u8>,
    tables: Vec<u16>,
    id: u32,
}

impl LosslessPlaneBuf {
    /// Checks the models and computes their checksum.
    fn new(element: ElementType, tops: Vec<u8>, tables: Vec<u16>) -> Result<Self, Error> {
        let LosslessPlane { mantissa, id, .. } = LosslessPlane::new(element, &tops, &tables)?;
        Ok(Self { mantissa, tops, tables, id })
    }

    /// Fits a table of exponents per channel to the bits of sample rows, and of signs where that saves bits.
    ///
    /// # Shapes
    /// `rows` (tokens, channels): the bits of f16 or bf16 elements.
    /// # Errors
    /// [`Error::ElementNot16Bit`] for f32, [`Error::Zero`], [`Error::Length`].
    /// # Examples
    /// ```
    /// use codec_core::*;
    /// let ones_and_halves = [0x3f80, 0x3f00, 0x3f80, 0x3f80]; // bf16 (2 tokens, 2 channels)
    /// let plane = LosslessPlaneBuf::fit(ElementType::Bf16, &ones_and_halves, 2)?;
    /// assert_eq!(LosslessPlaneBuf::from_bytes(&plane.to_bytes())?, plane);
    ///
    /// let info =
    ///     FrameInfo { lossless: true, element: ElementType::Bf16, ..FrameInfo::new(1, 1, 2, 2) };
    /// let mut bytes = vec![];
    /// encode_lossless_frame(&info, &[plane.view(); 2], &[&ones_and_halves, &ones_and_halves], &mut bytes)?;
    /// let (frame, mut out) = (Frame::parse(&bytes, 100)?, [0; 4]);
    /// let index = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
    /// frame.decode_lossless_block_into(&plane.view(), index, &mut out)?;
    /// assert_eq!(out, ones_and_halves);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit(element: ElementType, rows: &[u16], channels: usize) -> Result<Self, Error> {
        let mantissa = mantissa_bits(element)?;
        if channels == 0 || rows.is_empty() {
            return Err(Error::Zero { what: "the number of sample rows" });
        }
        check_len("rows", rows.len(), rows.len() / channels * channels)?;
        let columns: Vec<Column> =
            (0..channels).map(|c| Column::count(rows, channels, c, mantissa)).collect();
        let tops = columns.iter().map(|column| column.top as u8).collect();
        let mut tables = Vec::with_capacity(channels * TABLE_LEN);
        for tile in columns.chunks(LANES) {
            let models = |low_bits: u32| -> (Vec<_>, u64) {
                let models: Vec<_> = tile.iter().map(|column| column.model(mantissa, low_bits)).collect();
                let cost = models.iter().map(|&(_, cost)| cost).sum();
                (models, cost)
            };
            let (signs_modelled, signs_low) = (models(mantissa), models(mantissa + 1));
            let low = signs_low.1 <= signs_modelled.1 + signs_modelled.1 / WORTH_SIGNS;
            let (models, low_bits) =
                if low { (signs_low.0, mantissa + 1) } else { (signs_modelled.0, mantissa) };
            for (Distribution(starts), _) in models {
                tables.push(low_bits as u16);
                tables.extend(starts);
            }
        }
        Self::new(element, tops, tables)
    }

    /// Elements per token.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.tops.len()
    }

    /// The element type.
    #[must_use]
    pub const fn element(&self) -> ElementType {
        element_of(self.mantissa)
    }

    /// [`LosslessPlane::id`].
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// The borrowed form that encoding and decoding take. Constructors have checked the plane, so this costs
    /// a few loads.
    #[must_use]
    pub fn view(&self) -> LosslessPlane<'_> {
        let Self { mantissa, tops, tables, id } = self;
        let models = Models { channels: tops.len(), kind: Kind::Tables(tables) };
        LosslessPlane { mantissa: *mantissa, tops, models, id: *id }
    }

    /// Serializes the plane. FORMAT.md, "Lossless plane", specifies the bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&[VERSION, self.mantissa as u8, 0, 0]);
        out.extend_from_slice(&(self.tops.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.tops);
        self.tables.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        seal(out)
    }

    /// Parses and checks the output of [`Self::to_bytes`]. It allocates at most `bytes.len()` bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TrailingBytes`], [`Error::BadMagic`], [`Error::BadVersion`],
    /// [`Error::BadChecksum`], [`Error::BadField`], [`Error::TooLarge`], the errors of
    /// [`LosslessPlane::new`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let element = match reader.array()? {
            [10, 0, 0] => ElementType::F16,
            [7, 0, 0] => ElementType::Bf16,
            _ => return Err(Error::BadField { what: "element type" }),
        };
        let channels = reader.size()?;
        let tops = reader.take(channels)?.to_vec();
        let tables = reader.words(channels.checked_mul(TABLE_LEN).ok_or(Error::TooLarge)?)?;
        reader.finish()?;
        Self::new(element, tops, tables)
    }
}
