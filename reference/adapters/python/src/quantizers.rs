//! What the caches of a layer share for all sequences: codebooks of product codes; bases of scalar codes, and
//! heads at some number of bits.

use std::sync::Arc;

use kv_owners::sq::{self, Bits, Samples};
use pq_core::HeadBooks;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::array::{Array, Output};
use crate::error::{Error, Result};
use crate::layout::Tokens;
use crate::pq::Codebook;
use crate::threads;

/// The codebooks of all KV heads of a layer.
#[pyclass(frozen, module = "kvcodes")]
pub struct ProductQuantizer {
    pub books: Vec<Arc<HeadBooks>>, // at least one, of the same dimensions
}

#[pymethods]
impl ProductQuantizer {
    #[new]
    fn new(keys: Vec<Py<Codebook>>, values: Vec<Py<Codebook>>) -> Result<Self> {
        if keys.len() != values.len() {
            return Err(Error::argument(format!(
                "{} codebooks of keys and {} of values: expected one of each for every KV head",
                keys.len(),
                values.len()
            )));
        }
        let book = |book: &Py<Codebook>| book.get().book().clone();
        let books = keys.iter().zip(&values).map(|(keys, values)| HeadBooks::new(book(keys), book(values)));
        Self::of(books.map(Arc::new).collect())
    }

    #[getter]
    fn heads(&self) -> usize {
        self.books.len()
    }

    #[getter]
    fn dim(&self) -> usize {
        self.books[0].keys().shape().dim()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        let of = |books: &Arc<HeadBooks>| {
            books.keys().shape().codebook_len() + books.values().shape().codebook_len()
        };
        4 * self.books.iter().map(of).sum::<usize>()
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        saved(py, self.books.iter().map(|books| books.to_bytes_checked::<f32>()))
    }

    #[staticmethod]
    fn from_bytes(heads: Vec<Bound<'_, PyBytes>>) -> Result<Self> {
        let read = |bytes: &Bound<'_, PyBytes>| Ok(Arc::new(HeadBooks::from_bytes(bytes.as_bytes())?));
        Self::of(heads.iter().map(read).collect::<Result<_>>()?)
    }
}

impl ProductQuantizer {
    fn of(books: Vec<Arc<HeadBooks>>) -> Result<Self> {
        let dims = |books: &HeadBooks| [books.keys(), books.values()].map(|book| book.shape().dim());
        check_heads(&books, |books| dims(books))?;
        Ok(Self { books })
    }
}

/// The basis of a head with scalar codes, for any number of bits.
#[pyclass(frozen, module = "kvcodes")]
pub struct Basis(sq::Basis);

#[pymethods]
impl Basis {
    #[new]
    #[pyo3(signature = (mean, basis, dual, sigma, value_mean, value_scale, *, block=64))]
    fn new(
        mean: &Bound<'_, PyAny>,
        basis: &Bound<'_, PyAny>,
        dual: &Bound<'_, PyAny>,
        sigma: &Bound<'_, PyAny>,
        value_mean: &Bound<'_, PyAny>,
        value_scale: f32,
        block: usize,
    ) -> Result<Self> {
        let [sigma, value_mean] = [Array::get(sigma)?, Array::get(value_mean)?];
        let [dim] = sigma.dims("sigma", "(dim,)")?;
        let [_] = value_mean.dims("value_mean", "(dim of the values,)")?;
        let part = |what, part: &Bound<'_, PyAny>, shape: &[usize]| -> Result<Vec<f32>> {
            let part = Array::get(part)?;
            part.expect(what, shape)?;
            Ok(part.floats().into_owned())
        };
        Ok(Self(sq::Basis {
            block,
            mean: part("mean", mean, &[dim])?,
            basis: part("basis", basis, &[dim, dim])?,
            dual: part("dual", dual, &[dim, dim])?,
            sigma: sigma.floats().into_owned(),
            value_mean: value_mean.floats().into_owned(),
            value_scale,
        }))
    }

    #[staticmethod]
    #[pyo3(signature = (keys, queries, values, frequencies, *, block=64, rotated_from=None))]
    fn fit_layer(
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        queries: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        frequencies: &Bound<'_, PyAny>,
        block: usize,
        rotated_from: Option<usize>,
    ) -> Result<Vec<Self>> {
        let [keys, queries] = [Array::get(keys)?, Array::get(queries)?];
        let [values, frequencies] = [Array::get(values)?, Array::get(frequencies)?];
        let of_keys @ [_, heads, dim] = keys.dims("keys", "(tokens, KV heads, head_dim)")?;
        let of_queries @ [n, query_heads, _] = queries.dims("queries", "(tokens, query heads, head_dim)")?;
        let of_values @ [m, _, dim_v] = values.dims("values", "(tokens, KV heads, dim of the values)")?;
        let [_] = frequencies.dims("frequencies", "(head_dim / 2,)")?;
        queries.expect("queries", &[n, query_heads, dim])?;
        values.expect("values", &[m, heads, dim_v])?;
        let fit = || -> Result<_> {
            let keys = Tokens::<f32>::of(&keys, of_keys);
            let queries = Tokens::<f32>::of(&queries, of_queries);
            let values = Tokens::<f32>::of(&values, of_values);
            let samples = Samples {
                keys: keys.rows()?,
                queries: queries.rows()?,
                values: values.rows()?,
                frequencies: &frequencies.floats(),
                rotated_from,
            };
            Ok(sq::Basis::fit_layer(&samples, heads, block)?.into_iter().map(Self).collect())
        };
        py.detach(|| threads::run(fit))
    }

    #[getter]
    fn mean<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Output::of(py, self.0.mean.iter().copied(), &[self.0.mean.len()])
    }

    #[getter]
    fn basis<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Output::of(py, self.0.basis.iter().copied(), &[self.0.sigma.len(); 2])
    }

    #[getter]
    fn dual<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Output::of(py, self.0.dual.iter().copied(), &[self.0.sigma.len(); 2])
    }

    #[getter]
    fn sigma<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Output::of(py, self.0.sigma.iter().copied(), &[self.0.sigma.len()])
    }

    #[getter]
    fn value_mean<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Output::of(py, self.0.value_mean.iter().copied(), &[self.0.value_mean.len()])
    }

    #[getter]
    const fn value_scale(&self) -> f32 {
        self.0.value_scale
    }

    #[getter]
    const fn block(&self) -> usize {
        self.0.block
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> Result<Self> {
        Ok(Self(sq::Basis::from_bytes(data)?))
    }
}

