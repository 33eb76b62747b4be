//! The cache of a layer of one sequence, of a quantizer and an element type that are chosen at run time.

use std::cell::Cell;
use std::sync::Arc;

use half::{bf16, f16};
use kv_attend::owner::{Layer, Store};
use kv_attend::{Attention, Element, Rows, Window, Workspace};
use pq_core::{HeadCodes, sq};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments;
use crate::array::{Array, Dtype, Output, Typed};
use crate::error::{Error, Result};
use crate::layout::{Tokens, for_tokens};
use crate::quantizers::{ProductQuantizer, ScalarQuantizer};
use crate::threads;

/// The keys and values of all KV heads of a layer for one sequence.
#[pyclass(module = "kvcodes")]
pub struct LayerCache {
    quantizer: Quantizer,
    tokens: AnyLayer,
    dtype: Dtype,
    shape: [usize; 2], // heads, dim
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

    fn scalar(&self) -> Option<&ScalarQuantizer> {
        match self {
            Self::Product(_) => None,
            Self::Scalar(quantizer) => Some(quantizer.get()),
        }
    }

    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Product(quantizer) => [quantizer.get().books.len(), quantizer.get().dim()],
            Self::Scalar(quantizer) => [quantizer.get().transforms.len(), quantizer.get().dim()],
        }
    }
}

/// A layer's tokens by codes and by the elements of exact rows.
#[derive(Clone)]
enum AnyLayer {
    ProductF32(Layer<HeadCodes, f32>),
    ProductF16(Layer<HeadCodes, f16>),
    ProductBf16(Layer<HeadCodes, bf16>),
    ScalarF32(Layer<sq::HeadCodes, f32>),
    ScalarF16(Layer<sq::HeadCodes, f16>),
    ScalarBf16(Layer<sq::HeadCodes, bf16>),
}

macro_rules! for_layer {
    ($any:expr, $layer:ident => $result:expr) => {
        match $any {
            AnyLayer::ProductF32($layer) => $result,
            AnyLayer::ProductF16($layer) => $result,
            AnyLayer::ProductBf16($layer) => $result,
            AnyLayer::ScalarF32($layer) => $result,
            AnyLayer::ScalarF16($layer) => $result,
            AnyLayer::ScalarBf16($layer) => $result,
        }
    };
}

/// A way to make a layer of any type.
trait Make {
    fn make<S: Store<E, Error = pq_core::Error>, E: Element>(
        &self,
        shared: &[Arc<S::Shared>],
    ) -> std::result::Result<Layer<S, E>, pq_core::Error>;
}

/// An empty one.
impl Make for Window {
    fn make<S: Store<E, Error = pq_core::Error>, E: Element>(
        &self,
        shared: &[Arc<S::Shared>],
    ) -> std::result::Result<Layer<S, E>, pq_core::Error> {
        Layer::new(shared, *self)
    }
}

/// A saved one.
impl Make for [u8] {
    fn make<S: Store<E, Error = pq_core::Error>, E: Element>(
        &self,
        shared: &[Arc<S::Shared>],
    ) -> std::result::Result<Layer<S, E>, pq_core::Error> {
        Layer::from_bytes(self, shared)
    }
}

impl AnyLayer {
    fn new(
        quantizer: &Quantizer,
        dtype: Dtype,
        layer: &(impl Make + ?Sized),
    ) -> std::result::Result<Self, pq_core::Error> {
        Ok(match quantizer {
            Quantizer::Product(quantizer) => {
                let books = &quantizer.get().books;
                match dtype {
                    Dtype::F32 => Self::ProductF32(layer.make(books)?),
                    Dtype::F16 => Self::ProductF16(layer.make(books)?),
                    Dtype::Bf16 => Self::ProductBf16(layer.make(books)?),
                }
            }
            Quantizer::Scalar(quantizer) => {
                let transforms = &quantizer.get().transforms;
                match dtype {
                    Dtype::F32 => Self::ScalarF32(layer.make(transforms)?),
                    Dtype::F16 => Self::ScalarF16(layer.make(transforms)?),
                    Dtype::Bf16 => Self::ScalarBf16(layer.make(transforms)?),
                }
            }
        })
    }
}

#[pymethods]
impl LayerCache {
    #[new]
    #[pyo3(signature = (quantizer, *, sinks=4, recent=64, batch=32, dtype="f32"))]
    fn new(quantizer: Quantizer, sinks: usize, recent: usize, batch: usize, dtype: &str) -> Result<Self> {
        let (window, dtype) = (arguments::window(sinks, recent, batch)?, Dtype::parse(dtype)?);
        let tokens = AnyLayer::new(&quantizer, dtype, &window)?;
        Ok(Self { shape: quantizer.shape(), quantizer, tokens, dtype })
    }

