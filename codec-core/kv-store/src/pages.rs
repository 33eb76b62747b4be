//! Pages of engines that name their caches themselves: tiers below an engine's memory.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use codec_core::{Element, ElementType, LayerRows, ModelInfo, Profile, Side};
use kv_stream::ChunkFrame;
use tracing::warn;

use crate::{
    Check, ChunkKey, Error, Grid, KvStore, PageLayout, ProfileId, Put, Result, Space, StoredChunk,
    encode_chunk,
};

/// Pages of one geometry under the keys of an engine, which may be any bytes.
///
/// Without a profile, pages are stored without loss: the first page that any process encodes fits the
/// profile, which the store then holds for all of them. Calls may be made from several threads and processes.
///
/// Encoding and decoding are computation alone, the other calls wait for the store: an engine may run them on
/// different threads.
///
/// # Examples
/// ```
/// use half::bf16;
/// use kv_store::{KvStore, Options, PageLayout, PageModel, Pages, Put};
///
/// let store = std::sync::Arc::new(KvStore::open("memory:///", Options::default())?);
/// let layout = PageLayout::new("2LTHD", &[2, 4, 16, 2, 8])?; // as in the engine's memory
/// let model = PageModel::new::<bf16>("org/model@revision", "rank 0 of 2", &layout);
/// let pages = Pages::new(store, model, None)?;
///
/// let page: Vec<bf16> = (0..layout.elements()).map(|i| bf16::from_f32((i as f32).sin())).collect();
/// let key = b"the engine's hash of the tokens up to this page";
/// assert_eq!(pages.put(&pages.encode(key, &page, &layout)?)?, Put::Stored);
///
/// let mut loaded = vec![bf16::ZERO; page.len()];
/// let frame = pages.fetch(key, 0)?.expect("it is stored");
/// assert!(pages.decode(&frame, &mut loaded, &layout)? && loaded == page);
/// assert!(pages.fetch(b"another key", 0)?.is_none());
/// # Ok::<(), kv_store::Error>(())
/// ```
#[derive(Debug)]
pub struct Pages {
    store: Arc<KvStore>,
    model: PageModel,
    coding: OnceLock<Arc<Coding>>, // empty before the first page, if there is no profile
}

/// What the pages hold: rows of a model, or of a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageModel {
    name: String,
    part: String,
    element: ElementType,
    info: ModelInfo,
    tokens: usize,
}

/// How pages are coded and where they are.
#[derive(Debug)]
struct Coding {
    profile: Profile,
    space: Space,
}

/// A page at every level, before it is stored.
#[derive(Clone, Debug)]
pub struct EncodedPage {
    key: ChunkKey,
    coding: Arc<Coding>,
    object: Bytes,
}

/// The verified bytes of a page at a level, before they are decoded.
#[derive(Clone, Debug)]
pub struct FetchedPage {
    key: ChunkKey,
    level: usize,
    coding: Arc<Coding>,
    frame: Bytes,
}

impl PageModel {
    /// Pages of elements `E` with the numbers of layers, tokens, heads and components of `layout`, keys after
    /// RoPE.
    ///
    /// `name` identifies the weights and the tokenizer; `part` says which part of the rows a page holds, such
    /// as a rank of tensor parallelism, "" for all. Pages of other names, parts or geometries are never
    /// found; layouts of the same page may differ.
    #[must_use]
    pub fn new<E: Element>(name: &str, part: &str, layout: &PageLayout) -> Self {
        let info = ModelInfo {
            model_id: ModelInfo::id_of(name),
            layers: layout.layers(),
            heads: layout.heads(),
            head_dim: layout.head_dim(),
            keys_rotated: true,
        };
        let (name, part) = (name.to_owned(), part.to_owned());
        Self { name, part, element: E::TYPE, info, tokens: layout.tokens() }
    }

    /// The name of the profile that the first page fits.
    fn profile_id(&self) -> ProfileId {
        let ModelInfo { layers, heads, head_dim, .. } = self.info;
        let shape = format!("{layers} layers, {heads} heads, {head_dim} components");
        let recipe = format!("pages without loss: {:?}, {shape}, {}", self.element, self.part);
        ProfileId::new(&self.name, &recipe, &[])
    }

