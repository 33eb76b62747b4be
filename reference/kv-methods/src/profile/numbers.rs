//! The numbers of a profile by their meaning: a wrong one is an error that names the entry, and with it the
//! method, side, layer and head.
//!
//! A checksum shows that a file is as it was written, not that it was written by a calibration. These are the
//! only ways to read floats.

use std::fmt::Display;

use pq_core::{CodebookBuf, PqShape, is_norm_scale};

use super::{Profile, missing};
use crate::{Error, Result};

/// The largest magnitude of a number that rows are multiplied by or moved by: products of two, summed over
/// the components of a head, are finite in `f32`.
const LARGEST: f32 = 1e18;

/// How far the product of a basis and its dual may be from the identity, relative to the magnitudes that its
/// sums have. Rounding to `f32` takes a thousandth of that.
const INVERSE_TOLERANCE: f64 = 1e-4;

impl Profile {
    /// Numbers that rows are multiplied by or moved by: `len` of at most [`LARGEST`].
    pub(crate) fn factors(&self, name: &str, len: usize) -> Result<&[f32]> {
        self.checked(name, len, "is not a number of at most 1e18", |x| x.abs() <= LARGEST)
    }

    /// Deviations or mean squares of `len` components: none is negative.
    pub(crate) fn deviations(&self, name: &str, len: usize) -> Result<&[f32]> {
        self.checked(name, len, "is not a number from 0 to 1e18", |x| (0.0..=LARGEST).contains(&x))
    }

    /// Singular values of `len` components: none is negative or above the one before it.
    pub(crate) fn spectrum(&self, name: &str, len: usize) -> Result<&[f32]> {
        let values = self.deviations(name, len)?;
        match values.windows(2).position(|pair| pair[1] > pair[0]) {
            None => Ok(values),
            Some(i) => Err(wrong(name, format_args!("element {} is above the one before it", i + 1))),
        }
    }

    /// The relative error to expect of codes, which may have any size.
    pub(crate) fn expected_error(&self, name: &str) -> Result<f64> {
        let of_one = |x: f32| (0.0..=f32::MAX).contains(&x);
        Ok(self.checked(name, 1, "is not a finite number from 0", of_one)?[0].into())
    }

    /// The `len` levels of a quantizer: none is below the one before it.
    pub(crate) fn levels(&self, name: &str, len: usize) -> Result<&[f32]> {
        let values = self.factors(name, len)?;
        match values.windows(2).position(|pair| pair[1] < pair[0]) {
            None => Ok(values),
            Some(i) => Err(wrong(name, format_args!("element {} is below the one before it", i + 1))),
        }
    }

    /// The sizes of `len` things that are not zero.
    pub(crate) fn sizes(&self, name: &str, len: usize) -> Result<&[f32]> {
        let is_size = |x| (f32::MIN_POSITIVE..=LARGEST).contains(&x);
        self.checked(name, len, "is not a number above 0, of at most 1e18", is_size)
    }

    /// The size of something that is not zero.
    pub(crate) fn size(&self, name: &str) -> Result<f64> {
        Ok(self.sizes(name, 1)?[0].into())
    }

    /// The unit of norms: a [norm's scale](is_norm_scale).
    pub(crate) fn unit_of_norms(&self, name: &str) -> Result<f32> {
        Ok(self.checked(name, 1, "is not a power of two from 2^-126 to 2^126", is_norm_scale)?[0])
    }

    /// A codebook.
    pub(crate) fn codebook(&self, name: &str, shape: PqShape) -> Result<CodebookBuf> {
        let centroids = self.factors(name, shape.codebook_len())?;
        CodebookBuf::new(shape, centroids).map_err(|e| wrong(name, e))
    }

    /// A basis and its dual, (dim, dim) each, row-major: the product of the dual and the transposed basis is
    /// the identity, as is seen from what it makes of one vector.
    pub(crate) fn basis_and_dual(&self, [basis, dual]: [&str; 2], dim: usize) -> Result<[&[f32]; 2]> {
        let maps = [self.factors(basis, dim * dim)?, self.factors(dual, dim * dim)?];
        let vector: Vec<f64> = (0..dim).map(irregular).collect();
        let (mut codes, mut sizes) = (vec![0.0; dim], vec![0.0; dim]);
        for (row, x) in maps[0].chunks_exact(dim).zip(&vector) {
            for ((code, size), &a) in codes.iter_mut().zip(&mut sizes).zip(row) {
                *code += f64::from(a) * x;
                *size += (f64::from(a) * x).abs();
            }
        }
        for (row, x) in maps[1].chunks_exact(dim).zip(&vector) {
            let sum = |of: &[f64], map: fn(f64) -> f64| -> f64 {
                row.iter().zip(of).map(|(&b, x)| map(f64::from(b)) * x).sum()
            };
            let (found, size) = (sum(&codes, |b| b), sum(&sizes, f64::abs));
            if (found - x).abs() > INVERSE_TOLERANCE * size {
                return Err(wrong(basis, format_args!("is not the basis whose dual is `{dual}`")));
            }
        }
        Ok(maps)
    }

