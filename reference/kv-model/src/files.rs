//! Files: inputs are regular files, outputs are replaced atomically.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf, is_separator};

use crate::{Error, Result};

/// Opens a regular file for reading. Opening a pipe may block forever, and a device may never end.
///
/// # Errors
/// [`Error::Io`], and [`Error::File`] if it is not a regular file.
pub fn open(path: &Path) -> Result<File> {
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    check_kind(path, &metadata)?;
    File::open(path).map_err(|e| Error::io(path, e))
}

/// Whether there is something of this name. A link to nothing is something: reading it is an error, whereas a file
/// that is not there may have been optional.
///
/// # Errors
/// [`Error::Io`] when the folder cannot be searched.
pub fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path, e)),
    }
}

/// The bytes of a regular file.
///
/// # Errors
/// Errors of [`open`], and [`Error::Io`] when the file cannot be read or does not fit in memory.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    open(path)?.read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    Ok(bytes)
}

/// The text of a regular file.
///
/// # Errors
/// Errors of [`read`], and [`Error::File`] for invalid UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|e| Error::file(path, e.utf8_error()))
}

/// The first `most` bytes of a text file, up to the end of a character, and whether there are more, which are not
/// read.
///
/// # Errors
/// As [`read_text`].
pub fn read_text_start(path: &Path, most: usize) -> Result<(String, bool)> {
    text_start(path, open(path)?, most)
}

/// The same of standard input, which may be a pipe.
///
/// # Errors
/// [`Error::Io`], and [`Error::File`] for invalid UTF-8.
pub fn read_stdin_start(most: usize) -> Result<(String, bool)> {
    text_start(Path::new("standard input"), io::stdin().lock(), most)
}

fn text_start(name: &Path, input: impl Read, most: usize) -> Result<(String, bool)> {
    let mut bytes = vec![];
    input.take(most as u64 + 1).read_to_end(&mut bytes).map_err(|e| Error::io(name, e))?;
    let more = bytes.len() > most;
    bytes.truncate(most);
    match String::from_utf8(bytes) {
        Ok(text) => Ok((text, more)),
        // The cut may be inside a character.
        Err(e) if more && e.utf8_error().error_len().is_none() => {
            let end = e.utf8_error().valid_up_to();
            let mut bytes = e.into_bytes();
            bytes.truncate(end);
            String::from_utf8(bytes).map(|text| (text, true)).map_err(|e| Error::file(name, e.utf8_error()))
        }
        Err(e) => Err(Error::file(name, e.utf8_error())),
    }
}

/// Checks that [`write_atomically`] can write to `path`, so that no long work is lost to a mistyped path.
/// Pipes and devices are rejected; nothing is changed.
///
/// # Errors
/// [`Error::Io`], and [`Error::File`] if it is not a regular file.
pub fn check_writable(path: &Path) -> Result<()> {
    let probe = |path: &Path| {
        let (draft, _) = create_draft(path)?;
        fs::remove_file(draft)
    };
    let checked = match fs::metadata(path) {
        Ok(old) => {
            check_kind(path, &old)?;
            // Renaming a draft to a read-only file would succeed.
            let writable = OpenOptions::new().write(true).open(path);
            writable.and_then(|_| fs::canonicalize(path)).and_then(|target| probe(&target))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => probe(path),
        Err(e) => Err(e),
    };
    checked.map_err(|e| Error::io(path, e))
}

fn check_kind(path: &Path, metadata: &fs::Metadata) -> Result<()> {
    match (metadata.is_file(), metadata.is_dir()) {
        (true, _) => Ok(()),
        (_, true) => Err(Error::file(path, "is a folder, not a file")),
        _ => Err(Error::file(path, "is a pipe or a device, not a regular file")),
    }
}

/// Writes `bytes` to `path`: the file then holds all of them or, after an error, its previous contents.
///
/// The bytes go to a draft with a random name in the same folder, which is synced to disk and renamed to
/// `path`. Symbolic links are followed, and permissions are kept. A pipe or a device cannot be replaced and
/// is written in place.
///
/// # Errors
/// [`Error::Io`]; the draft is then removed.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = match fs::metadata(path) {
        Ok(old) if old.is_file() => {
            fs::canonicalize(path).and_then(|target| replace(&target, Some(old.permissions()), bytes))
        }
        Ok(_) => OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => replace(path, None, bytes),
        Err(e) => Err(e),
    };
    written.map_err(|e| Error::io(path, e))
}

fn replace(path: &Path, permissions: Option<fs::Permissions>, bytes: &[u8]) -> io::Result<()> {
    let (draft, mut file) = create_draft(path)?;
    let write = |file: &mut File| {
        if let Some(permissions) = permissions {
            file.set_permissions(permissions)?;
        }
        file.write_all(bytes)?;
        file.sync_all()
    };
    let renamed = write(&mut file).and_then(|()| fs::rename(&draft, path));
    if renamed.is_err() {
        // Report the first error: a failure to remove the draft as well adds nothing.
        let _ = fs::remove_file(&draft);
    }
    renamed
}

