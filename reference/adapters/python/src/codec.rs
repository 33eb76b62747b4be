//! Contexts as bitstreams: profiles and frames of codec-core.

use codec_core::{ElementType, FitOptions, ModelInfo, PlaneBuf, Steps};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::array::{Array, Output, for_dtype};
use crate::error::{Error, Result};
use crate::layout::{ContextShape, for_context, with_context_mut};
use crate::threads;

/// The planes of a model, which encode and decode its contexts.
#[pyclass(frozen, module = "kvcodes")]
pub struct Profile(codec_core::Profile);

impl Profile {
    pub const fn planes(&self) -> &codec_core::Profile {
        &self.0
    }

    /// Checks that a context is one of the model.
    pub fn check(&self, shape: ContextShape) -> Result<()> {
        let &ModelInfo { layers, heads, head_dim, .. } = self.0.info();
        let expected = ContextShape { layers, heads, head_dim, ..shape };
        match shape == expected {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "{} layers, {} heads and {} components; the model has {layers}, {heads} and {head_dim}",
                shape.layers, shape.heads, shape.head_dim
            ))),
        }
    }
}

#[derive(FromPyObject)]
enum ModelId {
    Number(u64),
    Name(String),
}

#[pymethods]
impl Profile {
    #[staticmethod]
    #[pyo3(signature = (rows, model, *, steps=vec![0.1, 0.25, 0.5], lossless=false, keys_rotated=true))]
    fn fit(
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        model: ModelId,
        steps: Vec<f32>,
        lossless: bool,
        keys_rotated: bool,
    ) -> Result<Self> {
        let rows = Array::get(rows)?;
        let shape = ContextShape::of(&rows, "rows")?;
        let model_id = match model {
            ModelId::Number(id) => id,
            ModelId::Name(name) => ModelInfo::id_of(&name),
        };
        let ContextShape { layers, tokens, heads, head_dim } = shape;
        let info = ModelInfo { model_id, layers, heads, head_dim, keys_rotated };
        let fit = |level: usize, _: usize, _: codec_core::Side, sample: &[f32]| {
            let options = FitOptions { steps: Steps::Deviations(steps[level]), ..FitOptions::default() };
            PlaneBuf::fit(sample, info.channels(), None, &options)
        };
        py.detach(|| {
            threads::run(|| {
                for_context!(&rows, shape, E, planes, place => {
                    let mut levels = vec![];
                    if lossless {
                        let element = <E as codec_core::Element>::TYPE;
                        levels.push(codec_core::Profile::fit_lossless(info, element, tokens, planes, &place)?);
                    }
                    if !lossless || !steps.is_empty() {
                        levels.push(codec_core::Profile::fit(info, steps.len(), tokens, planes, &place, fit)?);
                    }
                    Ok(Self(codec_core::Profile::join(levels)?))
                })
            })
        })
    }

    #[pyo3(signature = (rows, *, level=0, first_token=0))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'_, PyAny>,
        level: u8,
        first_token: u64,
    ) -> Result<Bound<'py, PyBytes>> {
        let rows = Array::get(rows)?;
        let shape = ContextShape::of(&rows, "rows")?;
        self.check(shape)?;
        let info = codec_core::FrameInfo { first_token, ..self.0.frame_info(level, shape.tokens) };
        let frame = py.detach(|| {
            threads::run(|| {
                let mut frame = vec![0; info.max_frame_len()];
                let len = for_context!(&rows, shape, E, planes, place => Ok(
                    self.0.encode_into(&info, planes, &place, &mut frame)?
                ))?;
                frame.truncate(len);
                Ok(frame)
            })
        })?;
        Ok(PyBytes::new(py, &frame))
    }

    fn decode(&self, py: Python<'_>, frame: &[u8], out: &Bound<'_, PyAny>) -> Result<()> {
        let mut out = Output::any(out, &[])?;
        let shape = ContextShape::of(out.array(), "out")?;
        self.check(shape)?;
        py.detach(|| {
            threads::run(|| {
                let frame = codec_core::Frame::parse(frame, shape.elements())?;
                if frame.info().tokens != shape.tokens {
                    let (actual, expected) = (shape.tokens, frame.info().tokens);
                    return Err(Error::argument(format!("out has {actual} tokens, the frame {expected}")));
                }
                for_dtype!(out.array().dtype(), E => with_context_mut::<E, _>(&mut out, shape, |layers, place| {
                    for (layer, [keys, values]) in layers.into_iter().enumerate() {
                        self.0.decode_layer_to(&frame, layer, None, &place, keys, values)?;
                    }
                    Ok(())
                }))
            })
        })
    }

    #[getter]
    const fn levels(&self) -> usize {
        self.0.levels()
    }

    #[getter]
    const fn model_id(&self) -> u64 {
        self.0.info().model_id
    }

    #[getter]
    const fn layers(&self) -> usize {
        self.0.info().layers
    }

    #[getter]
    const fn heads(&self) -> usize {
        self.0.info().heads
    }

    #[getter]
    const fn head_dim(&self) -> usize {
        self.0.info().head_dim
    }

    #[getter]
    const fn keys_rotated(&self) -> bool {
        self.0.info().keys_rotated
    }

    fn is_lossless(&self, level: u8) -> Result<bool> {
        match usize::from(level) < self.0.levels() {
            true => Ok(self.0.frame_info(level, 0).lossless),
            false => Err(codec_core::Error::OutOfBounds { what: "level" }.into()),
        }
    }

    fn __repr__(&self) -> String {
        let &ModelInfo { layers, heads, head_dim, .. } = self.0.info();
        let levels = (0..self.0.levels()).map(|level| match self.0.frame_info(level as u8, 0) {
            codec_core::FrameInfo { lossless: true, element, .. } => format!("lossless {element:?}"),
            _ => "lossy".to_owned(),
        });
        let levels: Vec<_> = levels.collect();
        format!("Profile({layers} layers, {heads} heads of {head_dim}, levels: {})", levels.join(", "))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    #[staticmethod]
    fn from_bytes(data: &[u8]) -> Result<Self> {
        Ok(Self(codec_core::Profile::from_bytes(data)?))
    }
}

/// What the header of a frame says.
#[pyclass(frozen, get_all, module = "kvcodes")]
pub struct Frame {
    layers: usize,
    heads: usize,
    head_dim: usize,
    first_token: u64,
    tokens: usize,
    level: u8,
    lossless: bool,
    keys_rotated: bool,
    dtype: &'static str,
    model_id: u64,
}

#[pymethods]
impl Frame {
    #[staticmethod]
    fn parse(data: &[u8]) -> Result<Self> {
        let frame = codec_core::Frame::parse(data, usize::MAX)?;
        let &codec_core::FrameInfo {
            element,
            keys_rotated,
            lossless,
            level,
            layers,
            heads,
            head_dim,
            first_token,
            tokens,
            model_id,
            ..
        } = frame.info();
        let dtype = match element {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
            ElementType::Bf16 => "bf16",
        };
        Ok(Self {
            layers,
            heads,
            head_dim,
            first_token,
            tokens,
            level,
            lossless,
            keys_rotated,
            dtype,
            model_id,
        })
    }
}
