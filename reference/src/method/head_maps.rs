//! The maps of a head to another basis, for a device.

/// Columns of a head's maps (head_dim, head_dim): of keys and queries to a basis that preserves scores, and
/// of values to theirs.
pub(crate) struct HeadMaps {
    pub keys: Vec<f32>,
    pub queries: Vec<f32>,
    pub values: Vec<f32>,
}
