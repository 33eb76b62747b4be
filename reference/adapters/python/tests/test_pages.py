"""Pages under an engine's keys: every layout and element, damage, wrong arguments, other processes."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvcodes

ORDERS = {
    "2LTHD": (2, 3, 16, 2, 8),
    "2TLHD": (2, 16, 3, 2, 8),
    "LBTH2D": (3, 2, 8, 2, 2, 8),
    "WLBHT2D": (2, 3, 2, 2, 8, 2, 8),
}


def bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """The bits of random bf16 elements, of which every eighth component has an offset."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[..., ::8] += 3
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def files(folder, kind):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path.relative_to(folder).parts[1] == kind)


@pytest.mark.parametrize("order", ORDERS)
def test_pages_keep_every_bit(rng, tmp_path, order):
    shape = ORDERS[order]
    page = bf16(rng, shape)
    page.flat[:4] = [0x7F80, 0xFFC1, 0x8000, 1]  # an infinity, a NaN, minus zero, a subnormal
    pages = kvcodes.Store(str(tmp_path)).pages("model", order, shape)
    assert pages.nbytes == page.nbytes and b"key" not in pages
    assert pages.put(b"key", page.tobytes()) and not pages.put(b"key", page.tobytes())
    out = bytearray(page.nbytes)
    assert b"key" in pages and pages.get(b"key", out) and bytes(out) == page.tobytes()
    assert "key" in pages and "other" not in pages and not pages.get("other", out)
    # The same page with gaps, and in another process's words.
    wide = np.zeros((*shape[:-1], 2 * shape[-1]), np.uint16)
    strides = [stride // 2 for stride in wide.strides]
    view = kvcodes.View(wide, "bf16", shape, strides)
    assert pages.get("key", view) and np.array_equal(wide[..., : shape[-1]], page)
    assert not wide[..., shape[-1] :].any()
    assert pages.put("again", view) and pages.get("again", out) and bytes(out) == page.tobytes()
    pages.delete("key")
    assert "key" not in pages and not pages.get("key", out)


def test_elements_and_arrays_of_engines(rng, tmp_path):
    store = kvcodes.Store(str(tmp_path))
    page = rng.standard_normal(ORDERS["2LTHD"]).astype(np.float16)
    pages = store.pages("model", "2LTHD", page.shape, dtype="f16")
    assert pages.put("typed", page) and pages.put("flat", page.ravel())
    out = np.zeros_like(page)
    for key in ("typed", "flat"):
        assert pages.get(key, out) and np.array_equal(out, page)
    pool = np.zeros((4, *page.shape), np.int8).repeat(2, -1)  # chunks of a pool without a type
    assert pages.get("flat", pool[2]) and np.array_equal(pool[2].view(np.float16), page)
    moved = np.zeros((2, 16, 3, 2, 8), np.float16).transpose(0, 2, 1, 3, 4)
    assert pages.get("typed", moved) and np.array_equal(moved, page)
    with pytest.raises(kvcodes.ArgumentError, match="profile"):
        store.pages("model", "2LTHD", page.shape, dtype="f32")


def test_levels_of_a_profile(rng, tmp_path):
    shape = ORDERS["2LTHD"]
    page = bf16(rng, shape)
    strides = [page.strides[1] // 2, page.strides[0] // 2, 16, 8, 1]
    rows = kvcodes.View(page, "bf16", (3, 2, 16, 2, 8), strides)
    profile = kvcodes.Profile.fit(rows, "model", steps=[0.1, 0.5], lossless=True)
    assert [profile.is_lossless(level) for level in range(3)] == [True, False, False]
    assert (profile.layers, profile.heads, profile.head_dim, profile.keys_rotated) == (3, 2, 8, True)
    assert "lossless" in repr(profile)
    pages = kvcodes.Store(str(tmp_path)).pages("model", "2LTHD", shape, profile=profile)
    assert pages.put("key", page.tobytes())
    out = np.zeros(shape, np.uint16)
    view = kvcodes.View(out, "bf16", shape)
    assert pages.get("key", view) and np.array_equal(out, page)
    errors = []
    for level in (1, 2):
        assert pages.get("key", view, level=level)
        errors.append(np.abs(widened(out) - widened(page)).max())
    assert 0 < errors[0] < errors[1] < 1.5
    with pytest.raises(kvcodes.ArgumentError):
        pages.get("key", view, level=3)
    nan = np.full(shape, 0x7FC0, np.uint16)
    with pytest.raises(kvcodes.ArgumentError):
        pages.put("nan", nan.tobytes())


def test_models_parts_and_shapes_are_apart(rng, tmp_path):
    store, page = kvcodes.Store(str(tmp_path)), bf16(rng, ORDERS["2LTHD"])
    store.pages("model", "2LTHD", page.shape).put("key", page.tobytes())
    for model, shape, dtype, part in [
        ("other", page.shape, "bf16", ""),
        ("model", page.shape, "f16", ""),
        ("model", page.shape, "bf16", "rank 1 of 2"),
        ("model", (2, 3, 16, 1, 16), "bf16", ""),
        ("model", (2, 3, 8, 2, 16), "bf16", ""),
    ]:
        other = store.pages(model, "2LTHD", shape, dtype=dtype, part=part)
        other.put("another", page.tobytes())
        assert "key" not in other and not other.get("key", bytearray(page.nbytes))


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "remove", "manifest"])
def test_damage_is_a_miss_and_is_repaired(rng, tmp_path, damage):
    pages = kvcodes.Store(str(tmp_path)).pages("model", "2LTHD", ORDERS["2LTHD"])
    a, b = bf16(rng, ORDERS["2LTHD"]).tobytes(), bf16(rng, ORDERS["2LTHD"]).tobytes()
    pages.put("a", a)
    (data,), (manifest,) = files(tmp_path, "data"), files(tmp_path, "chunks")
    pages.put("b", b)
    (other,) = set(files(tmp_path, "data")) - {data}
    bytes_ = bytearray(data.read_bytes())
    match damage:
        case "flip":
            bytes_[-1] ^= 1
            data.write_bytes(bytes_)
        case "cut":
            data.write_bytes(bytes_[:200])
        case "swap":
            data.write_bytes(other.read_bytes())
        case "remove":
            data.unlink()
        case "manifest":
            manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    out = bytearray(len(a))
    assert not pages.get("a", out)
    assert pages.put("a", a) and pages.get("a", out) and bytes(out) == a
    assert pages.get("b", out) and bytes(out) == b


