/// Columns of the maps (head_dim, head_dim) of a head's keys and queries to another basis, in which scores
/// are the same, and of its values to theirs.
pub(crate) struct HeadMaps {
    pub keys: Vec<f32>,
    pub queries: Vec<f32>,
    pub values: Vec<f32>,
}
