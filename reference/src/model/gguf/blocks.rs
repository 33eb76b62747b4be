//! Decoding of ggml's types, plain and quantized in blocks.

use half::f16;

/// The block layout of a ggml type.
pub(super) struct Layout {
    block: usize, // elements per block
    size: usize,  // bytes per block
    unpack: Unpack,
}

/// Appends the elements of one block.
type Unpack = fn(&[u8], &mut Vec<f32>);

impl Layout {
    /// The layout of a ggml type.
    pub fn of(kind: u32) -> Result<Self, String> {
        let (block, size, unpack): (_, _, Unpack) = match kind {
            0 => (1, 4, |b, out| out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            1 => (1, 2, |b, out| out.push(half(b))),
            30 => (1, 2, |b, out| out.push(half::bf16::from_le_bytes([b[0], b[1]]).to_f32())),
            // Q4_0, Q4_1: the low nibbles are the first half of the block, the high nibbles the second.
            2 => (32, 18, |b, out| {
                let d = half(b);
                let nibbles = b[2..].iter().map(|x| x & 15).chain(b[2..].iter().map(|x| x >> 4));
                out.extend(nibbles.map(|q| (f32::from(q) - 8.0) * d));
            }),
            3 => (32, 20, |b, out| {
                let (d, m) = (half(b), half(&b[2..]));
                let nibbles = b[4..].iter().map(|x| x & 15).chain(b[4..].iter().map(|x| x >> 4));
                out.extend(nibbles.map(|q| f32::from(q) * d + m));
            }),
            8 => (32, 34, |b, out| {
                let d = half(b);
                out.extend(b[2..].iter().map(|&q| f32::from(q as i8) * d));
            }),
            _ => {
                return Err(format!(
                    "ggml type {kind} is not supported (only F32, F16, BF16, Q8_0, Q4_0, Q4_1)"
                ));
            }
        };
        Ok(Self { block, size, unpack })
    }

    /// Bytes of `n` elements.
    pub fn bytes(&self, n: usize) -> Result<usize, String> {
        if !n.is_multiple_of(self.block) {
            return Err(format!("{n} numbers are no whole number of blocks of {}", self.block));
        }
        (n / self.block).checked_mul(self.size).ok_or_else(|| "its size does not fit this machine".into())
    }

    /// Decodes whole blocks.
    pub fn unpack(&self, bytes: &[u8]) -> Result<Vec<f32>, String> {
        let mut out = vec![];
        out.try_reserve_exact(bytes.len() / self.size * self.block).map_err(|e| e.to_string())?;
        bytes.chunks_exact(self.size).for_each(|block| (self.unpack)(block, &mut out));
        Ok(out)
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_ggml() {
        let unpack = |kind: u32, bytes: &[u8]| Layout::of(kind).unwrap().unpack(bytes).unwrap();
        let d = f16::from_f32(0.5).to_le_bytes();
        let m = f16::from_f32(-1.0).to_le_bytes();
        let quants: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let q4_0 = unpack(2, &[&d[..], &quants].concat());
        assert_eq!((q4_0[0], q4_0[1], q4_0[16]), (-4.0, -3.5, 3.5));
        let q4_1 = unpack(3, &[&d[..], &m, &quants].concat());
        assert_eq!((q4_1[0], q4_1[2], q4_1[31]), (-1.0, 0.0, -1.0));
        assert_eq!(unpack(8, &[&d[..], &[254; 32]].concat()), [-1.0; 32]);
        assert_eq!(Layout::of(8).unwrap().bytes(32), Ok(34));
        assert!(Layout::of(8).unwrap().bytes(31).is_err());
        assert!(Layout::of(0).unwrap().bytes(usize::MAX).is_err());
        assert!(Layout::of(12).is_err());
    }
}
