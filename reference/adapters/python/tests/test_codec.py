"""Contexts as frames, and stores of them."""

import numpy as np
import pytest
from conftest import rows

import kvcodes

SHAPE = (2, 2, 120, 3, 8)  # layers, sides, tokens, heads, components


@pytest.fixture
def context(rng):
    return rows(rng, *SHAPE)


@pytest.fixture
def profile(context):
    return kvcodes.Profile.fit(context, "tests/model", steps=[0.1, 0.5])


@pytest.mark.parametrize("level", [0, 1])
def test_the_error_is_about_half_a_step(context, profile, level):
    frame = profile.encode(context, level=level, first_token=7)
    info = kvcodes.Frame.parse(frame)
    assert (info.layers, info.heads, info.head_dim, info.tokens) == (2, 3, 8, 120)
    assert (info.level, info.first_token, info.dtype, info.model_id) == (level, 7, "f32", profile.model_id)
    out = np.zeros(SHAPE, np.float32)
    profile.decode(frame, out)
    steps = [0.1, 0.5][level] * context.std(2, keepdims=True)
    assert (np.abs(out - context) <= 0.55 * steps + 1e-5).all()
    again = kvcodes.Profile.from_bytes(profile.to_bytes())
    assert again.encode(context, level=level, first_token=7) == frame


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (2, 0, 1, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3)])
def test_contexts_of_any_strides(context, profile, order):
    moved = np.ascontiguousarray(context.transpose(order)).transpose(np.argsort(order))
    assert profile.encode(moved) == profile.encode(context)
    out = np.ascontiguousarray(np.zeros(SHAPE, np.float16).transpose(order)).transpose(np.argsort(order))
    frame = profile.encode(context.astype(np.float16))
    assert kvcodes.Frame.parse(frame).dtype == "f16"
    if order in [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)]:
        profile.decode(frame, out)
        assert np.abs(out - context).max() < 0.4
    else:
        with pytest.raises(kvcodes.ArgumentError):
            profile.decode(frame, out)


def test_damaged_frames_are_refused(context, profile):
    frame, out = profile.encode(context), np.zeros(SHAPE, np.float32)
    for at in range(0, len(frame), 61):
        wrong = bytearray(frame)
        wrong[at] ^= 16
        with pytest.raises(kvcodes.Error):
            profile.decode(bytes(wrong), out)
    for call, error in [
        (lambda: profile.decode(frame[:-1], out), kvcodes.FormatError),
        (lambda: profile.decode(b"", out), kvcodes.FormatError),
        (lambda: profile.decode(frame, out[:, :, :60]), kvcodes.ArgumentError),
        (lambda: profile.decode(frame, out[:1]), kvcodes.ArgumentError),
        (lambda: profile.decode(frame, np.zeros((2, 2, 200, 3, 8), np.float32)), kvcodes.ArgumentError),
        (lambda: profile.encode(context, level=2), kvcodes.ArgumentError),
        (lambda: profile.encode(context * np.nan), kvcodes.ArgumentError),
        (lambda: profile.encode(context[:, :1]), kvcodes.ArgumentError),
        (lambda: kvcodes.Profile.fit(context[:, :, :1], "x"), kvcodes.Error),
        (lambda: kvcodes.Profile.fit(context, "x", steps=[]), kvcodes.ArgumentError),
        (lambda: kvcodes.Profile.fit(context, "x", steps=[-1.0]), kvcodes.ArgumentError),
        (lambda: kvcodes.Profile.from_bytes(profile.to_bytes()[:-3]), kvcodes.FormatError),
    ]:
        with pytest.raises(error):
            call()
    profile.decode(frame, out)
    assert np.abs(out - context).max() < 0.4


@pytest.mark.parametrize("place", ["folder", "memory:///"])
def test_a_store_finds_the_longest_prefix(context, profile, tmp_path, place):
    store = kvcodes.Store(str(tmp_path / "caches") if place == "folder" else place)
    space = store.space("tests/model@1", profile, chunk=40, tail=10)
    tokens = list(range(120))
    assert space.find(tokens) == 0
    assert space.put(tokens, context) == 3
    assert space.put(tokens, context) == 0
    assert space.find([*tokens[:95], 7, 7, 7]) == 80
    assert space.find([7, *tokens]) == 0
    out = np.zeros(SHAPE, np.float32)
    assert space.load([*tokens[:95], 7], out, level=1) == 80
    expected = np.zeros(SHAPE, np.float32)
    profile.decode(profile.encode(context, level=1), expected)
    assert np.array_equal(out[:, :, :80], expected[:, :, :80]) and not out[:, :, 80:].any()
    assert store.space("tests/model@2", profile, chunk=40, tail=10).find(tokens) == 0


def test_damage_in_a_store_is_never_returned(context, profile, tmp_path):
    space = kvcodes.Store(str(tmp_path)).space("model", profile, chunk=40, tail=10)
    tokens = list(range(120))
    space.put(tokens, context)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            data = bytearray(path.read_bytes())
            data[-10] ^= 1
            path.write_bytes(data)
    with pytest.raises(kvcodes.StoreError):
        space.load(tokens, np.zeros(SHAPE, np.float32), level=1)


def test_stores_refuse_wrong_arguments(context, profile, tmp_path):
    store = kvcodes.Store(str(tmp_path))
    space = store.space("model", profile)
    for call, error in [
        (lambda: kvcodes.Store("ftp://somewhere"), kvcodes.StoreError),
        (lambda: store.space("model", profile, chunk=7, tail=2), kvcodes.ArgumentError),
        (lambda: space.put([1, 2], context), kvcodes.ArgumentError),
        (lambda: space.put([-1] * 120, context), OverflowError),
        (lambda: space.load([1], np.zeros((1, 2, 9, 3, 8), np.float32)), kvcodes.ArgumentError),
    ]:
        with pytest.raises(error):
            call()
