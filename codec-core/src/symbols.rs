//! The lane coder by itself, for who brings codes and models of their own.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::error::check_len;
use crate::model::tables::{LANES, Row, TileTables};
use crate::{Backend, Error, Models, rans};

/// Codes rows of up to 32 channels with interleaved range-ANS and appends the stream to `out`.
///
/// # Shapes
/// `rows` (n): in each row one code of every channel of `models`, `symbol << low_bits | low`, or [`ESCAPE`](crate::ESCAPE) for
/// what the channel's alphabet lacks; codes from a channel's escape on are coded as escapes. Numbers behind the last channel
/// are ignored.
/// # Errors
/// [`Error::Length`] for no channels or more than 32, [`Error::BackendUnavailable`].
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

/// Decodes what [`encode_symbols`] wrote. Numbers behind the last channel are zero.
///
/// # Errors
/// [`Error::Length`] as there; [`Error::Truncated`], [`Error::TrailingBytes`] or [`Error::Corrupt`] for bytes that no encoder
/// wrote for as many rows: `rows` then holds codes of unknown worth. [`Error::BackendUnavailable`].
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
