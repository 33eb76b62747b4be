//! Codec profiles in the store. Calibration on another machine differs in the last bits, and chunks of
//! another profile have other names: users of a store take the profile that it holds.
//!
//! | bytes | field |
//! | --- | --- |
//! | 4 | `KVSP` |
//! | 4 | version, 2 |
//! | 32 | name of the profile, which stands for the model, the levels and the calibration text |
//! | 32 | SHA-256 of all other bytes |
//! | rest | the profile, as `codec-core` writes it |
//!
//! The name is inside the object, so that another model's profile in its place is not believed.

use std::sync::atomic::AtomicU64;

use codec_core::Profile;
use object_store::PutMode;
use object_store::path::Path;
use sha2::{Digest as _, Sha256};

use crate::manifest::digest;
use crate::{AsyncStore, Error, ProfileId, Result};

/// The folder of the profiles.
pub(crate) const PROFILES: &str = "profiles";
/// Maximum bytes of a stored profile.
const MAX_PROFILE: u64 = 1 << 30;
/// The bytes before the name. Version 1 had none, nor the name.
const MAGIC: [u8; 8] = *b"KVSP\x02\0\0\0";
/// Bytes before the digest.
const NAMED: usize = 40;
/// Bytes before those of the profile.
const HEAD: usize = NAMED + 32;

/// The bytes before those of a profile.
fn head(id: ProfileId, profile: &[u8]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&MAGIC);
    head[8..NAMED].copy_from_slice(&id.0);
    let digest = Sha256::new().chain_update(&head[..NAMED]).chain_update(profile).finalize();
    head[NAMED..].copy_from_slice(&digest);
    head
}

/// Whether an object is a profile as version 1 of the format had it: after its digest, without its name.
fn is_of_version_1(object: &[u8]) -> bool {
    object.split_at_checked(32).is_some_and(|(expected, profile)| digest(profile) == expected)
}

/// The name and the bytes of the profile in an object whose digest is right.
fn parse(object: &[u8]) -> Option<(ProfileId, &[u8])> {
    let (found, profile) = object.split_first_chunk::<HEAD>()?;
    let mut id = [0; 32];
    id.copy_from_slice(&found[8..NAMED]);
    (head(ProfileId(id), profile) == *found).then_some((ProfileId(id), profile))
}

impl ProfileId {
    /// The name of the profile of a model's levels, calibrated by `recipe` on `tokens`.
    #[must_use]
    pub fn new(model: &str, recipe: &str, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"kv-store-profile-2");
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
    /// [`Error::Object`] for one of another name in its place, or of another version of the store's format;
    /// [`Error::TooLong`] for more than a gibibyte; [`Error::Codec`] for bytes that were written as a profile
    /// and are not one, or one of another version.
    pub async fn profile(&self, id: ProfileId) -> Result<Option<Profile>> {
        let path = self.profile_path(id);
        let Some(len) = self.remote().size(&path).await? else { return Ok(None) };
        if len > MAX_PROFILE {
            return Err(Error::TooLong { path: path.to_string(), actual: len, limit: MAX_PROFILE });
        }
        let wrong = |what| Err(Error::Object { path: path.to_string(), what });
        let range = 0..len.max(HEAD as u64); // a shorter one is damaged
        let is_old = |bytes: &[u8]| !bytes.starts_with(&MAGIC) && is_of_version_1(bytes);
        let verified = |bytes: &[u8]| parse(bytes).is_some() || is_old(bytes);
        let bytes = self.remote().get_range(&path, &range, &AtomicU64::new(0), verified).await?;
        match parse(&bytes) {
            None => wrong("is a profile of version 1 of the format, which is not read"),
            Some((found, _)) if found != id => wrong("is the profile of another model or of other levels"),
            Some((_, profile)) => Ok(Some(Profile::from_bytes(profile)?)),
        }
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
    /// As [`Self::profile`], except for damage; [`Error::NoConditions`] and [`Error::NotKept`].
    pub async fn put_profile(&self, id: ProfileId, profile: &Profile) -> Result<Profile> {
        let bytes = profile.to_bytes();
        let object = bytes::Bytes::from([&head(id, &bytes)[..], &bytes].concat());
        let path = self.profile_path(id);
        if !self.remote().put(&path, object.clone(), PutMode::Create).await? {
            match self.profile(id).await {
                Ok(Some(stored)) => return Ok(stored),
                Err(e) if !e.is_torn() => return Err(e),
                _ => self.remote().put(&path, object, PutMode::Overwrite).await?,
            };
        }
        self.remote().kept(&path, || self.profile(id)).await
    }
}
