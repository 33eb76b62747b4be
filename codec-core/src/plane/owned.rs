//! Planes and transforms that own their parameters.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::model::Kind;
use crate::{Coder, Error, Models, Plane, Predictor, Scaling, Transform};

/// A [`Transform`] that owns its maps.
#[derive(Clone, Debug, PartialEq)]
pub struct TransformBuf {
    head_dim: usize,
    rank: usize,
    forward: Vec<f32>,
    inverse: Vec<f32>,
}

impl TransformBuf {
    /// Checks and takes the maps of a [`Transform`].
    ///
    /// # Errors
    /// As [`Transform::new`].
    /// # Examples
    /// The recommended transform of keys is `svd-core`'s query-metric rotation of each head. `forward` is
    /// its `basis()`, and `inverse` is its `dual()` **transposed**; both are rounded to `f32` and the heads
    /// follow one another:
    ///
    /// ```
    /// # use codec_core::{Error, TransformBuf};
    /// # struct Rotation([f64; 4], [f64; 4]);
    /// # impl Rotation {
    /// #     fn basis(&self) -> &[f64] { &self.0 }
    /// #     fn dual(&self) -> &[f64] { &self.1 }
    /// # }
    /// # let rotations = [Rotation([1.0, 1.0, 0.0, 2.0], [1.0, 0.0, -0.5, 0.5])];
    /// let dim = 2;
    /// let mut forward: Vec<f32> = vec![]; // (heads, dim, dim)
    /// let mut inverse: Vec<f32> = vec![];
    /// for rotation in &rotations {
    ///     forward.extend(rotation.basis().iter().map(|&x| x as f32));
    ///     let dual = rotation.dual();
    ///     inverse.extend((0..dim * dim).map(|i| dual[i % dim * dim + i / dim] as f32));
    /// }
    /// let transform = TransformBuf::new(dim, forward, inverse)?;
    /// assert_eq!(transform.view().inverse(), [1.0, -0.5, 0.0, 0.5]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn new(head_dim: usize, forward: Vec<f32>, inverse: Vec<f32>) -> Result<Self, Error> {
        Self::leading(head_dim, head_dim, forward, inverse)
    }

    /// Checks and takes the maps of a transform to its leading coefficients.
    ///
    /// # Errors
    /// As [`Transform::leading`].
    pub fn leading(
        head_dim: usize,
        rank: usize,
        forward: Vec<f32>,
        inverse: Vec<f32>,
    ) -> Result<Self, Error> {
        Transform::leading(head_dim, rank, &forward, &inverse)?;
        Ok(Self { head_dim, rank, forward, inverse })
    }

    /// The borrowed form. [`Self::new`] has checked it, so this costs nothing.
    #[must_use]
    pub fn view(&self) -> Transform<'_> {
        let Self { head_dim, rank, forward, inverse } = self;
        Transform { head_dim: *head_dim, rank: *rank, forward, inverse }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PredictorBuf {
    Mean,
    Previous(Vec<f32>),
    Anchor { group: u16 },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ScalingBuf {
    Steps(Vec<f32>),
    TokenAbsmax { levels: u8 },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ModelsBuf {
    Families(Vec<u8>),
    Tables(Vec<u16>),
    ContextTables(Vec<u16>),
}

/// The parts of a [`PlaneBuf`], not yet checked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlaneBufParts {
    pub transform: Option<Arc<TransformBuf>>,
    pub mean: Vec<f32>,
    pub predictor: PredictorBuf,
    pub scaling: ScalingBuf,
    pub centroids: [f32; 2],
    pub models: ModelsBuf,
    pub coder: Coder,
}

impl PlaneBufParts {
    /// Elements of a token in the tiles.
    pub fn coefficients(&self) -> usize {
        self.transform.as_ref().map_or(self.mean.len(), |transform| transform.view().coefficients())
    }
}

/// An owned [`Plane`]. It is fitted once to the keys or values of a layer and serves all sequences of the
/// model. Planes of several levels share one transform.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaneBuf {
    parts: PlaneBufParts,
    id: u32,
}

impl PlaneBuf {
    /// Checks the parts and computes their checksum. All constructors end here, so that [`Self::view`] need
    /// not do either.
    pub(crate) fn new(parts: PlaneBufParts) -> Result<Self, Error> {
        let coefficients = parts.coefficients();
        match &parts.models {
            ModelsBuf::Families(_) => {}
            ModelsBuf::Tables(tables) => drop(Models::tables(coefficients, tables)?),
            ModelsBuf::ContextTables(tables) => drop(Models::context_tables(coefficients, tables)?),
        }
        let mut plane = Self { parts, id: 0 };
        plane.id = Plane::new(plane.view().parts())?.id();
        Ok(plane)
    }

    /// The borrowed form that encoding and decoding take. Constructors have checked the plane and computed
    /// its checksum, so this costs a few loads.
    #[must_use]
    pub fn view(&self) -> Plane<'_> {
        let PlaneBufParts { transform, mean, predictor, scaling, centroids, models, coder } = &self.parts;
        let channels = self.parts.coefficients();
        Plane {
            transform: transform.as_ref().map(|transform| transform.view()),
            mean,
            predictor: match predictor {
                PredictorBuf::Mean => Predictor::Mean,
                PredictorBuf::Previous(factors) => Predictor::Previous(factors),
                PredictorBuf::Anchor { group } => Predictor::Anchor { group: *group },
            },
            scaling: match scaling {
                ScalingBuf::Steps(steps) => Scaling::Steps(steps),
                ScalingBuf::TokenAbsmax { levels } => Scaling::TokenAbsmax { levels: *levels },
            },
            centroids: *centroids,
            models: match models {
                ModelsBuf::Families(families) => Models::families(families),
                ModelsBuf::Tables(tables) => Models { channels, kind: Kind::Tables(tables) },
                ModelsBuf::ContextTables(tables) => Models { channels, kind: Kind::ContextTables(tables) },
            },
            coder: *coder,
            id: self.id,
        }
    }

    /// Elements per token.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.parts.mean.len()
    }

    /// [`Plane::id`].
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    pub(crate) const fn parts(&self) -> &PlaneBufParts {
        &self.parts
    }
}
