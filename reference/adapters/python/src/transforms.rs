//! Rotations of rows: fixed ones, and those of second moments.

use pyo3::prelude::*;
use svd_core::{Gram, PreRope, Rows};

use crate::array::{Array, Output};
use crate::error::{Error, Result};
use crate::threads;

/// The Hadamard transform with fixed signs.
#[pyclass(frozen, module = "kvcodes")]
pub struct Hadamard(svd_core::Hadamard);

#[pymethods]
impl Hadamard {
    #[new]
    fn new(dim: usize) -> Result<Self> {
        Ok(Self(svd_core::Hadamard::new(dim)?))
    }

    #[getter]
    const fn dim(&self) -> usize {
        self.0.dim()
    }

    #[pyo3(signature = (rows, *, out=None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        self.apply(py, rows, out, svd_core::Hadamard::forward)
    }

    #[pyo3(signature = (rows, *, out=None))]
    fn inverse<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        self.apply(py, rows, out, svd_core::Hadamard::inverse)
    }
}

impl Hadamard {
    fn apply<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        transform: fn(&svd_core::Hadamard, &mut [f32]) -> std::result::Result<(), svd_core::Error>,
    ) -> Result<Bound<'py, PyAny>> {
        let rows = Array::get(rows)?;
        if rows.shape().last() != Some(&self.0.dim()) {
            return Err(Error::argument(format!(
                "rows have shape {:?}, expected (..., {})",
                rows.shape(),
                self.0.dim()
            )));
        }
        let (result, mut out) = Output::get(py, out, rows.shape(), &[&rows])?;
        py.detach(|| {
            out.write(|out| {
                out.copy_from_slice(&rows.floats());
                Ok(transform(&self.0, out)?)
            })
        })?;
        Ok(result)
    }
}

/// A basis and its dual, with components in the order of their importance.
#[pyclass(frozen, module = "kvcodes")]
pub struct Rotation(svd_core::Rotation);

#[pymethods]
impl Rotation {
    #[staticmethod]
    fn principal(py: Python<'_>, rows: &Bound<'_, PyAny>) -> Result<Self> {
        let rows = Array::get(rows)?;
        py.detach(|| threads::run(|| Ok(Self(svd_core::Rotation::principal(&gram(&rows, "rows")?)?))))
    }

    #[staticmethod]
    fn query_metric(py: Python<'_>, rows: &Bound<'_, PyAny>, queries: &Bound<'_, PyAny>) -> Result<Self> {
        let (rows, queries) = (Array::get(rows)?, Array::get(queries)?);
        py.detach(|| {
            threads::run(|| {
                let (rows, queries) = (gram(&rows, "rows")?, gram(&queries, "queries")?);
                Ok(Self(svd_core::Rotation::query_metric(&rows, &queries)?))
            })
        })
    }

    #[getter]
    const fn dim(&self) -> usize {
        self.0.dim()
    }

    #[getter]
    fn basis<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        single(py, self.0.basis(), &[self.dim(), self.dim()])
    }

    #[getter]
    fn dual<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        single(py, self.0.dual(), &[self.dim(), self.dim()])
    }

    #[getter]
    fn sigma<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        single(py, self.0.sigma(), &[self.dim()])
    }
}

/// The second moments of rows (n, dim).
fn gram(rows: &Array, what: &str) -> Result<Gram<PreRope>> {
    let [n, dim] = rows.dims(what, "(n, dim)")?;
    if n == 0 {
        return Err(Error::argument(format!("{what}: no rows")));
    }
    let mut gram = Gram::new(dim)?;
    gram.add_rows(Rows::contiguous(&rows.floats(), dim)?)?;
    Ok(gram)
}

/// Rounds to single precision.
fn single<'py>(py: Python<'py>, numbers: &[f64], shape: &[usize]) -> Result<Bound<'py, PyAny>> {
    Output::of(py, numbers.iter().map(|&x| x as f32), shape)
}
