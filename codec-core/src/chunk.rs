//! Several frames with a directory: the same tokens at several levels, or lossless first and last tokens
//! around lossy ones. FORMAT.md, "Chunk", specifies the bytes.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::{Error, Frame};

const MAGIC: [u8; 4] = *b"KVCS";
const VERSION: u8 = 1;
const HEADER: usize = 8;
const ENTRY: usize = 24;

/// The directory entry of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEntry {
    /// Position of the first token.
    pub first_token: u64,
    /// Number of tokens of the frame.
    pub tokens: usize,
    /// The encoding level.
    pub level: u8,
    /// Whether the frame is lossless.
    pub lossless: bool,
    /// Length of the frame in bytes.
    pub len: usize,
}

impl ChunkEntry {
    const fn of(frame: &Frame<'_>, len: usize) -> Self {
        let info = frame.info();
        Self {
            first_token: info.first_token,
            tokens: info.tokens,
            level: info.level,
            lossless: info.lossless,
            len,
        }
    }
}

/// A chunk whose directory is verified and matches the headers of its frames. Frames decode independently of
/// each other.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    directory: &'a [u8],
    frames: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Parses the directory, and header and index of every frame, without allocation.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TrailingBytes`], [`Error::BadMagic`], [`Error::BadVersion`],
    /// [`Error::BadChecksum`], [`Error::BadField`], [`Error::TooLarge`]; the errors of [`Frame::parse`];
    /// [`Error::WrongEntry`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(Error::Truncated)?;
        if header[..4] != MAGIC {
            return Err(Error::BadMagic);
        }
        if header[4] != VERSION {
            return Err(Error::BadVersion { version: header[4] });
        }
        let entries = usize::from(u16::from_le_bytes([header[6], header[7]]));
        let (directory, rest) = rest.split_at_checked(entries * ENTRY).ok_or(Error::Truncated)?;
        let (checksum, frames) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(header);
        hasher.update(directory);
        if hasher.finalize() != u32::from_le_bytes(*checksum) {
            return Err(Error::BadChecksum);
        }
        if header[5] != 0 {
            return Err(Error::BadField { what: "flags of a chunk" });
        }
        let chunk = Self { directory, frames };
        let mut rest = frames;
        for (i, entry) in chunk.entries().enumerate() {
            let entry = entry?;
            let (frame, after) = rest.split_at_checked(entry.len).ok_or(Error::Truncated)?;
            rest = after;
            if entry != ChunkEntry::of(&Frame::parse(frame, usize::MAX)?, frame.len()) {
                return Err(Error::WrongEntry { frame: i });
            }
        }
        if rest.is_empty() { Ok(chunk) } else { Err(Error::TrailingBytes) }
    }

    /// Number of frames.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.directory.len() / ENTRY
    }

    /// Whether the chunk has no frames.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.directory.is_empty()
    }

    /// The directory entry of a frame.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn entry(&self, frame: usize) -> Result<ChunkEntry, Error> {
        self.entries().nth(frame).ok_or(Error::OutOfBounds { what: "frame" })?
    }

    /// The bytes of a frame, to be parsed with [`Frame::parse`] or sent.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn frame(&self, frame: usize) -> Result<&'a [u8], Error> {
        let mut start = 0;
        for entry in self.entries().take(frame) {
            start += entry?.len;
        }
        let len = self.entry(frame)?.len;
        self.frames.get(start..start + len).ok_or(Error::Truncated)
    }

    fn entries(&self) -> impl Iterator<Item = Result<ChunkEntry, Error>> + use<'a> {
        self.directory.as_chunks::<ENTRY>().0.iter().map(|entry| {
            let four =
                |at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
            let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
            if entry[13] > 1 || entry[14] != 0 || entry[15] != 0 {
                return Err(Error::BadField { what: "field of a directory entry" });
            }
            Ok(ChunkEntry {
                first_token: eight(0),
                tokens: four(8) as usize,
                level: entry[12],
                lossless: entry[13] == 1,
                len: usize::try_from(eight(16)).map_err(|_| Error::TooLarge)?,
            })
        })
    }
}

/// Writes a directory, followed by the frames, and appends the chunk to `out`.
///
/// # Errors
/// The errors of [`Frame::parse`]; [`Error::TooLarge`] for more than 65,535 frames; `out` is then unchanged.
/// # Examples
/// ```
/// # use codec_core::*;
/// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
/// // The same tokens at two levels; the receiver fetches one of them.
/// let mut frames = vec![];
/// for (level, step) in [0.1, 0.5].into_iter().enumerate() {
///     let options = FitOptions { steps: Steps::Deviations(step), ..FitOptions::default() };
///     let plane = PlaneBuf::fit(&rows, 8, None, &options)?;
///     let info = FrameInfo { level: level as u8, ..FrameInfo::new(1, 2, 4, 100) };
///     let mut frame = vec![];
///     encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut frame)?;
///     frames.push(frame);
/// }
/// let mut bytes = vec![];
/// write_chunk(&[&frames[0], &frames[1]], &mut bytes)?;
/// let chunk = Chunk::parse(&bytes)?;
/// assert!(chunk.entry(1)?.len < chunk.entry(0)?.len);
/// assert_eq!(Frame::parse(chunk.frame(1)?, 1 << 20)?.info().level, 1);
/// # Ok::<(), Error>(())
/// ```
#[cfg(feature = "alloc")]
pub fn write_chunk(frames: &[&[u8]], out: &mut Vec<u8>) -> Result<(), Error> {
    let entry = |frame: &&[u8]| Ok(ChunkEntry::of(&Frame::parse(frame, usize::MAX)?, frame.len()));
    let entries = frames.iter().map(entry).collect::<Result<Vec<_>, Error>>()?;
    out.extend(chunk_head(&entries)?);
    frames.iter().for_each(|frame| out.extend_from_slice(frame));
    Ok(())
}

/// The bytes of a chunk before its first frame, which follow from the entries.
///
/// # Errors
/// [`Error::TooLarge`] for more than 65,535 frames, or tokens that do not fit 32 bits.
#[cfg(feature = "alloc")]
pub fn chunk_head(entries: &[ChunkEntry]) -> Result<Vec<u8>, Error> {
    let count = u16::try_from(entries.len()).map_err(|_| Error::TooLarge)?;
    let mut head = Vec::with_capacity(HEADER + ENTRY * entries.len() + 4);
    head.extend_from_slice(&MAGIC);
    head.extend_from_slice(&[VERSION, 0]);
    head.extend_from_slice(&count.to_le_bytes());
    for entry in entries {
        let tokens = u32::try_from(entry.tokens).map_err(|_| Error::TooLarge)?;
        head.extend_from_slice(&entry.first_token.to_le_bytes());
        head.extend_from_slice(&tokens.to_le_bytes());
        head.extend_from_slice(&[entry.level, u8::from(entry.lossless), 0, 0]);
        head.extend_from_slice(&(entry.len as u64).to_le_bytes());
    }
    let checksum = crc32fast::hash(&head);
    head.extend_from_slice(&checksum.to_le_bytes());
    Ok(head)
}
