//! Opening a store by its URL.

use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreScheme, RetryConfig, parse_url_opts};
use url::Url;

use super::{Error, Result};

/// Opens the object store that a URL names, and the path in it.
///
/// A path without a scheme, or `file:///path`, is a folder, which is made; `s3://bucket/path` is S3, with the
/// settings of the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`,
/// `AWS_ALLOW_HTTP`); `memory:///` is this process's memory. With other features of `object_store`, other
/// schemes work as it documents them.
///
/// # Errors
/// [`Error::Url`].
pub fn open(url: &str) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let Ok(parsed) = Url::parse(url) else { return folder(url) };
    let bad = |what: String| Error::Url { url: shown(&parsed), what };
    let failed = |e: object_store::Error| bad(e.to_string());
    let (scheme, path) = ObjectStoreScheme::parse(&parsed).map_err(|e| bad(e.to_string()))?;
    match scheme {
        ObjectStoreScheme::Local => {
            folder(&parsed.to_file_path().map_err(|()| bad("is no path of this system".into()))?)
        }
        ObjectStoreScheme::AmazonS3 => {
            // The first call decides; an embedder may have chosen before.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let builder = AmazonS3Builder::from_env().with_url(parsed.as_str());
            // A request's limit depends on its bytes, which the client does not know.
            let builder = builder
                .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
                .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), "1 day")
                .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout), "5 seconds");
            Ok((Arc::new(builder.build().map_err(failed)?), path))
        }
        _ => {
            let (store, path) = parse_url_opts(&parsed, std::env::vars().map(lower)).map_err(failed)?;
            Ok((store.into(), path))
        }
    }
}

/// A folder, which is made if it is not there.
fn folder(path: impl AsRef<std::path::Path>) -> Result<(Arc<dyn ObjectStore>, Path)> {
    let path = path.as_ref();
    let bad = |what: String| Error::Url { url: path.display().to_string(), what };
    std::fs::create_dir_all(path).map_err(|e| bad(e.to_string()))?;
    // What was acknowledged is on the disk.
    let store = LocalFileSystem::new_with_prefix(path).map_err(|e| bad(e.to_string()))?.with_fsync(true);
    Ok((Arc::new(store), Path::default()))
}

fn lower((key, value): (String, String)) -> (String, String) {
    (key.to_ascii_lowercase(), value)
}

/// A URL without user and password.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    // URLs that cannot have either refuse.
    let _ = (url.set_username(""), url.set_password(None));
    url.to_string()
}