    /// The place of pages that `profile` codes.
    fn coding(&self, profile: Profile) -> Result<Coding> {
        let expected = ModelInfo { model_id: profile.info().model_id, ..self.info };
        if *profile.info() != expected {
            return Err(codec_core::Error::WrongModel.into());
        }
        for level in 0..profile.levels().min(codec_core::MAX_LEVELS) {
            let frame = profile.frame_info(level as u8, self.tokens);
            if frame.lossless && frame.element != self.element {
                return Err(codec_core::Error::WrongPlane.into());
            }
        }
        let grid = Grid { chunk: self.tokens, tail: self.tokens };
        let space = Space::new(&self.name, &profile, grid)?.salted(self.part.as_bytes());
        Ok(Coding { profile, space })
    }

    /// Checks that elements of a page are in this layout.
    fn check<E: Element>(&self, len: usize, layout: &PageLayout) -> Result<()> {
        let info = ModelInfo {
            layers: layout.layers(),
            heads: layout.heads(),
            head_dim: layout.head_dim(),
            ..self.info
        };
        if (info, layout.tokens(), E::TYPE) != (self.info, self.tokens, self.element) {
            return Err(Error::Argument("a page of other layers, tokens, heads, components or elements"));
        }
        match len == layout.span() {
            true => Ok(()),
            false => Err(codec_core::Error::Length {
                what: "elements of a page",
                expected: layout.span(),
                actual: len,
            }
            .into()),
        }
    }
}

impl Pages {
    /// The pages of a model in a store, coded by a profile, at all of its levels, or without loss.
    ///
    /// # Errors
    /// [`Error::Codec`] for a profile of another geometry, or whose level without loss is of other elements;
    /// [`Error::Argument`] for `f32` without a profile, since only 16-bit elements are coded without loss,
    /// and for pages of more than 1,048,576 tokens.
    pub fn new(store: Arc<KvStore>, model: PageModel, profile: Option<Profile>) -> Result<Self> {
        Grid { chunk: model.tokens, tail: model.tokens }.check()?;
        let coding = match profile {
            None if model.element == ElementType::F32 => {
                return Err(Error::Argument("pages of f32 have no coding without loss: pass a profile"));
            }
            None => OnceLock::new(),
            Some(profile) => Arc::new(model.coding(profile)?).into(),
        };
        Ok(Self { store, model, coding })
    }

    /// Encodes a page at every level.
    ///
    /// # Shapes
    /// `page` has [`PageLayout::span`] elements.
    /// # Errors
    /// [`Error::Argument`] for a page of another shape or element type, [`Error::Codec`] for another length,
    /// and for a NaN or an infinity at a level with loss; for the first page those of [`KvStore::profile`].
    /// # Cost
    /// Nothing is copied before. The first page waits for the store.
    pub fn encode<E: Element>(&self, key: &[u8], page: &[E], layout: &PageLayout) -> Result<EncodedPage> {
        self.model.check::<E>(page.len(), layout)?;
        let side = |layer, side| &page[layout.plane(layer, side)];
        let rows = |layer| LayerRows { keys: side(layer, Side::Keys), values: side(layer, Side::Values) };
        let rows: Vec<_> = (0..layout.layers()).map(rows).collect();
        let place = layout.place();
        let coding = match self.coding.get() {
            Some(coding) => coding.clone(),
            None => {
                let PageModel { info, element, tokens, .. } = self.model;
                let fit = || Profile::fit_lossless(info, element, tokens, &rows, &place);
                self.learned(self.store.profile(self.model.profile_id(), || fit().map_err(Error::from))?)?
            }
        };
        let key = coding.space.named(key);
        let object = encode_chunk(&coding.profile, &key, &rows, &place)?.into();
        Ok(EncodedPage { key, coding, object })
    }

    /// Stores an encoded page, unless an undamaged one is stored: see
    /// [`AsyncStore::put_chunk`](crate::AsyncStore::put_chunk).
    ///
    /// # Errors
    /// As there.
    pub fn put(&self, page: &EncodedPage) -> Result<Put> {
        self.store.put_chunk(&page.coding.space, &page.key, page.object.clone())
    }

