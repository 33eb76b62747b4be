"""Caches of a layer against attention in f64; layouts, element types, threads and processes."""

import os
import threading

import numpy as np
import pytest
from conftest import attention, rows

import kvcodes

HEADS, GROUP, DIM = 2, 3, 32


def frequencies() -> np.ndarray:
    return (10_000.0 ** (-np.arange(DIM // 2) * 2 / DIM)).astype(np.float32)


def product(keys: np.ndarray, values: np.ndarray, nbits: int = 7) -> kvcodes.ProductQuantizer:
    train = lambda x: [kvcodes.Codebook.train(np.ascontiguousarray(x[:, h]), 16, nbits) for h in range(HEADS)]
    return kvcodes.ProductQuantizer(train(keys), train(values))


def scalar(keys: np.ndarray, values: np.ndarray, bits: int = 8) -> kvcodes.ScalarQuantizer:
    queries = rows(np.random.default_rng(1), 300, HEADS * GROUP, DIM)
    bases = kvcodes.Basis.fit_layer(keys, queries, values, frequencies(), rotated_from=0)
    return kvcodes.ScalarQuantizer(bases, frequencies(), key_bits=bits, value_bits=bits)


@pytest.fixture
def context(rng):
    return rows(rng, 300, HEADS, DIM), rows(rng, 300, HEADS, DIM), rows(rng, 4, HEADS * GROUP, DIM)


@pytest.fixture(params=[product, scalar])
def quantizer(request, context):
    return request.param(*context[:2])


@pytest.mark.parametrize(("options"), [{}, {"scale": 0.1}, {"softcap": 4.0}, {"window": 20}])
def test_tokens_in_the_window_are_exact(quantizer, context, options):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer, sinks=4, recent=300, batch=1)
    cache.append(keys, values)
    assert (len(cache), cache.coded, cache.heads, cache.dim) == (300, 0, HEADS, DIM)
    out = np.asarray(cache.attend(queries, **options))
    np.testing.assert_allclose(out, attention(queries, keys, values, **options), atol=2e-5)


def test_product_codes_are_attended_to_as_their_decoded_rows(context):
    keys, values, queries = (x.copy() for x in context)
    quantizer = product(keys, values)
    cache = kvcodes.LayerCache(quantizer, sinks=4, recent=32, batch=16)
    cache.append(keys, values)
    end = 4 + cache.coded
    assert cache.coded == 256
    for h in range(HEADS):
        for x in (keys, values):
            book = kvcodes.Codebook.train(np.ascontiguousarray(x[:, h]), 16, 7)
            x[4:end, h] = book.encode(np.ascontiguousarray(x[4:end, h])).decode()
    np.testing.assert_allclose(cache.attend(queries), attention(queries, keys, values), atol=3e-4)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.3)])
def test_scalar_codes_are_near_the_rows(context, bits, error):
    keys, values, queries = context
    cache = kvcodes.LayerCache(scalar(keys, values, bits), sinks=4, recent=32)
    cache.append(keys, values)
    assert cache.coded == 256
    difference = np.abs(np.asarray(cache.attend(queries)) - attention(queries, keys, values))
    assert difference.max() < error
    exact = kvcodes.LayerCache(cache.quantizer, recent=300)
    exact.append(keys, values)
    assert cache.nbytes < exact.nbytes / 2


def test_a_cache_does_not_depend_on_how_tokens_were_appended(quantizer, context):
    keys, values, queries = context
    whole = kvcodes.LayerCache(quantizer, recent=40, batch=8)
    whole.append(keys, values)
    parts = kvcodes.LayerCache(quantizer, recent=40, batch=8)
    for at in range(0, 300, 37):
        parts.append(keys[at : at + 37], values[at : at + 37])
    assert whole.to_bytes() == parts.to_bytes()


def heads_first(x):
    return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)


def sliced(x):
    wide = np.zeros((x.shape[0] * 2, x.shape[1] + 1, x.shape[2] + 3), x.dtype)
    wide[::2, 1:, 3:] = x
    return wide[::2, 1:, 3:]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def reversed_components(x):
    return np.asfortranarray(x)


def untyped(x):
    return kvcodes.View(bytearray(x.tobytes()), "f32", x.shape)


def memory_view(x):
    return memoryview(np.ascontiguousarray(x))


