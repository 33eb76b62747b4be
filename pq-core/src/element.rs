use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Storage type of one component of a key or value: `f32`, [`half::f16`] or [`half::bf16`]. Arithmetic is in
/// `f32`.
pub trait Element: Copy + Default + Send + Sync + sealed::Sealed + 'static {
    /// Converts without loss.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}
