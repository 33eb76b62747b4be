//! Machine code of kernels between runs of a process.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::Error;

/// Compiled kernels in a folder that only this user can write.
///
/// A file holds the key (everything that determines the machine code), the machine code, and a trailer with
/// the length and the CRC-32 of both. The whole key is compared, so a hash collision or a truncated, damaged
/// or foreign file never yields a wrong kernel. The folder has to be private, since its contents run on the
/// device.
pub(crate) struct DiskCache {
    folder: PathBuf,
}

const TRAILER: usize = 8 + 4;

impl DiskCache {
    /// Creates the folder if it does not exist.
    ///
    /// # Errors
    /// [`Error::CacheFolder`] if it cannot be created, or if another user owns or can write it.
    pub(crate) fn open(folder: PathBuf) -> Result<Self, Error> {
        match create_private(&folder).and_then(|()| writable_by_others(&folder)) {
            Ok(None) => Ok(Self { folder }),
            Ok(Some(problem)) => Err(Error::CacheFolder { folder, problem: problem.into() }),
            Err(error) => Err(Error::CacheFolder { folder, problem: error.to_string() }),
        }
    }

    fn path(&self, name: &str, key: &[u8]) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        self.folder.join(format!("{name}-{:016x}.kernel", hasher.finish()))
    }

    /// The machine code of `key`, if the folder has an intact file of it. Links are not followed.
    pub(crate) fn get(&self, name: &str, key: &[u8]) -> Option<Vec<u8>> {
        let path = self.path(name, key);
        if !fs::symlink_metadata(&path).ok()?.is_file() {
            return None;
        }
        let bytes = fs::read(path).ok()?;
        let (kept, trailer) = bytes.split_at_checked(bytes.len().checked_sub(TRAILER)?)?;
        let cubin = kept.strip_prefix(key)?;
        (trailer == trailer_of(kept) && !cubin.is_empty()).then(|| cubin.to_vec())
    }

    /// Stores machine code. A failure is not an error: the kernel is compiled again the next time.
    pub(crate) fn put(&self, name: &str, key: &[u8], cubin: &[u8]) {
        let kept = [key, cubin].concat();
        let write = || -> io::Result<()> {
            // Writes to a new file of random name, which is synced before it is renamed: the file appears
            // whole or not at all, despite concurrent writers and crashes.
            let mut draft = tempfile::NamedTempFile::new_in(&self.folder)?;
            draft.write_all(&kept)?;
            draft.write_all(&trailer_of(&kept))?;
            draft.as_file().sync_all()?;
            draft.persist(self.path(name, key))?;
            Ok(())
        };
        let _ = write();
    }
}

fn trailer_of(kept: &[u8]) -> [u8; TRAILER] {
    let mut trailer = [0; TRAILER];
    trailer[..8].copy_from_slice(&(kept.len() as u64).to_le_bytes());
    trailer[8..].copy_from_slice(&crc32fast::hash(kept).to_le_bytes());
    trailer
}

fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// The reason why other users could write files to the folder, or `None`.
#[cfg(unix)]
fn writable_by_others(folder: &Path) -> io::Result<Option<&'static str>> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(folder)?;
    let this_user = rustix::process::geteuid().as_raw();
    Ok(if metadata.uid() != this_user && metadata.uid() != 0 {
        Some("it belongs to another user, who could put machine code there")
    } else if metadata.mode() & 0o022 != 0 {
        Some("other users can write it, and could put machine code there: chmod go-w")
    } else {
        None
    })
}

#[cfg(not(unix))]
fn writable_by_others(_: &Path) -> io::Result<Option<&'static str>> {
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &[u8] = b"options and text\0";

    fn cache() -> (tempfile::TempDir, DiskCache) {
        let parent = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(parent.path().join("kernels")).unwrap();
        (parent, cache)
    }

    fn cubin() -> Vec<u8> {
        (0..500_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn cut_or_damaged_files_are_not_kernels() {
        let (_parent, cache) = cache();
        cache.put("kernel", KEY, &cubin());
        assert_eq!(cache.get("kernel", KEY), Some(cubin()));
        assert_eq!(cache.get("kernel", b"options and other text\0"), None);
        let path = cache.path("kernel", KEY);
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(cache.get("kernel", KEY), None, "cut to {len} bytes");
        }
        for at in 0..whole.len() {
            let mut turned = whole.clone();
            turned[at] ^= 1 << (at % 8);
            fs::write(&path, &turned).unwrap();
            assert_eq!(cache.get("kernel", KEY), None, "bit turned in byte {at}");
        }
        fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
        assert_eq!(cache.get("kernel", KEY), None, "a byte behind the end");
        cache.put("kernel", KEY, &cubin());
        assert_eq!(cache.get("kernel", KEY), Some(cubin()), "and it is replaced");
    }

    #[test]
    fn writers_at_once_leave_whole_files() {
        let (_parent, cache) = cache();
        let of_writer = |writer: u8| vec![writer; 40_000 + usize::from(writer)];
        std::thread::scope(|scope| {
            for writer in 1..=4 {
                let cache = &cache;
                scope.spawn(move || (0..100).for_each(|_| cache.put("kernel", KEY, &of_writer(writer))));
            }
            for _ in 0..500 {
                let Some(read) = cache.get("kernel", KEY) else { continue };
                assert!(read == of_writer(read[0]));
            }
        });
        let files = fs::read_dir(&cache.folder).unwrap().count();
        assert_eq!(files, 1, "drafts are removed");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_not_followed_and_folders_of_others_are_refused() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let (parent, cache) = cache();
        let victim = parent.path().join("victim");
        fs::write(&victim, b"precious").unwrap();
        symlink(&victim, cache.path("kernel", KEY)).unwrap();
        cache.put("kernel", KEY, &cubin());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        fs::rename(cache.path("kernel", KEY), &victim).unwrap();
        symlink(&victim, cache.path("kernel", KEY)).unwrap();
        assert_eq!(cache.get("kernel", KEY), None, "a link to a good file");

        let mode = |folder: &Path| fs::metadata(folder).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&cache.folder), 0o700);
        fs::set_permissions(&cache.folder, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = DiskCache::open(cache.folder.clone());
        assert!(matches!(refused.err(), Some(Error::CacheFolder { .. })));
        let occupied = DiskCache::open(victim);
        assert!(matches!(occupied.err(), Some(Error::CacheFolder { .. })), "a file");
    }
}
