//! Product quantization of the vectors of one head: codebooks, codes, search, attention.

use std::sync::Arc;

use kv_attend::{SoftmaxStats, normalize_all};
use pq_core::{
    CodebookBuf, CodedTokens, CodesBuf, PqShape, TrainOptions, attend_into, attend_scratch_len, decode_into,
    lut_into, scan_into, top_k_into, train,
};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};

use crate::arguments;
use crate::array::{Array, Output, for_dtype};
use crate::error::{Error, Result};
use crate::threads;

/// The centroids of a product quantizer.
#[pyclass(frozen, module = "kvcodes")]
pub struct Codebook(Arc<CodebookBuf>);

impl Codebook {
    pub fn book(&self) -> &CodebookBuf {
        &self.0
    }

    fn shape(&self) -> PqShape {
        self.0.view().shape()
    }
}

#[pymethods]
impl Codebook {
    #[new]
    fn new(centroids: &Bound<'_, PyAny>) -> Result<Self> {
        let centroids = Array::get(centroids)?;
        let [m, ksub, dsub] = centroids.dims("centroids", "(m, ksub, dsub)")?;
        if !ksub.is_power_of_two() {
            return Err(Error::argument(format!("{ksub} centroids of a subspace are not a power of two")));
        }
        let shape = PqShape::new(m.saturating_mul(dsub), m, ksub.ilog2())?;
        Ok(Self(Arc::new(CodebookBuf::new(shape, &centroids.floats())?)))
    }

    #[staticmethod]
    #[pyo3(signature = (vectors, m, nbits=8, *, iterations=25, seed=0))]
    fn train(
        py: Python<'_>,
        vectors: &Bound<'_, PyAny>,
        m: usize,
        nbits: u32,
        iterations: usize,
        seed: u64,
    ) -> Result<Self> {
        let vectors = Array::get(vectors)?;
        let [_, dim] = vectors.dims("vectors", "(n, dim)")?;
        let (shape, options) =
            (PqShape::new(dim, m, nbits)?, TrainOptions { iterations, seed, ..Default::default() });
        let train = || -> Result<_> {
            let trained =
                for_dtype!(vectors.dtype(), E => train(shape, &vectors.contiguous::<E>(), &options)?);
            Ok(Self(Arc::new(CodebookBuf::new(shape, &trained.centroids)?)))
        };
        py.detach(|| threads::run(train))
    }

    #[staticmethod]
    #[pyo3(signature = (dim, m, nbits=8))]
    fn gaussian(dim: usize, m: usize, nbits: u32) -> Result<Self> {
        Ok(Self(Arc::new(CodebookBuf::gaussian(PqShape::new(dim, m, nbits)?)?)))
    }

    fn encode(&self, py: Python<'_>, vectors: &Bound<'_, PyAny>) -> Result<Codes> {
        let mut codes = Codes { book: self.0.clone(), codes: CodesBuf::new(self.shape()) };
        codes.append(py, vectors)?;
        Ok(codes)
    }

    #[getter]
    fn centroids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let shape = self.shape();
        let (view, mut out) = Output::zeros(py, &[shape.m(), shape.ksub(), shape.dsub()])?;
        out.write(|out| Ok(self.0.view().centroids_into(out)?))?;
        Ok(view)
    }

    #[getter]
    pub fn dim(&self) -> usize {
        self.shape().dim()
    }

    #[getter]
    fn m(&self) -> usize {
        self.shape().m()
    }

    #[getter]
    fn nbits(&self) -> u32 {
        self.shape().nbits()
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes_checked::<f32>())
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> Result<Self> {
        Ok(Self(Arc::new(CodebookBuf::from_bytes(data)?)))
    }
}

/// Vectors as codes of a codebook.
#[pyclass(module = "kvcodes")]
pub struct Codes {
    book: Arc<CodebookBuf>,
    codes: CodesBuf,
}

#[pymethods]
impl Codes {
    fn append(&mut self, py: Python<'_>, vectors: &Bound<'_, PyAny>) -> Result<f64> {
        let vectors = Array::get(vectors)?;
        let [n, _] = vectors.dims("vectors", "(n, dim)")?;
        vectors.expect("vectors", &[n, self.book.view().shape().dim()])?;
        let Self { book, codes } = self;
        py.detach(|| {
            threads::run_step(|| {
                Ok(for_dtype!(vectors.dtype(), E => codes.append(&book.view(), &vectors.contiguous::<E>())?))
            })
        })
    }

