//! Hashed numbers in place of data, to time steps without a model, a profile or a prompt.

use bytemuck::Pod;
use kv_attend::owner::{Pair, Side};
use kv_gpu::{DevicePtr, Element, Grid, Program};
use pq_core::{CodebookBuf, PqShape};

use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;

/// The first hashed tensor of rows; a layer adds 2 l for keys, 2 l + 1 for values. Those of a model come
/// before.
pub(crate) const RANDOM_ROWS: u32 = 1 << 16;

/// The first hashed tensor of codes, or of codebooks, of a layer's keys; the next one is for values.
pub(crate) const RANDOM_CODES: u32 = 2 << 16;
pub(crate) const RANDOM_BOOKS: u32 = 3 << 16;

/// The hashed tensor of the key maps; the next two are those of queries and values.
pub(crate) const RANDOM_MAPS: u32 = 5 << 16;

/// The hashed tensor of the maps of scalar codes.
pub(crate) const RANDOM_SCALAR_MAPS: u32 = 7 << 16;

/// The hashed tensor of the means of keys.
pub(crate) const RANDOM_MEANS: u32 = 6 << 16;

/// Element `i` of hashed tensor `tensor`, before it is rounded: `hashed` of `random.cuh`, a header of
/// `kv-gpu`.
///
/// Tensors up to 65,535 are the caller's.
#[must_use]
pub fn hashed(tensor: u32, i: u64, amplitude: f32) -> f32 {
    let mix = |mut x: u32| {
        x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
        x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
        x ^ x >> 16
    };
    ((mix(i as u32 ^ mix(tensor)) >> 8) as f32 * (-23.0_f32).exp2() - 1.0) * amplitude
}

/// `fill` and `fill_words`.
pub(crate) fn program(element: Element) -> Program {
    Program::own("fill.cu", include_str!("kernels/fill.cu"), &[], &[("ELEMENT", element as usize)])
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FillArguments {
    out: DevicePtr<u16>,
    n: u64,
    tensor: u32,
    amplitude: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FillWordsArguments {
    out: DevicePtr<u32>,
    n: u64,
    tensor: u32,
}

const _: () = assert!(size_of::<FillArguments>() == 24 && size_of::<FillWordsArguments>() == 24);

/// Fills a buffer with the elements of a [`hashed`] tensor, in stream order.
///
/// # Errors
/// [`Error::Gpu`](crate::Error::Gpu).
pub fn fill_hashed(
    gpu: &Gpu,
    element: Element,
    out: &Buffer<u16>,
    tensor: u32,
    amplitude: f32,
) -> Result<()> {
    fill(gpu, element, (out.pointer(), out.len()), tensor, amplitude)
}

/// Fills `n` rows' elements with hashed ones of variance 1.
pub(crate) fn fill_rows(
    gpu: &Gpu,
    element: Element,
    out: DevicePtr<u16>,
    n: usize,
    tensor: u32,
) -> Result<()> {
    fill(gpu, element, (out, n), tensor, 3.0_f32.sqrt())
}

fn fill(
    gpu: &Gpu,
    element: Element,
    (out, n): (DevicePtr<u16>, usize),
    tensor: u32,
    amplitude: f32,
) -> Result<()> {
    let kernel = gpu.device.kernel(&program(element), "fill", 0)?;
    let arguments = FillArguments { out, n: n as u64, tensor, amplitude };
    // SAFETY: the caller has `n` elements at `out`, which the kernel writes.
    Ok(unsafe { kernel.launch(gpu.stream(), Grid::new([1024, 1, 1])?, 256, false, &arguments) }?)
}

/// Fills codes with hashed ones.
pub(crate) fn fill_codes<T: Pod>(gpu: &Gpu, codes: &Buffer<T>, tensor: u32) -> Result<()> {
    let kernel = gpu.device.kernel(&program(Element::F16), "fill_words", 0)?;
    let (out, n) = (codes.pointer().cast(), (codes.bytes() / 4) as u64);
    let arguments = FillWordsArguments { out, n, tensor };
    // SAFETY: a quarter as many words as there are bytes, which are whole words.
    Ok(unsafe { kernel.launch(gpu.stream(), Grid::new([1024, 1, 1])?, 256, false, &arguments) }?)
}

/// A codebook of hashed centroids with components of this variance.
pub(crate) fn random_codebook(quantizer: PqShape, tensor: u32, variance: f32) -> Result<CodebookBuf> {
    let amplitude = (3.0 * variance).sqrt();
    let centroids = (0..quantizer.codebook_len() as u64).map(|i| hashed(tensor, i, amplitude));
    Ok(CodebookBuf::new(quantizer, &centroids.collect::<Vec<f32>>())?)
}

/// Hashed codebooks of keys and values, the same for all heads of a layer: of rows with components of
/// variance 1 or, on a side with norms, of norm 1. Codes are then as long as the rows that are encoded behind
/// them, so that those neither lead nor trail all others.
pub(crate) fn random_codebooks(
    layers: usize,
    heads: usize,
    quantizers: Pair<PqShape>,
    norms: Pair<bool>,
) -> Result<Vec<Vec<Pair<CodebookBuf>>>> {
    let variance = |side: Side| if norms[side] { 1.0 / quantizers[side].dim() as f32 } else { 1.0 };
    let layer = |layer: usize| -> Result<_> {
        let tensor = |side: Side| RANDOM_BOOKS + 2 * layer as u32 + side as u32;
        let pair = Pair::try_of(|side| random_codebook(quantizers[side], tensor(side), variance(side)))?;
        Ok(vec![pair; heads])
    };
    (0..layers).map(layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_description() {
        // Computed in Python from the description in `random.cuh`.
        for (tensor, i, expected) in [
            (0, 0, -1.0),
            (0, 1, -0.183_301_93),
            (5, 12345, 0.447_405_34),
            (65536, 4294967303, -0.201_639_89),
        ] {
            assert_eq!(
                hashed(tensor, i, 1.0).to_bits(),
                f32::to_bits(expected),
                "tensor {tensor}, element {i}"
            );
        }
    }
}
