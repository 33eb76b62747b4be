//! Bytes of a weight file, read in ranges.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Error, Result, files};

/// A weight file, read by ranges.
///
/// It is not mapped: when another process truncates a mapped file, an access to the lost pages ends this
/// process with SIGBUS, whereas a read fails. Tensors are converted to `f32`, so their bytes are held only
/// during conversion.
pub(crate) struct Source {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Source {
    pub fn open(path: &Path) -> Result<Self> {
        let file = files::open(path)?;
        let len = file.metadata().map_err(|e| Error::io(path, e))?.len();
        Ok(Self { path: path.to_owned(), file, len })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// An error about this file.
    pub fn error(&self, what: impl ToString) -> Error {
        Error::file(&self.path, what)
    }

    /// A reader from the start of the file.
    pub fn reader(&self) -> Result<&File> {
        let mut file = &self.file;
        file.rewind().map_err(|e| Error::io(&self.path, e))?;
        Ok(file)
    }

    /// The bytes of a range; nothing is allocated for a range beyond the file.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        if range.start > range.end || range.end > self.len {
            return Err(self.error(format!("ends after {} bytes, {} are needed", self.len, range.end)));
        }
        let read = || {
            let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
            let mut bytes = vec![];
            bytes.try_reserve_exact(len).map_err(io::Error::other)?;
            bytes.resize(len, 0);
            let mut file = &self.file;
            file.seek(SeekFrom::Start(range.start))?;
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(|e| Error::io(&self.path, e))
    }

    /// Feeds the bytes of a range to a hash.
    pub fn digest(&self, range: Range<u64>, hasher: &mut Sha256) -> Result<()> {
        const BLOCK: u64 = 1 << 20; // memory for the bytes of a large tensor would be too much
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + BLOCK);
            hasher.update(self.read(start..end)?);
            start = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_meanwhile_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, [7; 1 << 16]).unwrap();
        let source = Source::open(&path).unwrap();
        assert_eq!(source.read(1..4).unwrap(), [7; 3]);
        assert!(matches!(source.read(0..(1 << 16) + 1), Err(Error::File { .. })));
        assert!(matches!(source.read(0..u64::MAX), Err(Error::File { .. })));
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
        assert!(matches!(source.read(0..1 << 16), Err(Error::Io { .. })));
        assert_eq!(source.read(0..10).unwrap(), [7; 10]);
    }
}
