//! Opening a store by its URL.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreScheme, parse_url_opts};
use url::Url;

use crate::folder::Folder;
use crate::profiles::PROFILES;
use crate::{ChunkId, Error, Orphan, Result, backend_text};

/// Opens the object store that a URL names, and the path in it.
///
/// A path without a scheme, or `file:///path`, is a folder, which is created if `create` is set;
/// `s3://bucket/path` is S3, with the settings of the environment (`AWS_ACCESS_KEY_ID`,
/// `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`); `memory:///` is this process's
/// memory. With other features of `object_store`, other schemes work as it documents them.
///
/// # Errors
/// [`Error::Url`], also for a folder or memory that does not exist if `create` is not set; [`Error::Feature`]
/// for S3 in a build without the feature `s3`.
pub fn open(url: &str, create: bool) -> Result<(Arc<dyn ObjectStore>, Path)> {
    open_with(url, create, &[])
}

/// As [`open`], with settings of the object store that take precedence over those of the environment, by the
/// same names, such as `aws_endpoint`.
///
/// # Errors
/// As there; [`Error::Url`] for an unknown setting of S3. A folder has none, and ignores them.
pub fn open_with(url: &str, create: bool, settings: &[(&str, &str)]) -> Result<(Arc<dyn ObjectStore>, Path)> {
    if let Some(path) = folder_of(url)? {
        return folder(&path, create);
    }
    let parsed = Url::parse(url).map_err(|e| Error::Url { url: url.to_owned(), what: e.to_string() })?;
    let bad = |what: String| Error::Url { url: shown(&parsed), what };
    let (scheme, path) = ObjectStoreScheme::parse(&parsed)
        .map_err(|_| bad("is neither a folder nor s3://BUCKET/PATH".into()))?;
    match scheme {
        ObjectStoreScheme::Memory if !create => Err(bad("the memory of this process holds no store".into())),
        ObjectStoreScheme::AmazonS3
            if parsed.scheme() == "s3" && parsed.host_str().is_none_or(str::is_empty) =>
        {
            Err(bad("names no bucket: s3://BUCKET/PATH is needed".into()))
        }
        ObjectStoreScheme::AmazonS3 => Ok((s3(&parsed, settings)?, path)),
        _ => {
            let given = settings.iter().map(|&(key, value)| (key.to_owned(), value.to_owned()));
            let opened = parse_url_opts(&parsed, std::env::vars().chain(given).map(lower));
            let refused = |e| bad(format!("{}: pass a folder or s3://BUCKET/PATH", backend_text::cause(&e)));
            let (store, path) = opened.map_err(refused)?;
            Ok((store.into(), path))
        }
    }
}

#[cfg(feature = "s3")]
fn s3(url: &Url, settings: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>> {
    use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
    use object_store::{ClientConfigKey, RetryConfig};

    // The first call decides; an embedder may have chosen before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let bad = |e: &object_store::Error| Error::Url { url: shown(url), what: backend_text::cause(e) };
    let mut builder = AmazonS3Builder::from_env().with_url(url.as_str());
    for (key, value) in settings {
        let key: AmazonS3ConfigKey = key.parse().map_err(|e| bad(&e))?;
        builder = builder.with_config(key, *value);
    }
    // A request's limit depends on its bytes, which the client does not know.
    let builder = builder
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
        .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), "1 day")
        .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout), "5 seconds");
    match builder.build() {
        Ok(store) => Ok(Arc::new(store)),
        Err(e) => Err(bad(&e)),
    }
}

#[cfg(not(feature = "s3"))]
fn s3(url: &Url, _: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>> {
    Err(Error::Feature { url: shown(url), feature: "s3" })
}

/// The folder that a URL names, if it is one.
///
/// # Errors
/// [`Error::Url`] for a malformed URL, a `file:` URL that is no path of this system, and a file;
/// [`Error::Argument`] for no URL.
pub fn folder_of(url: &str) -> Result<Option<PathBuf>> {
    if url.is_empty() {
        return Err(Error::Argument("the URL of a store is empty: pass a folder or s3://BUCKET/PATH"));
    }
    let bad = |what: &str| Error::Url { url: url.to_owned(), what: what.into() };
    let path = match (Url::parse(url), url.split_once("://")) {
        // A mistyped URL is not a folder to create.
        (Err(e), Some((scheme, rest))) => {
            let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest); // no password
            return Err(Error::Url { url: format!("{scheme}://{rest}"), what: format!("is no URL: {e}") });
        }
        (Err(_), None) => url.into(),
        (Ok(parsed), _) if parsed.scheme() == "file" => {
            parsed.to_file_path().map_err(|()| bad("is no path of this system"))?
        }
        (Ok(_), _) => return Ok(None),
    };
    match path.exists() && !path.is_dir() {
        true => Err(bad("is a file, not a folder")),
        false => Ok(Some(path)),
    }
}