    /// An entry of `len` numbers, each of which `is_right`; `what` says of a number that it is not.
    fn checked(&self, name: &str, len: usize, what: &str, is_right: impl Fn(f32) -> bool) -> Result<&[f32]> {
        let values = self.floats.get(name).ok_or_else(|| missing(name))?;
        if values.len() != len {
            return Err(wrong(name, format_args!("has {} elements, not {len}", values.len())));
        }
        match values.iter().position(|&x| !is_right(x)) {
            None => Ok(values),
            Some(i) => Err(wrong(name, format_args!("element {i}, {}, {what}", values[i]))),
        }
    }
}

/// Component `i` of a vector without structure, from 1/2 to 3/2: of the golden ratio's multiples.
fn irregular(i: usize) -> f64 {
    0.5 + (0.618_033_988_749_895 * (i + 1) as f64).fract()
}

fn wrong(name: &str, what: impl Display) -> Error {
    Error::Profile(format!("`{name}`: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, values: &[f32]) -> Profile {
        let mut profile = Profile::default();
        profile.put_floats(name.into(), values.to_vec());
        profile
    }

    fn refused<T>(result: Result<T>, what: &str) {
        let error = result.err().map_or_else(String::new, |e| e.to_string());
        assert!(error.starts_with("profile: `a/k/3/1/part`: ") && error.contains(what), "{error}");
    }

    #[test]
    fn each_meaning_refuses_its_wrong_numbers_and_names_the_entry() {
        const NAME: &str = "a/k/3/1/part";
        let number = |x| of(NAME, &[x]);
        for x in [f32::NAN, f32::INFINITY, -f32::INFINITY, 1e30, -1e30] {
            refused(number(x).factors(NAME, 1), "element 0");
        }
        for x in [f32::NAN, f32::INFINITY, -1.0, 1e30] {
            refused(number(x).deviations(NAME, 1), "element 0");
        }
        for x in [f32::NAN, f32::INFINITY, -1.0] {
            refused(number(x).expected_error(NAME), "element 0");
        }
        for x in [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e30] {
            refused(number(x).size(NAME), "element 0");
        }
        for x in [0.0, -1.0, 3.0, f32::NAN, f32::INFINITY, 1e-45, 2.0_f32.powi(127)] {
            refused(number(x).unit_of_norms(NAME), "power of two");
        }
        for x in [0.0, -3.5, 1e18] {
            assert_eq!(number(x).factors(NAME, 1).unwrap(), [x]);
        }
        assert_eq!(number(0.0).deviations(NAME, 1).unwrap(), [0.0]);
        assert_eq!(number(1e30).expected_error(NAME).unwrap(), f64::from(1e30_f32));
        for exponent in [-126, 0, 126] {
            let unit = 2.0_f32.powi(exponent);
            assert_eq!(number(unit).unit_of_norms(NAME).unwrap(), unit);
        }
        refused(of(NAME, &[2.0, 1.0, 1.5]).spectrum(NAME, 3), "element 2");
        refused(of(NAME, &[2.0, 1.0]).spectrum(NAME, 3), "has 2 elements, not 3");
        assert!(of(NAME, &[-1.0, 1.0, 1.0]).levels(NAME, 3).is_ok());
        refused(of(NAME, &[1.0, 2.0, 1.5]).levels(NAME, 3), "element 2");
        refused(of(NAME, &[1.0, 0.0]).sizes(NAME, 2), "element 1");
        refused(of(NAME, &[1e30; 4]).codebook(NAME, PqShape::new(2, 1, 1).unwrap()), "element 0");
        assert!(matches!(number(1.0).factors("other", 1), Err(Error::MissingEntry(_))));
    }

    #[test]
    fn a_basis_without_its_dual_is_refused() {
        const BASIS: &str = "a/k/3/1/part";
        const DUAL: &str = "a/k/3/1/dual";
        // A basis whose columns differ a million times in size: the dual of a diagonal is its reciprocal.
        let diagonal = |x: [f32; 3]| (0..9).map(|i| if i % 4 == 0 { x[i / 4] } else { 0.0 }).collect();
        let (basis, dual): (Vec<f32>, Vec<f32>) = (diagonal([1e3, 1.0, 1e-3]), diagonal([1e-3, 1.0, 1e3]));
        let read = |basis: &[f32], dual: &[f32]| -> Result<()> {
            let mut profile = of(BASIS, basis);
            profile.put_floats(DUAL.into(), dual.to_vec());
            profile.basis_and_dual([BASIS, DUAL], 3).map(drop)
        };
        read(&basis, &dual).unwrap();
        refused(read(&[0.0; 9], &dual), DUAL);
        refused(read(&basis, &[0.0; 9]), DUAL);
        refused(read(&basis, &basis), DUAL);
        for (at, x) in [(0, 0.0), (4, -1.0), (8, 0.0), (8, 2e-3), (2, 1e17), (4, f32::NAN)] {
            let mut forged = basis.clone();
            forged[at] = x;
            refused(read(&forged, &dual), "");
        }
    }
}