    #[pyo3(signature = (*, out=None))]
    fn decode<'py>(&self, py: Python<'py>, out: Option<&Bound<'py, PyAny>>) -> Result<Bound<'py, PyAny>> {
        let shape = [self.__len__(), self.book.view().shape().dim()];
        let (result, mut out) = Output::get(py, out, &shape, &[])?;
        py.detach(|| out.write(|out| Ok(decode_into(&self.book.view(), &self.codes.view(), 0, out)?)))?;
        Ok(result)
    }

    fn truncate(&mut self, n: usize) {
        self.codes.truncate(n);
    }

    fn __len__(&self) -> usize {
        self.codes.view().n()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.codes.view().size()
    }

    #[getter]
    fn codebook(&self) -> Codebook {
        Codebook(self.book.clone())
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.codes.to_bytes_checked())
    }

    #[staticmethod]
    fn from_bytes(codebook: &Codebook, data: &[u8]) -> Result<Self> {
        let codes = CodesBuf::from_bytes(data)?;
        match codes.view().shape() == codebook.shape() {
            true => Ok(Self { book: codebook.0.clone(), codes }),
            false => Err(pq_core::Error::ShapeMismatch.into()),
        }
    }
}

/// The codes of the highest inner products: `(indices, scores)`.
#[pyfunction]
pub fn search<'py>(
    py: Python<'py>,
    codes: &Codes,
    queries: &Bound<'py, PyAny>,
    k: usize,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let queries = Array::get(queries)?;
    let (view, shape) = (codes.codes.view(), codes.book.view().shape());
    let [n, _] = queries.dims("queries", "(n, dim)")?;
    queries.expect("queries", &[n, shape.dim()])?;
    let k = k.min(view.n());
    let (best, mut out) = Output::zeros(py, &[n, k])?;
    let indices = py.detach(|| -> Result<_> {
        let (mut table, mut scores) = (vec![0.0; shape.lut_len()], vec![0.0; view.n()]);
        let mut indices = vec![0_u32; n.saturating_mul(k)];
        let queries = queries.floats();
        out.write(|out| {
            if k == 0 {
                return Ok(());
            }
            let rows = indices.chunks_exact_mut(k).zip(out.chunks_exact_mut(k));
            for (query, (indices, out)) in queries.chunks_exact(shape.dim()).zip(rows) {
                scan_into(&lut_into(&codes.book.view(), query, &mut table)?.lut(0), &view, &mut scores)?;
                top_k_into(&scores, k, indices)?;
                out.iter_mut().zip(&*indices).for_each(|(out, &i)| *out = scores[i as usize]);
            }
            Ok(())
        })?;
        Ok(indices)
    })?;
    let bytes: Vec<u8> = indices.into_iter().flat_map(u32::to_ne_bytes).collect();
    let view = PyMemoryView::from(PyByteArray::new(py, &bytes).as_any())?.into_any();
    let view = if bytes.is_empty() {
        view.call_method1("cast", ("I",))
    } else {
        view.call_method1("cast", ("I", [n, k]))
    };
    Ok((view?, best))
}

/// Attention of the queries of a head over keys and values that are codes.
#[pyfunction]
#[pyo3(signature = (queries, keys, values, *, scale=None, softcap=None, out=None))]
pub fn attend<'py>(
    py: Python<'py>,
    queries: &Bound<'py, PyAny>,
    keys: &Codes,
    values: &Codes,
    scale: Option<f32>,
    softcap: Option<f32>,
    out: Option<&Bound<'py, PyAny>>,
) -> Result<Bound<'py, PyAny>> {
    let queries = Array::get(queries)?;
    let [group, _] = queries.dims("queries", "(query heads, dim)")?;
    let dim = keys.book.view().shape().dim();
    queries.expect("queries", &[group, dim])?;
    let attention = arguments::attention(dim, scale, softcap, None)?;
    let (result, mut out) = Output::get(py, out, &[group, values.book.view().shape().dim()], &[&queries])?;
    py.detach(|| {
        let tokens = CodedTokens::new(keys.codes.view(), values.codes.view(), values.book.view())?;
        let tokens = tokens.with_softcap(softcap)?;
        if group == 0 {
            return Ok(());
        }
        let scaled: Vec<f32> = queries.floats().iter().map(|x| attention.scale * x).collect();
        let mut table = vec![0.0; group * keys.book.view().shape().lut_len()];
        let luts = lut_into(&keys.book.view(), &scaled, &mut table)?;
        let mut scratch = vec![0.0; attend_scratch_len(tokens.value_shape(), group)];
        let mut stats = vec![SoftmaxStats::EMPTY; group];
        out.write(|out| {
            out.fill(0.0);
            attend_into(&luts, &tokens, &mut scratch, out, &mut stats)?;
            Ok(normalize_all(&stats, out)?)
        })
    })?;
    Ok(result)
}
