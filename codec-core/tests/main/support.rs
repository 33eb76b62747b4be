//! The backends of this machine, for all tests.

use codec_core::Backend;

pub fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}