@pytest.mark.parametrize(
    "layout", [heads_first, sliced, read_only, reversed_components, untyped, memory_view]
)
def test_every_layout_gives_the_same_codes(quantizer, context, layout):
    keys, values, queries = context
    expected, cache = kvcodes.LayerCache(quantizer), kvcodes.LayerCache(quantizer)
    expected.append(keys, values)
    cache.append(layout(keys), layout(values))
    assert cache.to_bytes() == expected.to_bytes()
    assert np.array_equal(cache.attend(layout(queries)), expected.attend(queries))
    wide = np.zeros((4, HEADS * GROUP, 2 * DIM), np.float32)
    out = wide[..., ::2]
    assert expected.attend(queries, out=out) is out
    assert np.array_equal(out, expected.attend(queries))
    assert not wide[..., 1::2].any()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_rows_of_every_element_type(quantizer, context, dtype):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer, recent=300, dtype=dtype)
    assert cache.dtype == dtype
    cache.append(keys, values.astype(np.float16))
    tolerance = {"f32": 4e-3, "f16": 2e-2, "bf16": 0.15}[dtype]
    expected = attention(queries, keys, values)
    np.testing.assert_allclose(cache.attend(queries), expected, atol=tolerance)
    half = np.zeros(queries.shape, np.float16)
    cache.attend(queries.astype(np.float16), out=half)
    np.testing.assert_allclose(half, expected, atol=tolerance + 2e-2)
    again = kvcodes.LayerCache.from_bytes(quantizer, cache.to_bytes())
    assert (again.dtype, len(again)) == (dtype, 300)
    assert np.array_equal(again.attend(queries), cache.attend(queries))


def test_bf16_by_a_view(quantizer, context):
    keys, values, queries = context
    bf16 = lambda x: kvcodes.View((x.view(np.uint32) >> 16).astype(np.uint16), "bf16", x.shape)
    rounded = lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    cache = kvcodes.LayerCache(quantizer, recent=300)
    cache.append(bf16(keys), bf16(values))
    np.testing.assert_allclose(
        cache.attend(queries), attention(queries, rounded(keys), rounded(values)), atol=2e-5
    )
    pool = bytearray(8 * queries.nbytes)
    out = kvcodes.View(pool, "f32", queries.shape, strides=[HEADS * GROUP * DIM * 2, DIM * 2, 2], offset=16)
    cache.attend(queries, out=out)
    got = np.frombuffer(pool, np.float32)[4:][: 2 * queries.size : 2]
    assert np.array_equal(got.reshape(queries.shape), cache.attend(queries))
    with pytest.raises(kvcodes.ArgumentError):
        kvcodes.View(pool, "f32", queries.shape, offset=len(pool))
    with pytest.raises(kvcodes.ArgumentError):
        kvcodes.View(pool, "f32", [2**40, 2**40])
    with pytest.raises(kvcodes.ElementError):
        kvcodes.View(pool, "f64", [1])


def test_truncation_and_copies(quantizer, context):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer, recent=16, batch=8)
    cache.append(keys[:280], values[:280])
    other = cache.copy()
    cache.append(keys[280:], values[280:])
    assert (len(cache), len(other)) == (300, 280)
    cache.truncate(280)
    assert len(cache) == 280
    np.testing.assert_allclose(cache.attend(queries), other.attend(queries), atol=0.5)
    cache.truncate(1000)
    assert len(cache) == 280
    cache.truncate(0)
    assert (len(cache), cache.nbytes, cache.coded) == (0, 0, 0)
    assert not np.asarray(cache.attend(queries[:1])).any()


