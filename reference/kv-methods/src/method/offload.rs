//! Settings of methods that offload exact rows.

use std::convert::Infallible;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

#[cfg(feature = "cuda")]
use kv_device::plan::RowHome;
use pq_core::Eviction;

use super::kind::BuildContext;
#[cfg(feature = "cuda")]
use super::on_device::Limit;
use super::settings::{Settings, words};
use crate::cache::{BlockRule, Offload, OffloadedRows, RowFormat};
use crate::{Error, Result};

/// The settings' lines in a method's help.
macro_rules! offload_help {
    () => {
        concat!(
            "                      exact rows are counted as offloaded, or are in      offloaded=exact|int8\n",
            "                      files in a folder with a block cache in memory      ",
            "offload=FOLDER cache=4096 block=128\n",
            "                                                                          k-cache=32 evict=lfu|lru\n",
            "                      on a GPU: rows of each head that stay there         held=4096\n",
        )
    };
}
pub(super) use offload_help;

/// Format and location of offloaded rows.
#[derive(Clone, Debug)]
pub(super) struct OffloadSettings {
    format: Format,
    offload: Option<Offload>,
    held: Option<usize>, // rows per head resident on a device
}

/// Default rows per head resident on a device.
#[cfg(feature = "cuda")]
const DEFAULT_HELD: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// The element type of sinks and window.
    Exact,
    /// 8 bits per component, including a scale per 16 components.
    Int8,
}
words!(Format, "exact" => Format::Exact, "int8" => Format::Int8);
words!(Evict, "lfu" => Evict::LeastFrequentlyUsed, "lru" => Evict::LeastRecentlyUsed);

/// The memory that holds the exact rows for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Host,
    Device,
}
words!(Home, "host" => Home::Host, "device" => Home::Device);

#[derive(Clone, Copy, PartialEq)]
enum Evict {
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
}

/// A folder; the empty path is invalid.
struct Folder(PathBuf);

impl FromStr for Folder {
    type Err = String;

    fn from_str(path: &str) -> std::result::Result<Self, String> {
        match path.parse() {
            Ok(path) if path != PathBuf::new() => Ok(Self(path)),
            Ok(_) => Err("must name a folder".into()),
            Err::<_, Infallible>(e) => match e {},
        }
    }
}

impl Display for Folder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.display().fmt(f)
    }
}

impl OffloadSettings {
    /// Exact rows in memory.
    pub const NONE: Self = Self { format: Format::Exact, offload: None, held: None };

    /// Takes the settings; those of a block cache require rows in files.
    pub fn take(s: &mut Settings<'_>) -> Result<Self> {
        let format = s.common("offloaded", Format::Exact)?;
        let held = s.given_tokens("held")?;
        let Folder(folder) = s.common("offload", Folder(PathBuf::new()))?;
        if folder.as_os_str().is_empty() {
            s.need(&["cache", "block", "k-cache", "evict"], "offload=FOLDER")?;
            return Ok(Self { format, offload: None, held });
        }
        let blocks = BlockRule {
            capacity: s.tokens("cache", 4096)?,
            block_len: s.common_count("block", 128)?,
            k_cache: s.count("k-cache", 32)?,
            eviction: match s.common("evict", Evict::LeastFrequentlyUsed)? {
                Evict::LeastFrequentlyUsed => Eviction::LeastFrequentlyUsed,
                Evict::LeastRecentlyUsed => Eviction::LeastRecentlyUsed,
            },
        };
        Ok(Self { format, offload: Some(Offload { folder, blocks }), held })
    }

    /// Checks that files can be created in the folder, before the long work.
    pub fn check(&self) -> Result<()> {
        let Some(Offload { folder, .. }) = &self.offload else { return Ok(()) };
        let refused = |e| {
            Error::Argument(format!("offload={}: {e}; it must be a folder that exists", folder.display()))
        };
        tempfile::tempfile_in(folder).map(drop).map_err(refused)
    }

    /// A setting that was given but only affects a device.
    pub fn device_setting(&self) -> Option<&'static str> {
        self.held.map(|_| "held")
    }

    /// Rows per head that stay resident on a device, if a step selects fewer.
    #[cfg(feature = "cuda")]
    pub fn held(&self) -> usize {
        self.held.unwrap_or(DEFAULT_HELD)
    }

    /// A device has no rows in files.
    #[cfg(feature = "cuda")]
    pub fn limit_of_files(&self) -> Limit {
        Limit::new(self.offload.is_some(), "offload=.", "a device reads rows from memory", "no offload=")
    }

    /// What rows in the device's memory exclude.
    #[cfg(feature = "cuda")]
    pub fn limits_of_home(&self, home: Home) -> [Limit; 2] {
        let on_device = home == Home::Device;
        [
            Limit::new(
                on_device && self.held.is_some(),
                "rows-on=device:held=64",
                "`held` has no effect on rows that are all on the device",
                "no held=",
            ),
            Limit::new(
                on_device && self.format == Format::Int8,
                "rows-on=device:offloaded=int8",
                "offloaded=int8 is for rows in host memory",
                "rows-on=host",
            ),
        ]
    }

    /// Location of the rows for a device.
    #[cfg(feature = "cuda")]
    pub fn home(&self, home: Home) -> RowHome {
        match (home, self.format) {
            (Home::Device, _) => RowHome::Device,
            (Home::Host, Format::Exact) => RowHome::Host,
            (Home::Host, Format::Int8) => RowHome::HostInt8,
        }
    }

    /// Empty storage for the rows of one layer.
    pub fn rows(&self, context: &BuildContext<'_>) -> Result<OffloadedRows> {
        let format = match self.format {
            Format::Exact => RowFormat::Exact(context.exact),
            Format::Int8 => RowFormat::Int8,
        };
        OffloadedRows::new(context.geometry, format, self.offload.as_ref(), context.model_rope.len())
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn a_device_finds_rows_where_it_can() {
        let home = |format, home| OffloadSettings { format, ..OffloadSettings::NONE }.home(home);
        assert_eq!(home(Format::Exact, Home::Device), RowHome::Device);
        assert_eq!(home(Format::Exact, Home::Host), RowHome::Host);
        assert_eq!(home(Format::Int8, Home::Host), RowHome::HostInt8);
        let held = OffloadSettings { held: Some(64), ..OffloadSettings::NONE };
        assert_eq!((held.held(), OffloadSettings::NONE.held()), (64, DEFAULT_HELD));
    }
}