    /// Whether a page is stored.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`] if the store does not answer.
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        Ok(self.stat(key)?.is_some())
    }

    /// As [`Self::contains`], and its frames are there in their length: it need not be encoded again.
    ///
    /// # Errors
    /// As there.
    pub fn is_whole(&self, key: &[u8]) -> Result<bool> {
        let Some((coding, chunk)) = self.stat(key)? else { return Ok(false) };
        Ok(self.store.damaged(&coding.space, &[chunk], Check::Length)?.is_empty())
    }

    /// Reads the bytes of a page at a level, if it is stored, and compares them with their digests. A damaged
    /// page is deleted, so that it is stored again.
    ///
    /// # Errors
    /// As [`Self::contains`]; [`Error::Argument`] for a level that the profile does not have.
    pub fn fetch(&self, key: &[u8], level: usize) -> Result<Option<FetchedPage>> {
        let Some((coding, chunk)) = self.stat(key)? else { return Ok(None) };
        match self.store.frame(&coding.space, &chunk, level) {
            Ok(frame) => Ok(Some(FetchedPage { key: chunk.key().clone(), level, coding, frame })),
            Err(e) if e.is_damage() => self.forget(&coding.space, chunk.key(), &e).map(|()| None),
            Err(e) => Err(e),
        }
    }

    /// Decodes a page, and returns whether it did: a page that cannot be decoded is deleted, and some of its
    /// rows may have been written.
    ///
    /// # Shapes
    /// `out` has [`PageLayout::span`] elements.
    /// # Errors
    /// [`Error::Argument`] for an `out` of another shape or element type, [`Error::Codec`] for another
    /// length; for a damaged page those of [`KvStore::delete`].
    pub fn decode<E: Element>(&self, page: &FetchedPage, out: &mut [E], layout: &PageLayout) -> Result<bool> {
        self.model.check::<E>(out.len(), layout)?;
        match page.decode_to(out, layout) {
            Ok(()) => Ok(true),
            Err(e) => self.forget(&page.coding.space, &page.key, &e).map(|()| false),
        }
    }

    /// Deletes a page. Deleting a missing one is not an error.
    ///
    /// # Errors
    /// Those of [`KvStore::delete`].
    pub fn delete(&self, key: &[u8]) -> Result<()> {
        let Some(coding) = self.known()? else { return Ok(()) };
        self.store.delete(coding.space.name(), coding.space.named(key).id)
    }

    fn forget(&self, space: &Space, key: &ChunkKey, e: &dyn std::error::Error) -> Result<()> {
        warn!(error = %e, "a page is damaged, and is deleted");
        self.store.delete(space.name(), key.id)
    }

    fn stat(&self, key: &[u8]) -> Result<Option<(Arc<Coding>, StoredChunk)>> {
        let Some(coding) = self.known()? else { return Ok(None) };
        let stored = self.store.stat(&coding.space, coding.space.named(key))?;
        Ok(stored.map(|chunk| (coding, chunk)))
    }

    /// The coding, if there is a profile: given, or of a page that any process has encoded.
    fn known(&self) -> Result<Option<Arc<Coding>>> {
        if let Some(coding) = self.coding.get() {
            return Ok(Some(coding.clone()));
        }
        match self.store.stored_profile(self.model.profile_id()) {
            Err(e) if e.is_damage() => Ok(None), // the next page is encoded under another one
            stored => stored?.map(|profile| self.learned(profile)).transpose(),
        }
    }

    /// The coding of the profile in the store, which is the same for all threads and processes.
    fn learned(&self, profile: Profile) -> Result<Arc<Coding>> {
        let coding = Arc::new(self.model.coding(profile)?);
        Ok(self.coding.get_or_init(|| coding).clone())
    }
}

impl FetchedPage {
    fn decode_to<E: Element>(&self, out: &mut [E], layout: &PageLayout) -> kv_stream::Result<()> {
        let frame = ChunkFrame::parse(&self.coding.profile, &self.frame, &self.key.tokens, self.level)?;
        for layer in 0..layout.layers() {
            for side in [Side::Keys, Side::Values] {
                let out = &mut out[layout.plane(layer, side)];
                frame.plane_to(layer, side, None, &layout.place(), out)?;
            }
        }
        Ok(())
    }
}