/// Makes the folder that a URL names and checks that it can be written to, before there is something to
/// write. Other stores are not asked.
///
/// # Errors
/// [`Error::Url`] with what the system said.
pub fn check_writable(url: &str) -> Result<()> {
    let Some(path) = folder_of(url)? else { return Ok(()) };
    create_folder(&path)?;
    tempfile::tempfile_in(&path).map(drop).map_err(|e| Error::Url {
        url: path.display().to_string(),
        what: format!("cannot be written to: {e}"),
    })
}

fn create_folder(path: &std::path::Path) -> Result<()> {
    fs::create_dir_all(path)
        .map_err(|e| Error::Url { url: path.display().to_string(), what: format!("cannot be created: {e}") })
}

fn folder(path: &std::path::Path, create: bool) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let bad = |what: String| Error::Url { url: path.display().to_string(), what };
    if create {
        create_folder(path)?;
    } else {
        fs::metadata(path).map_err(|e| match e.kind() {
            ErrorKind::NotFound => bad("there is no such folder".into()),
            _ => bad(e.to_string()),
        })?;
    }
    let store = Folder::open(path).map_err(|e| bad(backend_text::cause(&e)))?;
    Ok((Arc::new(store), Path::default()))
}

/// The files of interrupted writes to a folder, of a writer at work or of one that has died. Listings of the
/// store do not show them. Other stores have none.
///
/// Files and folders that cannot be read are skipped, as are those that are not the store's.
///
/// # Errors
/// [`Error::Url`] as [`folder_of`].
pub fn unfinished(url: &str) -> Result<Vec<Orphan>> {
    let Some(root) = folder_of(url)? else { return Ok(vec![]) };
    let is_own = |name: &String| name == PROFILES || name.parse::<ChunkId>().is_ok();
    let mut paths: Vec<String> = names(&root).filter(is_own).collect();
    let mut found = vec![];
    while let Some(path) = paths.pop() {
        let file = root.join(&path);
        let Ok(metadata) = fs::symlink_metadata(&file) else { continue };
        if metadata.is_dir() {
            paths.extend(names(&file).map(|name| format!("{path}/{name}")));
        // `object_store` writes NAME to NAME#NUMBER and renames it.
        } else if path.rsplit_once('#').is_some_and(|(_, number)| number.parse::<u64>().is_ok())
            && let (Ok(path), Ok(written)) = (Path::parse(&path), metadata.modified())
        {
            found.push(Orphan { path, bytes: metadata.len(), written });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// The names in a folder; none if it cannot be read.
fn names(folder: &std::path::Path) -> impl Iterator<Item = String> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

/// Deletes those files of [`unfinished`] that are older than `age`, which must exceed the time of any write
/// of an object. Returns their number.
///
/// # Errors
/// [`Error::Url`] with the system's error.
pub fn sweep_unfinished(url: &str, files: &[Orphan], age: Duration) -> Result<usize> {
    let Some(root) = folder_of(url)? else { return Ok(0) };
    let mut n = 0;
    for file in files.iter().filter(|file| file.is_older(age)) {
        let path = root.join(file.path());
        match fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(Error::Url { url: path.display().to_string(), what: e.to_string() });
            }
            _ => n += 1,
        }
    }
    Ok(n)
}

fn lower((key, value): (String, String)) -> (String, String) {
    (key.to_ascii_lowercase(), value)
}

/// A URL without user and password.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    // URLs that cannot have either return an error.
    let _ = (url.set_username(""), url.set_password(None));
    url.to_string()
}
