//! Records on disk, in unlinked files.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Result};

/// The offsets of records in a file: heads one after the other, each with room for all positions. Unwritten
/// parts take no space on file systems with sparse files.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub words: usize,    // per record
    pub capacity: usize, // tokens
}

impl Layout {
    fn offset(self, head: usize, t: usize) -> u64 {
        (head as u64 * self.capacity as u64 + t as u64) * (self.words * size_of::<u32>()) as u64
    }
}

/// The records of one layer in a folder.
///
/// A file is unlinked when it is created, so the system frees it with its last user, also after a crash, and
/// no stale file can be misread by a later run. It is read and written by ranges, not mapped: on a full disk
/// or a truncated file a call fails, whereas an access to a mapping would end the process with SIGBUS.
///
/// A clone shares the existing files and writes to its own: a segment's file holds the tokens from its
/// `first` up to the next segment.
#[derive(Clone, Debug)]
pub(super) struct RecordFiles {
    folder: PathBuf,
    layout: Layout,
    segments: Vec<Segment>, // ascending `first`
}

#[derive(Clone, Debug)]
struct Segment {
    first: usize,
    file: Arc<RecordFile>,
}

#[derive(Debug)]
struct RecordFile {
    file: File,
    end: u64, // bytes written, gaps included
}

impl RecordFiles {
    /// Creates empty storage with files in `folder`; the first file is created now.
    pub fn new(folder: &Path, layout: Layout) -> Result<Self> {
        let segments = vec![Segment::new(folder, 0)?];
        Ok(Self { folder: folder.to_owned(), layout, segments })
    }

    /// Appends one head's records of the tokens from `t` on.
    pub fn write(&mut self, head: usize, t: usize, records: &[u32]) -> Result<()> {
        let offset = self.layout.offset(head, t);
        let file = match self.segments.last_mut().and_then(|last| Arc::get_mut(&mut last.file)) {
            Some(file) => file,
            None => {
                // A clone may read the records that this write would overwrite.
                self.truncate(t);
                self.segments.push(Segment::new(&self.folder, t)?);
                return self.write(head, t, records);
            }
        };
        // Writing past the end of a truncated file would fill the gap with zeros.
        let left = file.file.metadata().map_err(|e| Error::io(&self.folder, e))?.len();
        if left < file.end {
            return Err(cut(&self.folder));
        }
        let bytes: &[u8] = bytemuck::cast_slice(records);
        positioned::write_all(&file.file, bytes, offset).map_err(|e| Error::io(&self.folder, e))?;
        file.end = file.end.max(offset + bytes.len() as u64);
        Ok(())
    }

    /// Reads one head's records of `tokens`.
    pub fn read(&self, head: usize, tokens: Range<usize>, records: &mut [u32]) -> Result<()> {
        let (words, mut end) = (self.layout.words, tokens.end);
        for Segment { first, file } in self.segments.iter().rev() {
            let start = tokens.start.max(*first);
            if start < end {
                let part = &mut records[(start - tokens.start) * words..(end - tokens.start) * words];
                let bytes = bytemuck::cast_slice_mut(part);
                let read = positioned::read_exact(&file.file, bytes, self.layout.offset(head, start));
                read.map_err(|e| match e.kind() {
                    io::ErrorKind::UnexpectedEof => cut(&self.folder),
                    _ => Error::io(&self.folder, e),
                })?;
                end = start;
            }
        }
        Ok(())
    }

    /// Drops the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.segments.retain(|segment| segment.first < len);
    }
}

impl Segment {
    fn new(folder: &Path, first: usize) -> Result<Self> {
        let file = tempfile::tempfile_in(folder).map_err(|e| Error::io(folder, e))?;
        Ok(Self { first, file: Arc::new(RecordFile { file, end: 0 }) })
    }
}

fn cut(folder: &Path) -> Error {
    Error::file(folder, "a file of offloaded rows there has been cut by another process")
}

#[cfg(unix)]
mod positioned {
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt;

    pub fn read_exact(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        file.read_exact_at(bytes, offset)
    }

    pub fn write_all(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }
}

#[cfg(windows)]
mod positioned {
    use std::fs::File;
    use std::io;
    use std::os::windows::fs::FileExt;

    pub fn read_exact(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match file.seek_read(bytes, offset)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => (bytes, offset) = (&mut bytes[n..], offset + n as u64),
            }
        }
        Ok(())
    }

    pub fn write_all(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match file.seek_write(bytes, offset)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => (bytes, offset) = (&bytes[n..], offset + n as u64),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { words: 2, capacity: 100 };

    fn read(files: &RecordFiles, head: usize, tokens: Range<usize>) -> Vec<u32> {
        let mut records = vec![0; tokens.len() * LAYOUT.words];
        files.read(head, tokens, &mut records).unwrap();
        records
    }

    #[test]
    fn a_clone_and_its_original_do_not_see_each_others_records() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = RecordFiles::new(folder.path(), LAYOUT).unwrap();
        (0..2).for_each(|head| files.write(head, 0, &[head as u32; 20]).unwrap());
        let mut clone = files.clone();
        files.write(0, 10, &[5; 4]).unwrap();
        clone.write(0, 10, &[6; 2]).unwrap();
        assert_eq!(read(&files, 0, 9..12), [0, 0, 5, 5, 5, 5]);
        assert_eq!(read(&clone, 0, 9..11), [0, 0, 6, 6]);
        // The original truncates and appends: the clone still reads the old records.
        files.truncate(4);
        files.write(0, 4, &[7; 4]).unwrap();
        assert_eq!(read(&files, 0, 3..6), [0, 0, 7, 7, 7, 7]);
        assert_eq!(read(&clone, 0, 3..6), [0; 6]);
        assert_eq!(read(&clone, 1, 0..10), [1; 20]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file has a name");
    }

    #[test]
    fn a_folder_that_takes_no_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = folder.path().join("nowhere");
        let error = RecordFiles::new(&nowhere, LAYOUT).unwrap_err();
        assert!(
            matches!(&error, Error::Model(kv_model::Error::Io { path, .. }) if *path == nowhere),
            "{error}"
        );
        std::fs::create_dir(&nowhere).unwrap();
        let mut files = RecordFiles::new(&nowhere, LAYOUT).unwrap();
        files.write(0, 0, &[1; 4]).unwrap();
        std::fs::remove_dir(&nowhere).unwrap();
        files.write(0, 2, &[2; 4]).unwrap();
        assert_eq!(read(&files, 0, 0..4), [1, 1, 1, 1, 2, 2, 2, 2], "the file outlives its folder");
        let _clone = files.clone();
        assert!(matches!(files.write(0, 4, &[3; 2]), Err(Error::Model(kv_model::Error::Io { .. }))));
        std::fs::create_dir(&nowhere).unwrap();
        files.write(0, 4, &[3; 2]).unwrap();
        assert_eq!(read(&files, 0, 3..5), [2, 2, 3, 3]);
    }

    #[test]
    fn a_file_that_is_cut_is_an_error_to_read_and_to_write() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = RecordFiles::new(folder.path(), LAYOUT).unwrap();
        files.write(0, 0, &[1; 20]).unwrap();
        files.segments[0].file.file.set_len(30).unwrap();
        let mut records = [0; 4];
        files.read(0, 0..2, &mut records).unwrap();
        for error in [files.read(0, 3..5, &mut records), files.write(0, 10, &records)] {
            assert!(
                matches!(&error, Err(Error::Model(kv_model::Error::File { path, .. })) if path == folder.path()),
                "{error:?}"
            );
        }
    }
}
