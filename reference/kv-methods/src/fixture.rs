//! What unit tests run on.

use std::path::Path;

use kv_model::Model;

/// A small model of random weights, with two query heads per KV head.
pub fn model() -> Model {
    Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa")).unwrap()
}
