//! What the caches of a layer share for all sequences: codebooks of product codes, transforms of scalar
//! codes.

use std::sync::Arc;

use pq_core::HeadBooks;
use pq_core::sq::{HeadTransform, Shape, TransformParts, allot};
use pyo3::prelude::*;
use pyo3::types::PyList;
use svd_core::Hadamard;

use crate::array::Array;
use crate::error::{Error, Result};
use crate::pq::Codebook;

/// The codebooks of all KV heads of a layer.
#[pyclass(frozen, module = "kvcodes")]
pub struct ProductQuantizer {
    pub books: Vec<Arc<HeadBooks>>, // at least one, of the same dimensions
}

#[pymethods]
impl ProductQuantizer {
    #[new]
    fn new(keys: Vec<Py<Codebook>>, values: Vec<Py<Codebook>>) -> Result<Self> {
        if keys.len() != values.len() || keys.is_empty() {
            return Err(Error::argument(format!(
                "{} codebooks of keys and {} of values: expected one of each for every KV head",
                keys.len(),
                values.len()
            )));
        }
        let dims = |books: &[Py<Codebook>]| books.iter().map(|book| book.get().dim()).collect::<Vec<_>>();
        if [dims(&keys), dims(&values)].concat().windows(2).any(|dims| dims[0] != dims[1]) {
            return Err(Error::argument("the codebooks of a layer differ in their dimension"));
        }
        let book = |book: &Py<Codebook>| book.get().book().clone();
        let books = keys.iter().zip(&values).map(|(keys, values)| HeadBooks::new(book(keys), book(values)));
        Ok(Self { books: books.map(Arc::new).collect() })
    }

    #[getter]
    fn heads(&self) -> usize {
        self.books.len()
    }

    #[getter]
    pub fn dim(&self) -> usize {
        self.books[0].keys().shape().dim()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        let of = |books: &Arc<HeadBooks>| {
            books.keys().shape().codebook_len() + books.values().shape().codebook_len()
        };
        4 * self.books.iter().map(of).sum::<usize>()
    }
}

/// The transforms of all KV heads of a layer.
#[pyclass(frozen, module = "kvcodes")]
pub struct ScalarQuantizer {
    pub transforms: Vec<Arc<HeadTransform>>, // at least one, of the same dimensions
    pub value_means: Vec<f32>,               // (heads, dim)
    pub hadamard: Hadamard,
}

#[pymethods]
impl ScalarQuantizer {
    #[new]
    #[pyo3(signature = (frequencies, means, bases, duals, sigmas, value_means, *, key_bits=3.0, value_bits=3, block=64, mean_error=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        frequencies: &Bound<'_, PyAny>,
        means: &Bound<'_, PyAny>,
        bases: &Bound<'_, PyAny>,
        duals: &Bound<'_, PyAny>,
        sigmas: &Bound<'_, PyAny>,
        value_means: &Bound<'_, PyAny>,
        key_bits: f32,
        value_bits: u32,
        block: usize,
        mean_error: Option<bool>,
    ) -> Result<Self> {
        let [frequencies, means, bases] = [Array::get(frequencies)?, Array::get(means)?, Array::get(bases)?];
        let [duals, sigmas, value_means] =
            [Array::get(duals)?, Array::get(sigmas)?, Array::get(value_means)?];
        let [heads, dim] = means.dims("means", "(heads, dim)")?;
        if heads == 0 {
            return Err(Error::argument("a layer without KV heads"));
        }
        frequencies.expect("frequencies", &[dim / 2])?;
        bases.expect("bases", &[heads, dim, dim])?;
        duals.expect("duals", &[heads, dim, dim])?;
        sigmas.expect("sigmas", &[heads, dim])?;
        value_means.expect("value_means", &[heads, dim])?;
        if !(0.125..=8.0).contains(&key_bits) || (8.0 * key_bits).fract() != 0.0 {
            return Err(Error::argument(format!("key_bits is {key_bits}, expected 0.125 to 8 in eighths")));
        }
        let value_shape = Shape::uniform(dim, value_bits)?;
        // A slot is a bit for every sixteenth component.
        let slots = ((key_bits * dim.div_ceil(16) as f32) as usize).max(1);
        let [frequencies, means, bases, duals, sigmas] =
            [&frequencies, &means, &bases, &duals, &sigmas].map(|array| array.floats());
        let transform = |h: usize| -> Result<_> {
            let mut order = vec![0; dim];
            let keys = allot(&sigmas[h * dim..][..dim], slots, &mut order)?;
            let columns = |maps: &[f32]| -> Vec<f32> {
                let map = maps[h * dim * dim..][..dim * dim].chunks_exact(dim);
                map.flat_map(|row| order.iter().map(move |&c| row[c])).collect()
            };
            Ok(Arc::new(HeadTransform::new(&TransformParts {
                frequencies: &frequencies,
                mean: &means[h * dim..][..dim],
                basis: &columns(&bases),
                dual: &columns(&duals),
                keys,
                values: value_shape,
                block,
                mean_error: mean_error.unwrap_or(value_bits <= 2),
            })?))
        };
        let value_means = value_means.floats().into_owned();
        if value_means.iter().any(|x| !x.is_finite()) {
            return Err(Error::argument("value_means holds a NaN or an infinity"));
        }
        let transforms = (0..heads).map(transform).collect::<Result<_>>()?;
        Ok(Self { transforms, value_means, hadamard: Hadamard::new(dim)? })
    }

    #[getter]
    fn heads(&self) -> usize {
        self.transforms.len()
    }

    #[getter]
    pub fn dim(&self) -> usize {
        self.transforms[0].keys().dim()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        4 * self.value_means.len() + self.transforms.iter().map(|transform| transform.size()).sum::<usize>()
    }

    /// Mean bits of a component of each head's keys and values, with padding and without steps and norms.
    #[getter]
    fn bits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.transforms.iter().map(|head| (head.keys().bits(), head.values().bits())))
    }
}

impl ScalarQuantizer {
    /// Values (n, heads * dim) in the basis in which they are coded, without their mean.
    pub fn transform_values(&self, values: &mut [f32]) -> Result<()> {
        for row in values.chunks_exact_mut(self.value_means.len()) {
            row.iter_mut().zip(&self.value_means).for_each(|(x, mean)| *x -= mean);
        }
        Ok(self.hadamard.forward(values)?)
    }

    /// Outputs of attention (n, heads, group, dim), back from that basis.
    pub fn restore_outputs(&self, group: usize, outputs: &mut [f32]) -> Result<()> {
        self.hadamard.inverse(outputs)?;
        let dim = self.dim();
        let means = self.value_means.chunks_exact(dim).cycle();
        for (of_head, mean) in outputs.chunks_exact_mut(group * dim).zip(means) {
            for row in of_head.chunks_exact_mut(dim) {
                row.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
            }
        }
        Ok(())
    }
}