    fn append(&mut self, py: Python<'_>, keys: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> Result<()> {
        let (keys, values) = (Array::get(keys)?, Array::get(values)?);
        let [n, ..] = keys.dims::<3>("keys", TOKENS)?;
        let [heads, dim] = self.shape;
        let shape = [n, heads, dim];
        keys.expect("keys", &shape)?;
        values.expect("values", &shape)?;
        let Self { quantizer, tokens, .. } = self;
        let scalar = quantizer.scalar();
        py.detach(|| {
            threads::run_step(|| for_layer!(tokens, layer => append(layer, scalar, &keys, &values, shape)))
        })
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
        let shape @ [_, query_heads, query_dim] =
            queries.dims("queries", "(tokens, query heads, head_dim)")?;
        let [heads, dim] = self.shape;
        let group = arguments::group(query_heads, heads)?;
        if query_dim != dim {
            return Err(Error::argument(format!("queries have {query_dim} components, expected {dim}")));
        }
        let attention = arguments::attention(dim, scale, softcap, window)?;
        let (result, mut out) = Output::get(py, out, &shape, &[&queries])?;
        let scalar = self.quantizer.scalar();
        py.detach(|| {
            threads::run_step(|| {
                for_tokens!(&queries, shape, rows => out.write(|out| {
                    for_layer!(&self.tokens, layer => attend(layer, &attention, rows, out))?;
                    match scalar {
                        Some(scalar) if self.len() > 0 => scalar.restore_outputs(group, out),
                        _ => Ok(()),
                    }
                }))
            })
        })?;
        Ok(result)
    }

    fn truncate(&mut self, len: usize) {
        for_layer!(&mut self.tokens, layer => layer.truncate(len));
    }

    fn copy(&self, py: Python<'_>) -> Self {
        let quantizer = self.quantizer.clone_ref(py);
        let tokens = py.detach(|| self.tokens.clone());
        Self { quantizer, tokens, dtype: self.dtype, shape: self.shape }
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
        // The bytes name their element type, and another one refuses them.
        let other = pq_core::Error::BadField { what: "element type" };
        let read = |dtype| (dtype, AnyLayer::new(&quantizer, dtype, data));
        let mut all = [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().map(read);
        let found = all.find(|(_, tokens)| !matches!(tokens, Err(e) if *e == other));
        let (dtype, tokens) = found.unwrap_or((Dtype::F32, Err(other)));
        Ok(Self { shape: quantizer.shape(), tokens: tokens?, quantizer, dtype })
    }

    fn __len__(&self) -> usize {
        self.len()
    }

    #[getter]
    fn coded(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.heads()[0].compressed())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.size())
    }

    #[getter]
    fn heads(&self) -> usize {
        self.shape[0]
    }

    #[getter]
    fn dim(&self) -> usize {
        self.shape[1]
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
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
    fn len(&self) -> usize {
        for_layer!(&self.tokens, layer => layer.len())
    }
}

/// Appends keys and values of any element type. With scalar codes, values are in the basis of the codes.
fn append<S: Store<E, Error = pq_core::Error>, E: Typed>(
    layer: &mut Layer<S, E>,
    scalar: Option<&ScalarQuantizer>,
    keys: &Array,
    values: &Array,
    shape: [usize; 3],
) -> Result<()> {
    let keys = Tokens::<E>::of(keys, shape);
    match scalar {
        None => layer.append(keys.rows()?, Tokens::of(values, shape).rows()?)?,
        Some(scalar) => {
            let mut values = values.floats().into_owned();
            scalar.transform_values(&mut values)?;
            let values: Vec<E> = values.into_iter().map(<E as Element>::from_f32).collect();
            layer.append(keys.rows()?, Rows::contiguous(&values, shape[1] * shape[2])?)?
        }
    };
    Ok(())
}

fn attend<S: Store<E, Error = pq_core::Error>, E: Element, Q: Element>(
    layer: &Layer<S, E>,
    attention: &Attention,
    queries: Rows<'_, Q>,
    out: &mut [f32],
) -> Result<()> {
    thread_local!(static WORKSPACE: Cell<Workspace> = Cell::default());
    // Taken, not borrowed: while a thread of the pool waits for others, it may begin another call.
    let mut workspace = WORKSPACE.take();
    let result = layer.attend_into(attention, queries, &mut workspace, out);
    WORKSPACE.set(workspace);
    Ok(result?)
}