/// The heads of a layer with scalar codes at some number of bits.
#[pyclass(frozen, module = "kvcodes")]
pub struct ScalarQuantizer {
    pub heads: Vec<Arc<sq::Head>>, // at least one, of the same dimensions
}

#[pymethods]
impl ScalarQuantizer {
    #[new]
    #[pyo3(signature = (bases, frequencies, *, key_bits=3.0, value_bits=3, mean_error=None))]
    fn new(
        bases: Vec<Py<Basis>>,
        frequencies: &Bound<'_, PyAny>,
        key_bits: f32,
        value_bits: u32,
        mean_error: Option<bool>,
    ) -> Result<Self> {
        let frequencies = Array::get(frequencies)?;
        let [_] = frequencies.dims("frequencies", "(head_dim / 2,)")?;
        let frequencies = frequencies.floats();
        let Bits { mean_error: usual, .. } = Bits::uniform(value_bits);
        let mean_error = mean_error.unwrap_or(usual);
        let bits = Bits { keys: key_bits, values: value_bits, mean_error, widen: false };
        let head = |basis: &Py<Basis>| Ok(basis.get().0.head(&frequencies, &bits)?);
        Self::of(bases.iter().map(head).collect::<Result<_>>()?)
    }

    #[getter]
    fn heads(&self) -> usize {
        self.heads.len()
    }

    #[getter]
    fn dim(&self) -> usize {
        self.heads[0].transform().keys().dim()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.heads.iter().map(|head| head.size()).sum()
    }

    /// Mean bits of a component of each head's keys and values, with padding and without steps and norms.
    #[getter]
    fn bits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let transforms = self.heads.iter().map(|head| head.transform());
        PyList::new(py, transforms.map(|of| (of.keys().bits(), of.values().bits())))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        saved(py, self.heads.iter().map(|head| head.to_bytes()))
    }

    #[staticmethod]
    fn from_bytes(heads: Vec<Bound<'_, PyBytes>>) -> Result<Self> {
        let read = |bytes: &Bound<'_, PyBytes>| Ok(sq::Head::from_bytes(bytes.as_bytes())?);
        Self::of(heads.iter().map(read).collect::<Result<_>>()?)
    }
}

impl ScalarQuantizer {
    fn of(heads: Vec<Arc<sq::Head>>) -> Result<Self> {
        check_heads(&heads, |head| [head.transform().keys().dim(), head.value_mean().len()])?;
        Ok(Self { heads })
    }
}

/// There is a head, and all have the same dimensions of keys and values.
fn check_heads<T>(heads: &[T], dims: impl Fn(&T) -> [usize; 2]) -> Result<()> {
    match heads {
        [] => Err(Error::argument("a layer without KV heads")),
        [first, rest @ ..] if rest.iter().any(|head| dims(head) != dims(first)) => {
            Err(Error::argument("the heads of a layer differ in their dimensions"))
        }
        _ => Ok(()),
    }
}

/// The saved bytes of each head.
fn saved(py: Python<'_>, heads: impl ExactSizeIterator<Item = Vec<u8>>) -> PyResult<Bound<'_, PyList>> {
    PyList::new(py, heads.map(|bytes| PyBytes::new(py, &bytes)))
}
