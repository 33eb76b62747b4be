//! The interleaved rANS coder on its own, for callers with their own symbols and models.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::error::check_len;
use crate::model::tables::{LANES, Row, TileTables};
use crate::{Backend, Error, Models, rans};

/// Encodes rows of up to 32 channels with interleaved rANS and appends the stream to `out`.
///
/// # Shapes
/// `rows` (n): each row has one code for every channel of `models`, `symbol << low_bits | low`, or
/// [`ESCAPE`](crate::ESCAPE). Codes from a channel's escape on are encoded as escapes. Codes after the last
/// channel are ignored.
/// # Errors
/// [`Error::Length`] for no channels or more than 32; `out` is then unchanged.
#[cfg(feature = "alloc")]
pub fn encode_symbols(models: &Models<'_>, rows: &[Row], out: &mut Vec<u8>) -> Result<(), Error> {
    encode_symbols_with(Backend::detect(), models, rows, out)
}

/// [`encode_symbols`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
#[cfg(feature = "alloc")]
pub fn encode_symbols_with(
    backend: Backend,
    models: &Models<'_>,
    rows: &[Row],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    backend.check()?;
    check_lanes(models)?;
    match models.contexts() {
        1 => rans::encode(&TileTables::<1>::new(models, 0, models.channels()), backend, rows, out),
        _ => rans::encode(&TileTables::<3>::new(models, 0, models.channels()), backend, rows, out),
    }
    Ok(())
}

/// Decodes a stream of [`encode_symbols`](crate::encode_symbols). Codes after the last channel are zero.
///
/// # Errors
/// [`Error::Length`] for no channels or more than 32; [`Error::Truncated`], [`Error::TrailingBytes`] or
/// [`Error::Corrupt`] for bytes that are not a stream of `rows.len()` rows: the contents of `rows` are then
/// unspecified.
/// # Cost
/// No allocation.
pub fn decode_symbols_into(models: &Models<'_>, bytes: &[u8], rows: &mut [Row]) -> Result<(), Error> {
    decode_symbols_into_with(Backend::detect(), models, bytes, rows)
}

/// [`decode_symbols_into`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
pub fn decode_symbols_into_with(
    backend: Backend,
    models: &Models<'_>,
    bytes: &[u8],
    rows: &mut [Row],
) -> Result<(), Error> {
    backend.check()?;
    check_lanes(models)?;
    match models.contexts() {
        1 => decode(&TileTables::<1>::new(models, 0, models.channels()), backend, bytes, rows),
        _ => decode(&TileTables::<3>::new(models, 0, models.channels()), backend, bytes, rows),
    }
}

fn decode<const C: usize>(
    tables: &TileTables<C>,
    backend: Backend,
    bytes: &[u8],
    rows: &mut [Row],
) -> Result<(), Error> {
    let mut decoder = rans::Decoder::new(tables, backend, rows.len(), bytes)?;
    decoder.decode(rows)?;
    decoder.finish()
}

fn check_lanes(models: &Models<'_>) -> Result<(), Error> {
    if (1..=LANES).contains(&models.channels()) {
        Ok(())
    } else {
        check_len("models", models.channels(), LANES)
    }
}
