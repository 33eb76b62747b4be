//! Pages of engines that name their caches themselves.

use std::sync::Arc;

use kv_attend::ElementType;
use kv_store::{KvStore, PageLayout, PageModel, Put};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::array::{Array, Output, for_dtype};
use crate::codec::Profile;
use crate::error::Result;
use crate::threads::{self, Opened};

/// Pages of one shape in a store.
#[pyclass(frozen, module = "kvcodes")]
pub struct Pages {
    pages: Opened<kv_store::Pages>,
    order: String,
    shape: Vec<usize>,
    dtype: ElementType,
}

/// A name that an engine has made.
#[derive(FromPyObject)]
pub enum Name {
    Text(String),
    Bytes(PyBackedBytes),
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl Pages {
    pub fn open(
        store: Arc<KvStore>,
        (model, part): (&str, &str),
        (order, shape): (&str, Vec<usize>),
        dtype: ElementType,
        profile: Option<&Profile>,
    ) -> Result<Self> {
        let layout = PageLayout::new(order, &shape)?;
        let model = for_dtype!(dtype, E => PageModel::new::<E>(model, part, &layout));
        let profile = profile.map(|profile| profile.planes().clone());
        let pages = Opened::new(kv_store::Pages::new(store, model, profile)?);
        Ok(Self { pages, order: order.to_owned(), shape, dtype })
    }

    fn array(&self, what: &str, object: &Bound<'_, PyAny>) -> Result<Array> {
        Array::of_page(what, object, self.dtype, &self.shape)
    }

    /// The layout of an array of pages' shape.
    fn layout(&self, array: &Array) -> Result<PageLayout> {
        Ok(PageLayout::with_strides(&self.order, &self.shape, array.strides())?)
    }
}

#[pymethods]
impl Pages {
    /// Stores a page, and returns whether it was not there.
    fn put(&self, py: Python<'_>, key: Name, page: &Bound<'_, PyAny>) -> Result<bool> {
        let page = self.array("page", page)?;
        let layout = self.layout(&page)?;
        py.detach(|| {
            let (pages, key) = (self.pages.get()?, key.as_ref());
            if pages.is_whole(key)? {
                return Ok(false);
            }
            let encode =
                || for_dtype!(page.dtype(), E => Ok(pages.encode(key, page.elements::<E>(), &layout)?));
            Ok(pages.put(&threads::run(encode)?)? != Put::Present)
        })
    }

    /// Writes a page to `out`, and returns whether it was there.
    #[pyo3(signature = (key, out, *, level=0))]
    fn get(&self, py: Python<'_>, key: Name, out: &Bound<'_, PyAny>, level: usize) -> Result<bool> {
        let mut out = Output::of_array(self.array("out", out)?)?;
        let layout = self.layout(out.array())?;
        py.detach(|| {
            let pages = self.pages.get()?;
            let Some(page) = pages.fetch(key.as_ref(), level)? else { return Ok(false) };
            threads::run(|| {
                for_dtype!(out.array().dtype(), E => {
                    Ok(pages.decode(&page, out.elements_mut::<E>(), &layout)?)
                })
            })
        })
    }

    fn __contains__(&self, py: Python<'_>, key: Name) -> Result<bool> {
        py.detach(|| Ok(self.pages.get()?.contains(key.as_ref())?))
    }

    fn delete(&self, py: Python<'_>, key: Name) -> Result<()> {
        py.detach(|| Ok(self.pages.get()?.delete(key.as_ref())?))
    }

    /// Bytes of a page in memory.
    #[getter]
    fn nbytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}
