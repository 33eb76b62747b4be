//! Bit packing of the baselines' codes.

/// Packs values of `nbits` bits each, least significant bit first, into the front of `bytes`.
///
/// Bits of a value above `nbits` must be zero. Values that do not fit into `bytes` are dropped; the last byte
/// is padded with zeros, and bytes after it are untouched.
///
/// # Panics
/// In debug builds, when `nbits` is above 24.
pub(crate) fn pack_bits(values: impl Iterator<Item = usize>, nbits: u32, bytes: &mut [u8]) {
    debug_assert!(nbits <= 24);
    let mut bits = 0_u32; // the lowest `held` bits are pending; held < 8 + 24
    let mut held = 0;
    let mut out = bytes.iter_mut();
    let mut emit = |byte: u32| {
        if let Some(slot) = out.next() {
            *slot = byte as u8;
        }
    };
    for value in values {
        bits |= (value as u32) << held;
        held += nbits;
        while held >= 8 {
            emit(bits);
            bits >>= 8;
            held -= 8;
        }
    }
    if held > 0 {
        emit(bits);
    }
}

/// Reads `n` values of `nbits` bits each, as [`pack_bits`] wrote them; zeros past the end of `bytes`.
///
/// # Panics
/// In debug builds, when `nbits` is above 24.
pub(crate) fn unpack_bits(bytes: &[u8], nbits: u32, n: usize) -> impl Iterator<Item = usize> + use<'_> {
    debug_assert!(nbits <= 24);
    let mut bits = 0_u32; // the lowest `held` bits are buffered
    let mut held = 0;
    let mut rest = bytes.iter();
    (0..n).map(move |_| {
        while held < nbits {
            bits |= u32::from(rest.next().copied().unwrap_or(0)) << held;
            held += 8;
        }
        let value = bits & ((1 << nbits) - 1);
        bits >>= nbits;
        held -= nbits;
        value as usize
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_round_trips() {
        for nbits in 1..=24 {
            for n in [0, 1, 2, 3, 7, 8, 9, 64] {
                let values: Vec<usize> = (0..n).map(|j| (j * 2_654_435_761) % (1 << nbits)).collect();
                let mut bytes = vec![0; (n * nbits as usize).div_ceil(8)];
                pack_bits(values.iter().copied(), nbits, &mut bytes);
                assert!(unpack_bits(&bytes, nbits, n).eq(values), "n {n} nbits {nbits}");
            }
        }
    }
}
