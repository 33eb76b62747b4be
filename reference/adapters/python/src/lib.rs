//! The native module of the Python package `kvcodes`: the crates on Python's buffers.
//! `python/kvcodes/_kvcodes.pyi` documents what it exports.

mod arguments;
mod array;
mod cache;
mod codec;
mod error;
mod layout;
mod pages;
mod pq;
mod quantizers;
mod store;
mod threads;
mod transforms;

use pyo3::prelude::*;

#[pymodule]
mod _kvcodes {
    #[pymodule_export]
    use crate::array::View;
    #[pymodule_export]
    use crate::cache::LayerCache;
    #[pymodule_export]
    use crate::codec::{Frame, Profile};
    #[pymodule_export]
    use crate::pages::Pages;
    #[pymodule_export]
    use crate::pq::{Codebook, Codes, attend, search};
    #[pymodule_export]
    use crate::quantizers::{Basis, ProductQuantizer, ScalarQuantizer};
    #[pymodule_export]
    use crate::store::{Space, Store};
    #[pymodule_export]
    use crate::transforms::{Hadamard, Rotation};
}