def test_wrong_arguments_are_refused(rng, tmp_path):
    store, shape = kvcodes.Store(str(tmp_path)), ORDERS["2LTHD"]
    page = bf16(rng, shape)
    pages = store.pages("model", "2LTHD", shape)
    argument, element = kvcodes.ArgumentError, kvcodes.ElementError
    for call, error in [
        (lambda: store.pages("model", "2LTH", shape), argument),
        (lambda: store.pages("model", "2LTXD", shape), argument),
        (lambda: store.pages("model", "2LTHD", (2, 0, 16, 2, 8)), argument),
        (lambda: store.pages("model", "2LTHD", (2, 3, 16, 2, 1 << 62)), argument),
        (lambda: store.pages("model", "2LTHD", shape, dtype="fp8"), element),
        (lambda: pages.put("key", page.tobytes()[:-2]), argument),
        (lambda: pages.put("key", page.tobytes() + b"xx"), argument),
        (lambda: pages.put("key", b""), argument),
        (lambda: pages.put("key", page), element),  # uint16
        (lambda: pages.put("key", np.zeros(shape, np.float16)), element),
        (lambda: pages.put("key", kvcodes.View(page, "bf16", shape[::-1])), argument),
        (lambda: pages.put("key", memoryview(page.tobytes() * 2)[::2]), element),
        (lambda: pages.put("key", memoryview(page.tobytes() + b"x")[1:]), element),  # not aligned
        (lambda: pages.put(7, page.tobytes()), TypeError),
        (lambda: pages.get("key", page.tobytes()), element),  # read-only
        (lambda: pages.get("key", bytearray(10)), argument),
        (lambda: kvcodes.Store(str(tmp_path), retry=-1), argument),
        (lambda: kvcodes.Store("s3://bucket/x", settings={"aws_nonsense": "1"}), kvcodes.StoreError),
    ]:
        with pytest.raises(error):
            call()
    assert "key" not in pages


