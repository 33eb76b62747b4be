"""Codebooks, codes, search and attention against their definitions in f64."""

import numpy as np
import pytest
from conftest import attention, rows

import kvcodes


def test_codes_are_the_nearest_centroids(rng):
    vectors = rows(rng, 500, 16)
    book = kvcodes.Codebook.train(vectors, 4, 5, iterations=5, seed=3)
    assert (book.dim, book.m, book.nbits) == (16, 4, 5)
    centroids = np.asarray(book.centroids).astype(np.float64)
    assert centroids.shape == (4, 32, 4)
    parts = vectors.reshape(500, 4, 1, 4).astype(np.float64)
    distances = ((parts - centroids) ** 2).sum(-1)
    codes = book.encode(vectors)
    decoded = np.asarray(codes.decode())
    error = ((decoded.reshape(500, 4, 4) - parts[:, :, 0]) ** 2).sum(-1)
    np.testing.assert_allclose(error, distances.min(-1), atol=1e-4)
    assert codes.nbytes == 512 * 4 * 5 // 8  # whole blocks of 64


def test_a_seed_gives_the_same_codebook(rng):
    vectors = rows(rng, 300, 8)
    books = [kvcodes.Codebook.train(vectors, 2, 4, seed=seed).to_bytes() for seed in (1, 1, 2)]
    assert books[0] == books[1] != books[2]


def test_codes_append_and_truncate(rng):
    vectors = rows(rng, 200, 8)
    book = kvcodes.Codebook.train(vectors, 4, 4)
    whole, parts = book.encode(vectors), book.encode(vectors[:70])
    assert parts.append(vectors[70:]) > 0
    assert parts.to_bytes() == whole.to_bytes()
    parts.truncate(90)
    assert len(parts) == 90
    assert parts.to_bytes() == book.encode(vectors[:90]).to_bytes()
    out = np.zeros((90, 8), np.float16)
    assert parts.decode(out=out) is out
    np.testing.assert_allclose(out, np.asarray(whole.decode())[:90], atol=1e-2)


def test_the_codebook_of_gaussians_needs_no_data(rng):
    book = kvcodes.Codebook.gaussian(32, 16, 8)
    vectors = rng.standard_normal((400, 32)).astype(np.float32) / np.float32(np.sqrt(32))
    error = book.encode(vectors[:0]).append(vectors) / (vectors**2).sum()
    assert error < 0.02
    with pytest.raises(kvcodes.ArgumentError):
        kvcodes.Codebook.gaussian(24, 8, 8)


def test_search_finds_the_highest_scores(rng):
    vectors, queries = rows(rng, 300, 16), rows(rng, 3, 16)
    codes = kvcodes.Codebook.train(vectors, 8, 6).encode(vectors)
    scores = queries.astype(np.float64) @ np.asarray(codes.decode()).astype(np.float64).T
    indices, best = (np.asarray(x) for x in kvcodes.search(codes, queries, 10))
    assert indices.dtype == np.uint32 and indices.shape == (3, 10)
    np.testing.assert_allclose(np.take_along_axis(scores, indices.astype(int), 1), best, atol=1e-4)
    np.testing.assert_allclose(np.sort(best)[:, ::-1], np.sort(scores)[:, :-11:-1], atol=1e-4)
    assert [np.asarray(x).size for x in kvcodes.search(codes, queries, 0)] == [0, 0]
    assert np.asarray(kvcodes.search(codes, queries, 1000)[0]).shape == (3, 300)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_is_that_of_the_decoded_rows(rng, softcap):
    keys, values, queries = rows(rng, 200, 16), rows(rng, 200, 16), rows(rng, 4, 16)
    codes = [kvcodes.Codebook.train(x, 8, 6).encode(x) for x in (keys, values)]
    out = np.asarray(kvcodes.attend(queries, *codes, softcap=softcap))
    decoded = [np.asarray(x.decode())[:, None] for x in codes]
    np.testing.assert_allclose(out, attention(queries[None], *decoded, softcap=softcap)[0], atol=2e-4)


def test_bytes_that_are_damaged_are_refused(rng):
    vectors = rows(rng, 100, 8)
    book = kvcodes.Codebook.train(vectors, 4, 4)
    codes = book.encode(vectors)
    assert kvcodes.Codes.from_bytes(book, codes.to_bytes()).to_bytes() == codes.to_bytes()
    other = kvcodes.Codebook.from_bytes(book.to_bytes())
    assert np.array_equal(other.centroids, book.centroids)
    for data, read in [
        (codes.to_bytes(), lambda data: kvcodes.Codes.from_bytes(book, data)),
        (book.to_bytes(), kvcodes.Codebook.from_bytes),
    ]:
        for at in range(0, len(data), 7):
            wrong = bytearray(data)
            wrong[at] ^= 4
            with pytest.raises(kvcodes.Error) as raised:
                read(bytes(wrong))
            assert isinstance(raised.value, ValueError) and raised.value.code > 0
        with pytest.raises(kvcodes.FormatError):
            read(data[:-1])
    with pytest.raises(kvcodes.ArgumentError):
        kvcodes.Codes.from_bytes(kvcodes.Codebook.train(vectors, 2, 4), codes.to_bytes())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: kvcodes.Codebook.train(x, 3), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x, 4, 13), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x[:0], 4), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x * np.nan, 4), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x[0], 4), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x.astype(np.float64), 4), kvcodes.ElementError),
        (lambda x: kvcodes.Codebook.train([1.0, 2.0], 4), kvcodes.ElementError),
        (lambda x: kvcodes.Codebook(np.zeros((2, 3, 4), np.float32)), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook(np.full((2, 4, 4), np.inf, np.float32)), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x, 4, 4).encode(x[:, :4]), kvcodes.ArgumentError),
        (lambda x: kvcodes.Codebook.train(x, 4, -1), OverflowError),
    ],
)
def test_wrong_arguments_have_typed_errors(rng, call, error):
    with pytest.raises(error):
        call(rows(rng, 100, 8))
