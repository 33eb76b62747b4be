"""Rotations against products of matrices."""

import numpy as np
import pytest
from conftest import rows

import kvcodes


@pytest.mark.parametrize("dim", [1, 16, 80, 128])
def test_hadamard_is_orthogonal_and_flat(rng, dim):
    transform = kvcodes.Hadamard(dim)
    matrix = np.asarray(transform.forward(np.eye(dim, dtype=np.float32))).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    assert np.abs(matrix).max() <= np.sqrt(2 / dim) + 1e-6
    x = rows(rng, 3, 2, dim)
    y = np.asarray(transform.forward(x))
    np.testing.assert_allclose(y, x.astype(np.float64) @ matrix, atol=1e-4)
    np.testing.assert_allclose(transform.inverse(y), x, atol=1e-4)


def test_a_rotation_keeps_inner_products(rng):
    keys, queries = rows(rng, 400, 24), rows(rng, 300, 24)
    for rotation in (kvcodes.Rotation.query_metric(keys, queries), kvcodes.Rotation.principal(keys)):
        basis, dual, sigma = (
            np.asarray(x).astype(np.float64) for x in (rotation.basis, rotation.dual, rotation.sigma)
        )
        np.testing.assert_allclose((queries @ dual) @ (keys @ basis).T, queries @ keys.T, atol=2e-3)
        assert (np.diff(sigma) <= 1e-6).all()


def test_wrong_rows_have_typed_errors(rng):
    transform = kvcodes.Hadamard(8)
    for call, error in [
        (lambda: kvcodes.Hadamard(0), kvcodes.ArgumentError),
        (lambda: kvcodes.Hadamard(2 * 257), kvcodes.ArgumentError),
        (lambda: transform.forward(rows(rng, 3, 4)), kvcodes.ArgumentError),
        (lambda: transform.forward(np.float32(1)), kvcodes.ElementError),
        (lambda: kvcodes.Rotation.principal(rows(rng, 0, 8)), kvcodes.ArgumentError),
        (lambda: kvcodes.Rotation.principal(rows(rng, 5, 8) * np.nan), kvcodes.ArgumentError),
        (lambda: kvcodes.Rotation.query_metric(rows(rng, 5, 8), rows(rng, 5, 4)), kvcodes.ArgumentError),
    ]:
        with pytest.raises(error):
            call()