def test_a_fork_is_told_to_open_the_store_again(tmp_path):
    program = """
import os, kvcodes
store = kvcodes.Store(%r)
pages = store.pages("model", "2LTHD", (2, 1, 4, 1, 8))
pages.put("a", bytes(pages.nbytes))
if (child := os.fork()) == 0:
    try:
        "a" in pages
    except kvcodes.StoreError:
        again = kvcodes.Store(%r).pages("model", "2LTHD", (2, 1, 4, 1, 8))
        os._exit(0 if again.get("a", bytearray(again.nbytes)) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    path = str(tmp_path)
    subprocess.run([sys.executable, "-c", program % (path, path)], check=True, timeout=60)


def test_streams_choose_levels_by_time(rng, tmp_path):
    context = rng.standard_normal((2, 2, 120, 3, 8)).astype(np.float32)
    profile = kvcodes.Profile.fit(context, "model", steps=[0.01, 0.5])
    store, tokens = kvcodes.Store(str(tmp_path)), list(range(120))
    space = store.space("model", profile, chunk=20, tail=10)
    assert space.put(tokens, context) == 6
    for seconds, levels in [(60.0, [0] * 5), (0.0, [1] * 5)]:
        out = np.zeros_like(context)
        loaded, chosen = space.stream(tokens, out, seconds)
        assert loaded == 120 and chosen[1:] == levels
        assert np.abs(out - context).max() < 0.5
    assert space.stream([7], out, 1.0) == (0, [])
    with pytest.raises(kvcodes.ArgumentError):
        space.stream(tokens, out, -1.0)
    with pytest.raises(kvcodes.ArgumentError):
        space.stream(tokens, out, 1.0, first_level=2)
    salted = store.space("model", profile, chunk=20, tail=10, salt="tenant")
    assert salted.find(tokens) == 0 and salted.put(tokens, context) == 6
    assert store.space("model", profile, chunk=20, tail=10, salt=b"tenant").find(tokens) == 120


SHAPE = (2, 2, 64, 2, 16)


def page_of(i: int) -> bytes:
    """The page number ``i``."""
    return bf16(np.random.default_rng(i), SHAPE).tobytes()


def test_64_threads(tmp_path):
    pages = kvcodes.Store(str(tmp_path)).pages("model", "2LTHD", SHAPE)
    truth = [page_of(i) for i in range(16)]
    barrier, stored = threading.Barrier(64), [0] * 64

    def work(thread: int) -> None:
        rng, out = np.random.default_rng(thread), bytearray(len(truth[0]))
        barrier.wait()
        for i in rng.permutation(16).tolist():
            stored[thread] += pages.put(f"page {i}", truth[i])
            assert pages.get(f"page {i}", out) and bytes(out) == truth[i]

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(work, range(64)))
    assert sum(stored) >= 16 and len(files(tmp_path, "chunks")) == 16
    assert len(files(tmp_path, "data")) == 16  # writers that came second have deleted theirs


WRITER = """
import os, sys
sys.path.insert(0, %r)
import test_pages, kvcodes
pages = kvcodes.Store(sys.argv[1]).pages("model", "2LTHD", test_pages.SHAPE)
for i in map(int, sys.argv[2].split(",")):
    pages.put(f"page {i}", test_pages.page_of(i))
    os.write(1, b"%%d\\n" %% i)  # acknowledged
"""


def writer(program: str, folder, numbers) -> "subprocess.Popen[bytes]":
    program %= os.path.dirname(os.path.abspath(__file__))
    arguments = [sys.executable, "-c", program, str(folder), ",".join(map(str, numbers))]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


def collect(lines, found: set[int]) -> None:
    for line in lines:
        found.add(int(line))


def killed_writers(program: str, folder, rng: np.random.Generator) -> set[int]:
    """Two writers of the same 40 pages, killed at random: the numbers of those that they acknowledged."""
    both = [writer(program, folder, rng.permutation(40).tolist()) for _ in range(2)]
    lines, readers = [set(), set()], []
    for process, found in zip(both, lines, strict=True):
        readers.append(threading.Thread(target=collect, args=(process.stdout, found)))
        readers[-1].start()
    while not all(lines) and all(process.poll() is None for process in both):
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.15))
    for process in both:
        process.kill()
    for reader, process in zip(readers, both, strict=True):
        reader.join()
        process.wait()
    return lines[0] | lines[1]


def test_two_processes_that_are_killed_lose_nothing(tmp_path):
    rng, acknowledged = np.random.default_rng(3), set()
    for _ in range(4):
        acknowledged |= killed_writers(WRITER, tmp_path, rng)
        pages = kvcodes.Store(str(tmp_path)).pages("model", "2LTHD", SHAPE)
        out = bytearray(pages.nbytes)
        for i in range(40):
            found = pages.get(f"page {i}", out)
            assert found or i not in acknowledged, i
            assert not found or bytes(out) == page_of(i), i
    assert acknowledged
    assert pages.put("after", page_of(99)) and pages.get("after", out) and bytes(out) == page_of(99)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk(small_disk):
    pages = kvcodes.Store(str(small_disk), retry=1).pages("model", "2LTHD", SHAPE)
    stored, refused = [], 0
    for i in range(60):
        try:
            pages.put(f"page {i}", page_of(i))
            stored.append(i)
        except kvcodes.StoreError:
            refused += 1
    assert stored and refused
    out = bytearray(pages.nbytes)
    for i in range(60):
        found = pages.get(f"page {i}", out)
        assert found == (i in stored), i
        assert not found or bytes(out) == page_of(i), i
    for i in stored[: len(stored) // 2 + 1]:
        pages.delete(f"page {i}")
    assert pages.put("page 59", page_of(59)) and pages.get("page 59", out) and bytes(out) == page_of(59)