def test_errors_leave_the_cache_as_it_was(quantizer, context):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer)
    cache.append(keys, values)
    before = cache.to_bytes()
    out = np.zeros(queries.shape, np.float32)
    for call, error in [
        (lambda: cache.append(keys[:, :1], values), kvcodes.ArgumentError),
        (lambda: cache.append(keys, values[:5]), kvcodes.ArgumentError),
        (lambda: cache.append(keys[0], values[0]), kvcodes.ArgumentError),
        (lambda: cache.append(keys.astype(int), values), kvcodes.ElementError),
        (lambda: cache.append(keys.astype(">f4"), values), kvcodes.ElementError),
        (lambda: cache.append(keys[::-1], values), kvcodes.ElementError),
        (lambda: cache.append(None, values), kvcodes.ElementError),
        (lambda: cache.attend(queries[:, :5]), kvcodes.ArgumentError),
        (lambda: cache.attend(queries[..., :16]), kvcodes.ArgumentError),
        (lambda: cache.attend(np.zeros((301, 6, DIM), np.float32)), kvcodes.ArgumentError),
        (lambda: cache.attend(queries, scale=float("nan")), kvcodes.ArgumentError),
        (lambda: cache.attend(queries, softcap=-1.0), kvcodes.ArgumentError),
        (lambda: cache.attend(queries, window=0), kvcodes.ArgumentError),
        (lambda: cache.attend(queries, out=out[:3]), kvcodes.ArgumentError),
        (lambda: cache.attend(queries, out=read_only(out)), kvcodes.ElementError),
        (lambda: cache.attend(queries, out=out.astype(np.float64)), kvcodes.ElementError),
        (lambda: cache.attend(out, out=out), kvcodes.ArgumentError),
        (lambda: cache.attend(queries, out=np.broadcast_to(out[:1], out.shape)), kvcodes.ElementError),
        (lambda: kvcodes.LayerCache(quantizer, sinks=2**40), kvcodes.ArgumentError),
        (lambda: kvcodes.LayerCache(quantizer, dtype="f64"), kvcodes.ElementError),
        (lambda: kvcodes.LayerCache(None), TypeError),
    ]:
        with pytest.raises(error):
            call()
        assert cache.to_bytes() == before
    cache.append(keys[:1], values[:1])
    assert len(cache) == 301


def test_nan_in_the_window_reaches_the_output(quantizer, context):
    keys, values, queries = (x.copy() for x in context)
    keys[-1] = np.nan
    cache = kvcodes.LayerCache(quantizer)
    cache.append(keys, values)
    assert np.isnan(cache.attend(queries[-1:])).all()
    cache.truncate(299)
    assert np.isfinite(cache.attend(queries[-1:])).all()


def test_saved_caches_are_verified(quantizer, context):
    keys, values, _ = context
    cache = kvcodes.LayerCache(quantizer, recent=16)
    cache.append(keys[:150], values[:150])
    data = cache.to_bytes()
    for at in range(0, len(data), 97):
        wrong = bytearray(data)
        wrong[at] ^= 1
        with pytest.raises(kvcodes.FormatError):
            kvcodes.LayerCache.from_bytes(quantizer, bytes(wrong))
    with pytest.raises(kvcodes.FormatError):
        kvcodes.LayerCache.from_bytes(quantizer, data[:-1])
    other = product(values, keys) if isinstance(quantizer, kvcodes.ProductQuantizer) else scalar(values, keys)
    with pytest.raises(kvcodes.FormatError):
        kvcodes.LayerCache.from_bytes(other, data)


def test_values_of_another_dimension(context):
    keys, values, queries = context
    values = np.ascontiguousarray(values[..., :16])
    for quantizer in (product(keys, values), scalar(keys, values)):
        cache = kvcodes.LayerCache(quantizer, recent=300)
        cache.append(keys, values)
        out = np.asarray(cache.attend(queries))
        assert out.shape == (4, HEADS * GROUP, 16)
        np.testing.assert_allclose(out, attention(queries, keys, values), atol=2e-5)
        with pytest.raises(kvcodes.ArgumentError):
            cache.append(keys, keys)


