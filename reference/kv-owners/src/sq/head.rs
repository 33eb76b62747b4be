//! What the caches of all sequences share of a head.

use std::sync::{Arc, Mutex, PoisonError};

use kv_attend::owner::{Pair, Reader, Writer};
use pq_core::sq::{HeadTransform, Shape, allot};

use super::values::ValueTransform;
use crate::Error;

const MAGIC: [u8; 4] = *b"SQHD";
const VERSION: u32 = 2;

/// The transforms of a head's keys and values at some number of bits: [`Basis::head`](super::Basis::head).
#[derive(Debug)]
pub struct Head {
    transform: Arc<HeadTransform>,
    sigma: Vec<f32>, // deviations of the components of keys in the order of their codes, (dim,)
    expected: Pair<f64>, // mean squared error of a score, and of values relative to their squares
    widen: bool,     // for a sequence that does not fit
    values: ValueTransform,
    /// The transform with more bits for keys, each made when a sequence first needs it.
    wider: Mutex<Vec<Arc<HeadTransform>>>,
}

impl Head {
    pub(super) fn new(
        transform: HeadTransform,
        sigma: Vec<f32>,
        values: ValueTransform,
        widen: bool,
    ) -> Result<Arc<Self>, Error> {
        let codes = transform.values();
        let share = (codes.dim() as f32).sqrt().recip(); // of a component in a norm of 1
        Ok(Arc::new(Self {
            expected: Pair {
                keys: transform.keys().distortion(&sigma)?,
                values: codes.distortion(&vec![share; codes.dim()])?,
            },
            transform: Arc::new(transform),
            sigma,
            widen,
            values,
            wider: Mutex::default(),
        }))
    }

    /// The transform of the keys, and the shapes of the codes.
    #[must_use]
    pub const fn transform(&self) -> &Arc<HeadTransform> {
        &self.transform
    }

    /// The mean of the values: (dim of the values,).
    #[must_use]
    pub fn value_mean(&self) -> &[f32] {
        self.values.mean()
    }

    /// The errors to expect of codes: of keys the mean squared error of a score, of values the squared error
    /// relative to the values without their mean.
    #[must_use]
    pub const fn expected_errors(&self) -> Pair<f64> {
        self.expected
    }

    /// The transform of the values.
    pub(super) const fn values(&self) -> &ValueTransform {
        &self.values
    }

    /// Whether a sequence whose keys do not fit has more bits.
    pub(super) const fn widens(&self) -> bool {
        self.widen
    }

    /// The transform with the fewest bits for keys that bring an error of `ratio` times the expected one back
    /// to that, or with 8 bits a component.
    pub(super) fn wider(&self, ratio: f64) -> Result<Arc<HeadTransform>, Error> {
        let (least, most) = (self.transform.keys().slots() + 1, most_slots(self.sigma.len()));
        for slots in least..most {
            let (keys, order) = self.allot(slots)?;
            let sigma: Vec<f32> = order.iter().map(|&i| self.sigma[i]).collect();
            if ratio * keys.distortion(&sigma)? <= self.expected.keys {
                return self.with_slots(slots);
            }
        }
        self.with_slots(most.max(least - 1))
    }

    /// The transform with `slots` slots for keys, no fewer than its own.
    pub(super) fn with_slots(&self, slots: usize) -> Result<Arc<HeadTransform>, Error> {
        let own = self.transform.keys().slots();
        if slots == own {
            return Ok(self.transform.clone());
        }
        if !(own..=most_slots(self.sigma.len())).contains(&slots) {
            return Err(kv_attend::Error::BadField { what: "slots of keys" }.into());
        }
        let mut made = self.wider.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(transform) = made.iter().find(|made| made.keys().slots() == slots) {
            return Ok(transform.clone());
        }
        let (keys, order) = self.allot(slots)?;
        let transform = Arc::new(self.transform.recoded(keys, &order)?);
        made.push(transform.clone());
        Ok(transform)
    }

    fn allot(&self, slots: usize) -> Result<(Shape, Vec<usize>), Error> {
        let mut order = vec![0; self.sigma.len()];
        Ok((allot(&self.sigma, slots, &mut order)?, order))
    }

    /// Bytes of the transforms, those with more bits that sequences needed included.
    #[must_use]
    pub fn size(&self) -> usize {
        let wider = self.wider.lock().unwrap_or_else(PoisonError::into_inner);
        let wider: usize = wider.iter().map(|transform| transform.size()).sum();
        self.transform.size() + wider + size_of_val(&self.sigma[..]) + self.values.size()
    }

    /// The head as bytes, with a checksum, for [`from_bytes`](Self::from_bytes): caches that were saved under
    /// it can be restored under what is read.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        let transform = self.transform.to_bytes();
        writer.usize(transform.len());
        writer.bytes(&transform);
        writer.elements(self.sigma.iter().copied());
        writer.elements(self.values.mean().iter().chain([&self.values.scale()]).copied());
        writer.u32(self.widen.into());
        writer.finish_checked()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Those of [`HeadTransform::from_bytes`]; [`kv_attend::Error::BadField`], [`Error::ValueScale`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Arc<Self>, Error> {
        let mut reader = Reader::new("a head of scalar codes", MAGIC, VERSION, bytes)?;
        let len = reader.usize()?;
        let transform = HeadTransform::from_bytes(reader.bytes(len)?)?;
        let sigma = reader.elements(transform.keys().dim())?;
        let value_mean = reader.elements(transform.values().dim())?;
        let value_scale = reader.elements(1)?[0];
        let widen = match reader.u32()? {
            0 => false,
            1 => true,
            _ => return Err(kv_attend::Error::BadField { what: "more bits for keys that do not fit" }.into()),
        };
        reader.finish()?;
        check_finite("deviations of the keys", &sigma)?;
        Self::new(transform, sigma, ValueTransform::new(&value_mean, value_scale)?, widen)
    }
}

/// Slots of 8 bits a component.
const fn most_slots(dim: usize) -> usize {
    8 * dim.div_ceil(16)
}

pub(super) fn check_finite(what: &'static str, values: &[f32]) -> Result<(), Error> {
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => Err(pq_core::Error::NotFinite { what, index }.into()),
    }
}
