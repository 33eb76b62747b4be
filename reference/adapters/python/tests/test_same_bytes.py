"""Python writes, reads and computes what Rust and C do, bit for bit: the files of ``../../same_bytes``, from the
inputs of ``../../c/tests/main/across_languages.rs``, which says why they do not depend on the machine."""

from pathlib import Path

import numpy as np
import pytest

import kvcodes

FILES = Path(__file__).parents[2] / "same_bytes"
DIM, TOKENS = 16, 60


def numbers(seed: int, n: int) -> np.ndarray:
    """A linear congruential generator."""
    out = []
    for _ in range(n):
        seed = (seed * 1_664_525 + 1_013_904_223) % 2**32
        out.append(seed)
    return np.array(out, np.uint32)


def values(seed: int, n: int) -> np.ndarray:
    return ((numbers(seed, n * DIM) >> 24).astype(np.float32) / 32 - 4).reshape(n, DIM)


def product() -> kvcodes.ProductQuantizer:
    signs = [[1.0 - 2.0 * (c >> j & 1) for j in range(4)] for c in range(16)]
    books = np.array([signs] * 4, np.float32), values(3, 16).reshape(4, 16, 4)
    keys, values_ = map(kvcodes.Codebook, books)
    return kvcodes.ProductQuantizer([keys], [values_])


def scalar() -> kvcodes.ScalarQuantizer:
    identity, zeros = np.eye(DIM, dtype=np.float32), np.zeros(DIM, np.float32)
    basis = kvcodes.Basis(zeros, identity, identity, zeros + 1, values(4, 1)[0], 0.5, block=32)
    assert basis.to_bytes() == read("sq.basis")
    basis = kvcodes.Basis.from_bytes(read("sq.basis"))
    return kvcodes.ScalarQuantizer([basis], zeros[: DIM // 2], key_bits=4.0, value_bits=4)


def read(name: str) -> bytes:
    return (FILES / name).read_bytes()


@pytest.mark.parametrize(("kind", "make", "shared"), [("pq", product, "books"), ("sq", scalar, "head")])
def test_bytes_and_attention_are_those_of_rust_and_c(kind, make, shared):
    quantizer = make()
    assert quantizer.to_bytes() == [read(f"{kind}.{shared}")]
    quantizer = type(quantizer).from_bytes(quantizer.to_bytes())
    keys = 1 - 2 * (numbers(1, TOKENS * DIM) >> 31).astype(np.float32).reshape(TOKENS, 1, DIM)
    cache = kvcodes.LayerCache(quantizer, sinks=2, recent=8, batch=4)
    cache.append(keys, values(2, TOKENS).reshape(TOKENS, 1, DIM))
    assert cache.to_bytes() == read(f"{kind}.cache")
    restored = kvcodes.LayerCache.from_bytes(quantizer, read(f"{kind}.cache"))
    out = restored.attend(64 * keys[[0, 20, 57]], scale=1.0)
    assert np.asarray(out).tobytes() == read(f"{kind}.out")
