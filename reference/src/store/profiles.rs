//! Codec profiles in the store. Calibration on another machine differs in the last bits, and chunks of
//! another profile have other names: users of a store take the profile that it holds.

use std::sync::atomic::AtomicU64;

use codec_core::Profile;
use object_store::PutMode;
use object_store::path::Path;
use sha2::{Digest as _, Sha256};

use super::manifest::digest;
use super::{AsyncStore, Error, ProfileId, Result};

/// The folder of the profiles.
pub(super) const PROFILES: &str = "profiles";
/// Maximum bytes of a stored profile.
const MAX_PROFILE: u64 = 1 << 30;
/// Bytes of the digest before those of the profile.
const DIGEST: usize = 32;

impl ProfileId {
    /// The name of the profile of a model's levels, calibrated by `recipe` on `tokens`.
    #[must_use]
    pub fn new(model: &str, recipe: &str, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"kv-store-profile-1");
        for text in [model, recipe] {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        Self(hash.finalize().into())
    }
}

impl AsyncStore {
    fn profile_path(&self, id: ProfileId) -> Path {
        self.remote().path([PROFILES, &id.to_string()])
    }

    /// The stored profile of this name.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`]; [`Error::Digest`] and [`Error::Length`] for a damaged one;
    /// [`Error::TooLong`] for more than a gibibyte; [`Error::Codec`] for bytes that were written as a profile
    /// and are not one, or one of another version.
    pub async fn profile(&self, id: ProfileId) -> Result<Option<Profile>> {
        let path = self.profile_path(id);
        let Some(len) = self.remote().size(&path).await? else { return Ok(None) };
        if len > MAX_PROFILE {
            return Err(Error::TooLong { path: path.to_string(), actual: len, limit: MAX_PROFILE });
        }
        let verified = |bytes: &[u8]| {
            bytes.split_at_checked(DIGEST).is_some_and(|(expected, profile)| digest(profile) == expected)
        };
        let range = 0..len.max(DIGEST as u64); // a shorter one is damaged
        let bytes = self.remote().get_range(&path, &range, &AtomicU64::new(0), verified).await?;
        Ok(Some(Profile::from_bytes(&bytes[DIGEST..])?))
    }

    /// The stored profiles that are damaged or cannot be read, with the reason.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`] if they cannot be listed or the store is gone;
    /// [`Error::Limit`] for more than a million profiles.
    pub async fn faulty_profiles(&self) -> Result<Vec<(ProfileId, Error)>> {
        let mut faulty = vec![];
        for meta in self.remote().list(&self.remote().path([PROFILES]), 1 << 20).await? {
            let id: Option<ProfileId> = meta.location.filename().and_then(|name| name.parse().ok());
            let Some(id) = id else { continue };
            match self.profile(id).await {
                Ok(_) => {}
                Err(e) if e.is_damage() => faulty.push((id, e)),
                Err(e) => faulty.push((id, self.isolate(e).await?)),
            }
        }
        Ok(faulty)
    }

    /// Stores a profile unless an undamaged one is stored, and returns the stored one: another writer may
    /// have been first.
    ///
    /// # Errors
    /// As [`Self::profile`], except for damage.
    pub async fn put_profile(&self, id: ProfileId, profile: Profile) -> Result<Profile> {
        let bytes = profile.to_bytes();
        let object = bytes::Bytes::from([&digest(&bytes)[..], &bytes].concat());
        let path = self.profile_path(id);
        if self.remote().put(&path, object.clone(), PutMode::Create).await? {
            return Ok(profile);
        }
        match self.profile(id).await {
            Ok(Some(stored)) => Ok(stored),
            Err(e) if !e.is_torn() => Err(e),
            _ => self.remote().put(&path, object, PutMode::Overwrite).await.map(|_| profile),
        }
    }
}