/// A new file in the folder of `path`.
fn create_draft(path: &Path) -> io::Result<(PathBuf, File)> {
    if path.file_name().is_none()
        || path.as_os_str().as_encoded_bytes().last().is_some_and(|&b| is_separator(b.into()))
    {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is no file name"));
    }
    // `RandomState` is seeded from the system's randomness: the name cannot be guessed.
    let draft = path.with_file_name(format!(".{:016x}.draft", RandomState::new().hash_one(0)));
    let file = OpenOptions::new().write(true).create_new(true).open(&draft)?;
    Ok((draft, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_and_no_draft_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for bytes in [&b"long old bytes"[..], b"new", b""] {
            write_atomically(&path, bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn what_cannot_be_replaced_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, file) = (folder.path().join("folder"), folder.path().join("file"));
        fs::create_dir(&inner).unwrap();
        fs::write(&file, b"old").unwrap();
        for path in [&inner, &folder.path().join("nowhere/a"), &file.join("a"), &PathBuf::new()] {
            assert!(matches!(write_atomically(path, b"new"), Err(Error::Io { .. })), "{path:?}");
        }
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["file", "folder"]);
        assert!(names(&inner).is_empty());
    }

    #[test]
    fn a_check_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, file) = (folder.path().join("folder"), folder.path().join("file"));
        fs::create_dir(&inner).unwrap();
        fs::write(&file, b"old").unwrap();
        assert!(check_writable(&file).is_ok() && check_writable(&inner.join("new")).is_ok());
        for path in
            [&inner, &folder.path().join("nowhere/a"), &file.join("a"), &inner.join("new/"), &PathBuf::new()]
        {
            assert!(check_writable(path).is_err(), "{path:?}");
        }
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["file", "folder"]);
        assert!(names(&inner).is_empty());
    }

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"\xff").unwrap();
        assert_eq!(read(&file).unwrap(), b"\xff");
        assert!(matches!(read_text(&file), Err(Error::File { .. })));
        assert!(matches!(read(folder.path()), Err(Error::File { .. })));
        assert!(matches!(read(&folder.path().join("nowhere")), Err(Error::Io { .. })));
        #[cfg(unix)]
        assert!(matches!(read(Path::new("/dev/null")), Err(Error::File { .. })));
    }

    #[test]
    fn the_start_of_a_text_ends_with_a_character() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "a\u{e9}\u{1f600}").unwrap();
        let start = |most: usize| read_text_start(&file, most).unwrap();
        for (most, text, more) in [
            (0, "", true),
            (1, "a", true),
            (2, "a", true),
            (3, "a\u{e9}", true),
            (6, "a\u{e9}", true),
            (7, "a\u{e9}\u{1f600}", false),
            (8, "a\u{e9}\u{1f600}", false),
        ] {
            assert_eq!(start(most), (text.to_owned(), more), "{most}");
        }
        for wrong in [&b"a\xff and more"[..], b"\xf0\x9f"] {
            fs::write(&file, wrong).unwrap();
            assert!(matches!(read_text_start(&file, 4), Err(Error::File { .. })));
        }
    }

    #[test]
    fn only_a_missing_file_does_not_exist() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        assert!(!exists(&file).unwrap());
        fs::write(&file, b"").unwrap();
        assert!(exists(&file).unwrap() && exists(folder.path()).unwrap());
        #[cfg(unix)]
        {
            let link = folder.path().join("link");
            std::os::unix::fs::symlink("nowhere", &link).unwrap();
            assert!(exists(&link).unwrap());
            assert!(matches!(exists(&file.join("inside")), Err(Error::Io { .. })));
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_permissions_stay_and_devices_are_not_replaced() {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("a"), folder.path().join("link"));
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        symlink("a", &link).unwrap();
        write_atomically(&link, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(names(folder.path()), ["a", "link"]);
        write_atomically(Path::new("/dev/null"), b"new").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    }

    #[test]
    fn concurrent_writers_never_tear_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let whole = |bytes: &[u8]| bytes.len() == 1 << 16 && bytes.iter().all(|&x| x == bytes[0]);
        write_atomically(&path, &[0; 1 << 16]).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let path = &path;
                scope
                    .spawn(move || (0..20).for_each(|_| write_atomically(path, &[writer; 1 << 16]).unwrap()));
            }
            for _ in 0..200 {
                assert!(whole(&fs::read(&path).unwrap()));
            }
        });
        assert_eq!(names(folder.path()), ["a"]);
    }
}
