//! The cache of a layer of one sequence, of a quantizer and an element type that are chosen at run time.

use std::cell::Cell;

use kv_attend::Workspace;
use kv_attend::owner::AnyLayer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::array::{Array, Output, for_dtype, parse_dtype};
use crate::error::{Error, Result};
use crate::layout::{Tokens, for_tokens};
use crate::quantizers::{ProductQuantizer, ScalarQuantizer};
use crate::threads;

/// The keys and values of all KV heads of a layer for one sequence.
#[pyclass(module = "kvcodes")]
pub struct LayerCache {
    quantizer: Quantizer,
    tokens: Layer,
}

#[derive(FromPyObject)]
enum Quantizer {
    Product(Py<ProductQuantizer>),
    Scalar(Py<ScalarQuantizer>),
}

impl Quantizer {
    fn clone_ref(&self, py: Python<'_>) -> Self {
        match self {
            Self::Product(quantizer) => Self::Product(quantizer.clone_ref(py)),
            Self::Scalar(quantizer) => Self::Scalar(quantizer.clone_ref(py)),
        }
    }
}

/// A layer's tokens by their codes.
#[derive(Clone)]
enum Layer {
    Product(AnyLayer<pq_core::HeadCodes>),
    Scalar(AnyLayer<kv_owners::sq::Codes>),
}

macro_rules! for_layer {
    ($any:expr, $layer:ident => $result:expr) => {
        match $any {
            Layer::Product($layer) => $result,
            Layer::Scalar($layer) => $result,
        }
    };
}

#[pymethods]
impl LayerCache {
    #[new]
    #[pyo3(signature = (quantizer, *, sinks=4, recent=64, batch=32, dtype="f32"))]
    fn new(quantizer: Quantizer, sinks: usize, recent: usize, batch: usize, dtype: &str) -> Result<Self> {
        let (window, dtype) = (arguments::window(sinks, recent, batch)?, parse_dtype(dtype)?);
        let tokens = match &quantizer {
            Quantizer::Product(of) => Layer::Product(AnyLayer::new(dtype, &of.get().books, window)?),
            Quantizer::Scalar(of) => Layer::Scalar(AnyLayer::new(dtype, &of.get().heads, window)?),
        };
        Ok(Self { quantizer, tokens })
    }

    fn append(&mut self, py: Python<'_>, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> Result<()> {
        let (keys, values) = (Array::get(keys)?, Array::get(values)?);
        let [n, ..] = keys.dims::<3>("keys", TOKENS)?;
        let (heads, [dim, dim_v]) = (self.heads(), self.dims());
        keys.expect("keys", &[n, heads, dim])?;
        values.expect("values", &[n, heads, dim_v])?;
        let append = || {
            for_layer!(&mut self.tokens, layer => for_dtype!(layer.element(), E => {
                let keys = Tokens::<E>::of(&keys, [n, heads, dim]);
                let values = Tokens::<E>::of(&values, [n, heads, dim_v]);
                layer.append(keys.rows()?.into(), values.rows()?.into())?;
            }));
            Ok(())
        };
        py.detach(|| threads::run_step(append))
    }

    #[pyo3(signature = (queries, *, scale=None, softcap=None, window=None, out=None))]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        queries: &Bound<'py, PyAny>,
        scale: Option<f32>,
        softcap: Option<f32>,
        window: Option<usize>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let queries = Array::get(queries)?;
        let shape @ [n, query_heads, query_dim] =
            queries.dims("queries", "(tokens, query heads, head_dim)")?;
        let (heads, [dim, dim_v]) = (self.heads(), self.dims());
        arguments::check_group(query_heads, heads)?;
        if query_dim != dim {
            return Err(Error::argument(format!("queries have {query_dim} components, expected {dim}")));
        }
        let attention = arguments::attention(dim, scale, softcap, window)?;
        let (result, mut out) = Output::get(py, out, &[n, query_heads, dim_v], &[&queries])?;
        py.detach(|| {
            threads::run_step(|| {
                for_tokens!(&queries, shape, rows => out.write(|out| with_workspace(|workspace| {
                    for_layer!(&self.tokens, layer => Ok(layer.attend_into(&attention, rows.into(), workspace, out)?))
                })))
            })
        })?;
        Ok(result)
    }

    fn truncate(&mut self, len: usize) {
        for_layer!(&mut self.tokens, layer => layer.truncate(len));
    }

    fn copy(&self, py: Python<'_>) -> Self {
        let quantizer = self.quantizer.clone_ref(py);
        Self { quantizer, tokens: py.detach(|| self.tokens.clone()) }
    }

    fn __copy__(&self, py: Python<'_>) -> Self {
        self.copy(py)
    }

    fn __deepcopy__(&self, py: Python<'_>, _memo: &Bound<'_, PyAny>) -> Self {
        self.copy(py)
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| for_layer!(&self.tokens, layer => layer.to_bytes_checked())))
    }

    #[staticmethod]
    fn from_bytes(quantizer: Quantizer, data: &[u8]) -> Result<Self> {
        let tokens = match &quantizer {
            Quantizer::Product(of) => Layer::Product(AnyLayer::from_bytes(data, &of.get().books)?),
            Quantizer::Scalar(of) => Layer::Scalar(AnyLayer::from_bytes(data, &of.get().heads)?),
        };
        Ok(Self { quantizer, tokens })
    }

    fn __len__(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.len())
    }

    #[getter]
    fn coded(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.compressed())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.size())
    }

    #[getter]
    fn heads(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.heads())
    }

    #[getter]
    fn dim(&self) -> usize {
        self.dims()[0]
    }

    #[getter]
    fn dtype(&self) -> String {
        for_layer!(&self.tokens, layer => layer.element()).to_string()
    }

    #[getter]
    fn quantizer(&self, py: Python<'_>) -> Py<PyAny> {
        match &self.quantizer {
            Quantizer::Product(quantizer) => quantizer.clone_ref(py).into_any(),
            Quantizer::Scalar(quantizer) => quantizer.clone_ref(py).into_any(),
        }
    }
}

const TOKENS: &str = "(tokens, KV heads, head_dim)";

impl LayerCache {
    /// Components of a key and of a value.
    fn dims(&self) -> [usize; 2] {
        for_layer!(&self.tokens, layer => layer.dims())
    }
}

/// Runs attention with the workspace of this thread.
fn with_workspace<T>(attend: impl FnOnce(&mut Workspace) -> Result<T>) -> Result<T> {
    thread_local!(static WORKSPACE: Cell<Workspace> = Cell::default());
    // Taken, not borrowed: while a thread of the pool waits for others, it may begin another call.
    let mut workspace = WORKSPACE.take();
    let result = attend(&mut workspace);
    WORKSPACE.set(workspace);
    result
}
