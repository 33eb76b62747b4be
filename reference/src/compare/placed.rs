//! Methods fitted to a model, each where it runs: everything that can be refused without the model's weights.

use kv_methods::{DEFAULT_METHODS, Method, Place};
use kv_model::Config;

use super::OnGpu;
#[cfg(feature = "cuda")]
use super::gpu;
use crate::Result;
#[cfg(feature = "cuda")]
use crate::device::unsupported;

/// Methods that fit a model, each where it runs.
#[derive(Clone, Debug, Default)]
pub struct Placed {
    pub(super) methods: Vec<Method>,
    fallbacks: Vec<String>, // methods on the CPU that the GPU does not support, and why
    left_out: Vec<String>,  // default methods that the GPU does not support
}

impl Placed {
    /// These methods on the GPU, or on the CPU if there is none.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for a method that does not fit the model, and for a
    /// setting that has no effect where the method runs, or that the GPU does not support if all must run
    /// on it.
    pub fn new(config: &Config, methods: &[Method], gpu: Option<&OnGpu>) -> Result<Self> {
        let mut placed = Self::default();
        for method in methods {
            let method = placed.place(config, method, gpu)?;
            placed.methods.push(method);
        }
        Ok(placed)
    }

    /// Those of [`DEFAULT_METHODS`] that run there.
    ///
    /// # Errors
    /// As [`Self::new`], for a model that does not fit them, or of which the GPU supports none.
    pub fn defaults(config: &Config, gpu: Option<&OnGpu>) -> Result<Self> {
        let (mut placed, mut refused) = (Self::default(), None);
        for method in Method::parse_list(DEFAULT_METHODS)? {
            match placed.place(config, &method, gpu) {
                // A method's default on a GPU may be another method of the list.
                Ok(method) if method.place() == Place::Cuda && placed.methods.contains(&method) => {}
                Ok(method) => placed.methods.push(method),
                Err(e) if gpu.is_some() && unsupported(&e) => {
                    placed.left_out.push(method.spec());
                    refused = refused.or(Some(e));
                }
                Err(e) => return Err(e),
            }
        }
        match refused {
            Some(e) if placed.methods.is_empty() => Err(e),
            _ => Ok(placed),
        }
    }

    #[cfg(feature = "cuda")]
    fn place(&mut self, config: &Config, method: &Method, gpu: Option<&OnGpu>) -> Result<Method> {
        let Some(on) = gpu else { return on_cpu(config, method) };
        match gpu::fitted(on, config, method) {
            Err(e) if on.others_on_cpu && unsupported(&e) => {
                self.fallbacks.push(format!("{} ({e})", method.spec()));
                on_cpu(config, method)
            }
            fitted => fitted,
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn place(&mut self, config: &Config, method: &Method, _: Option<&OnGpu>) -> Result<Method> {
        on_cpu(config, method)
    }

    /// The methods.
    #[must_use]
    pub fn methods(&self) -> &[Method] {
        &self.methods
    }

    /// Which methods the GPU does not support, for the reader.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let note = |methods: &[String], start: &str, end: &str| {
            (!methods.is_empty()).then(|| format!("{start} {}{end}", methods.join(", ")))
        };
        let fallbacks = note(&self.fallbacks, "--device auto takes the CPU for", "");
        let why = " (`kv methods --device cuda` says why)";
        fallbacks.into_iter().chain(note(&self.left_out, "left out, since a GPU does not support them:", why))
    }
}

/// There is no GPU.
#[cfg(not(feature = "cuda"))]
const fn unsupported(_: &crate::Error) -> bool {
    false
}

fn on_cpu(config: &Config, method: &Method) -> Result<Method> {
    let method = method.fitted(config)?;
    method.check_on_cpu()?;
    Ok(method)
}