def test_quantizers_check_their_parts(context):
    keys, values, queries = context
    books = [kvcodes.Codebook.train(np.ascontiguousarray(keys[:, 0]), 4, 4)]
    narrow = [kvcodes.Codebook.train(np.ascontiguousarray(keys[:, 0, :16]), 4, 4)]
    for sides in [([], []), (books, []), (books * 2, books), (books + narrow, books * 2)]:
        with pytest.raises(kvcodes.ArgumentError):
            kvcodes.ProductQuantizer(*sides)
    maps, row = np.eye(DIM, dtype=np.float32), np.ones(DIM, np.float32)
    parts = dict(mean=row, basis=maps, dual=maps, sigma=row, value_mean=row, value_scale=1.0, block=64)
    bits = dict(frequencies=frequencies(), key_bits=2.5, value_bits=2)
    quantizer = kvcodes.ScalarQuantizer([kvcodes.Basis(**parts)] * HEADS, **bits)
    assert (quantizer.heads, quantizer.dim, quantizer.bits) == (HEADS, DIM, [(2.5, 2.0)] * HEADS)
    for wrong in [
        dict(mean=row[:1]),
        dict(mean=row[:0], basis=maps[:0, :0], dual=maps[:0, :0], sigma=row[:0]),
        dict(basis=maps[:, :5]),
        dict(dual=maps * np.nan),
        dict(sigma=row * np.inf),
        dict(value_mean=row * np.nan),
        dict(value_mean=row[:0]),
        dict(value_scale=0.0),
        dict(value_scale=3.0),
        dict(value_scale=float("nan")),
        dict(block=48),
        dict(block=0),
    ]:
        with pytest.raises(kvcodes.ArgumentError):
            kvcodes.ScalarQuantizer([kvcodes.Basis(**parts | wrong)], **bits)
    for wrong in [
        dict(frequencies=frequencies()[1:]),
        dict(key_bits=0.1),
        dict(key_bits=8.125),
        dict(key_bits=float("nan")),
        dict(value_bits=0),
        dict(value_bits=9),
    ]:
        with pytest.raises(kvcodes.ArgumentError):
            kvcodes.ScalarQuantizer([kvcodes.Basis(**parts)], **bits | wrong)
    with pytest.raises(kvcodes.ArgumentError):
        kvcodes.ScalarQuantizer([], **bits)
    samples = dict(keys=keys, queries=queries, values=values, frequencies=frequencies(), rotated_from=0)
    assert len(kvcodes.Basis.fit_layer(**samples)) == HEADS
    for wrong in [
        dict(keys=keys[:0]),
        dict(keys=keys[:, :0]),
        dict(queries=queries[..., :16]),
        dict(queries=queries[:, :5]),
        dict(values=values[:, :1]),
        dict(values=values * np.nan),
        dict(frequencies=frequencies()[1:]),
        dict(rotated_from=2**64 - 1),
        dict(block=0),
    ]:
        with pytest.raises(kvcodes.ArgumentError):
            kvcodes.Basis.fit_layer(**samples | wrong)


def test_quantizers_are_saved(quantizer, context):
    cache = kvcodes.LayerCache(quantizer)
    cache.append(*context[:2])
    restored = type(quantizer).from_bytes(quantizer.to_bytes())
    assert (restored.nbytes, restored.to_bytes()) == (quantizer.nbytes, quantizer.to_bytes())
    assert kvcodes.LayerCache.from_bytes(restored, cache.to_bytes()).to_bytes() == cache.to_bytes()
    for heads in ([], [b""], [quantizer.to_bytes()[0][:-1]]):
        with pytest.raises((kvcodes.ArgumentError, kvcodes.FormatError)):
            type(quantizer).from_bytes(heads)


def test_bases_are_saved(context):
    keys, values, queries = context
    basis, _ = kvcodes.Basis.fit_layer(keys, queries, values, frequencies())
    parts = [np.asarray(getattr(basis, part)) for part in ("mean", "basis", "dual", "sigma", "value_mean")]
    assert kvcodes.Basis.from_bytes(basis.to_bytes()).to_bytes() == basis.to_bytes()
    assert kvcodes.Basis(*parts, basis.value_scale, block=basis.block).to_bytes() == basis.to_bytes()
    with pytest.raises(kvcodes.FormatError):
        kvcodes.Basis.from_bytes(basis.to_bytes()[:-1])


def test_threads_attend_at_once(quantizer, context):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer)
    cache.append(keys, values)
    expected = np.asarray(cache.attend(queries))
    results = []

    def work():
        for _ in range(20):
            results.append(np.array_equal(cache.attend(queries), expected))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(results) == 160 and all(results)


def test_an_append_among_readers_is_refused_or_done(quantizer, context):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer)
    cache.append(keys, values)
    refused, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            try:
                cache.attend(queries)
            except RuntimeError:
                refused.append("read")

    threads = [threading.Thread(target=read) for _ in range(3)]
    [thread.start() for thread in threads]
    done = 0
    for _ in range(200):
        try:
            cache.append(keys[:1], values[:1])
            done += 1
        except RuntimeError:
            refused.append("append")
    stop.set()
    [thread.join() for thread in threads]
    assert len(cache) == 300 + done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads(quantizer, context):
    keys, values, queries = context
    cache = kvcodes.LayerCache(quantizer)
    cache.append(keys, values)
    expected = np.asarray(cache.attend(queries))
    child = os.fork()
    if child == 0:
        same = np.array_equal(cache.attend(queries), expected)
        kvcodes.Codebook.train(np.ascontiguousarray(keys[:, 0]), 4, 4)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
