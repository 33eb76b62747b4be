//! A folder as an object store, of which only regular files are opened.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// A [`LocalFileSystem`] that refuses pipes and devices in the place of an object: opening a pipe may block
/// forever, and a device may never end.
#[derive(Debug)]
pub(crate) struct Folder(LocalFileSystem);

impl Folder {
    /// An existing folder, in which acknowledged writes are on the disk.
    pub fn open(path: &std::path::Path) -> Result<Self> {
        Ok(Self(LocalFileSystem::new_with_prefix(path)?.with_fsync(true)))
    }

    /// Refuses an object that is no regular file; one that is missing is left to the caller's request.
    async fn check(&self, location: &Path) -> Result<()> {
        let path = self.0.path_to_filesystem(location)?;
        let kind = tokio::task::spawn_blocking(move || fs::metadata(path).map(|file| file.file_type()));
        match kind.await? {
            Ok(kind) if !kind.is_file() && !kind.is_dir() => {
                Err(Error::NotSupported { source: "is a pipe or a device, not a regular file".into() })
            }
            _ => Ok(()),
        }
    }

    /// The pipes and devices below a path, which the inner store does not list: an object in whose place there
    /// is one would otherwise seem to be missing, and its frames an orphan.
    fn irregular(&self, prefix: &Path) -> Vec<ObjectMeta> {
        let Ok(folder) = self.0.path_to_filesystem(prefix) else { return vec![] };
        let (mut folders, mut found) = (vec![(folder, prefix.clone())], vec![]);
        while let Some((folder, prefix)) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let (Ok(name), Ok(kind)) = (entry.file_name().into_string(), entry.file_type()) else {
                    continue;
                };
                let location = prefix.clone().join(name);
                if kind.is_dir() {
                    folders.push((entry.path(), location)); // not through links, which may form a circle
                } else if let Ok(file) = fs::metadata(entry.path())
                    && !file.is_file()
                    && !file.is_dir()
                {
                    let last_modified = file.modified().unwrap_or(SystemTime::UNIX_EPOCH).into();
                    found.push(ObjectMeta { location, last_modified, size: 0, e_tag: None, version: None });
                }
            }
        }
        found
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Folder {
    async fn put_opts(&self, to: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.0.put_opts(to, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        to: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(to, options).await
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        self.check(from).await?;
        self.0.get_opts(from, options).await
    }

    async fn get_ranges(&self, from: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.check(from).await?;
        self.0.get_ranges(from, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let irregular = prefix.map_or(vec![], |prefix| self.irregular(prefix));
        stream::iter(irregular.into_iter().map(Ok)).chain(self.0.list(prefix)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.check(from).await?;
        self.0.copy_opts(from, to, options).await
    }
}
