"""SGLang's factory makes the backend; pages are those of its host pool."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import settings
from test_pages import bf16, killed_writers, small_disk  # noqa: F401

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed", exc_type=ImportError)

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

import kvcodes  # noqa: E402

LAYERS, PAGE, HEADS, DIM, PAGES = 3, 16, 2, 8, 6
DIMS = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
}


class Pool(SimpleNamespace):
    """The host pool of `sglang/srt/mem_cache/pool_host/mha.py`, which imports GPU packages: its fields and page
    functions."""

    def __init__(self, layout: str, /, **fields):
        super().__init__(
            layout=layout,
            layer_num=LAYERS,
            page_size=PAGE,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=torch.bfloat16,
            kv_buffer=torch.zeros(DIMS[layout], dtype=torch.bfloat16),
        )
        vars(self).update(fields)

    def get_data_page(self, index, flat=True):
        match self.layout:
            case "layer_first":
                page = self.kv_buffer[:, :, index : index + PAGE]
            case "page_first":
                page = self.kv_buffer[:, index : index + PAGE]
            case _:
                page = self.kv_buffer[:, index // PAGE : index // PAGE + 1]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self):
        return torch.zeros(2 * LAYERS * PAGE * HEADS * DIM, dtype=torch.bfloat16)


def backend(folder, layout: str, rank: int = 0, pool: Pool | None = None, **extra):
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=layout.startswith("page_first"),
        model_name="org/model",
        extra_config=settings("sglang", folder) | extra,
    )
    pool = pool or Pool(layout)
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made, pool


def fill(pool: Pool, rng) -> torch.Tensor:
    bits = torch.from_numpy(bf16(rng, tuple(pool.kv_buffer.shape)).view(np.int16))
    pool.kv_buffer.copy_(bits.view(torch.bfloat16))
    return pool.kv_buffer.clone()


KEYS = [f"{i:064x}" for i in range(PAGES)]
INDICES = torch.arange(PAGES * PAGE)


@pytest.mark.parametrize("layout", DIMS)
def test_pages_of_the_pool_come_back(tmp_path, rng, layout):
    storage, pool = backend(tmp_path, layout)
    truth = fill(pool, rng)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS[:4], INDICES[: 4 * PAGE]) == [True] * 4
    assert storage.batch_exists(KEYS) == 4 and storage.exists(KEYS[3]) and not storage.exists(KEYS[4])
    another, empty = backend(tmp_path, layout)
    assert another.batch_get_v1(KEYS[:5], INDICES[: 5 * PAGE]) == [True] * 4 + [False]
    for i in range(4):
        found, page = empty.get_data_page(i * PAGE), pool.get_data_page(i * PAGE)
        assert torch.equal(found.view(torch.int16), page.view(torch.int16))
    assert not empty.get_data_page(4 * PAGE).any() and torch.equal(pool.kv_buffer, truth)
    # The interface of flat copies.
    flat = pool.get_data_page(5 * PAGE)
    assert storage.batch_set([KEYS[5]], [flat]) and storage.set(KEYS[5], flat)
    targets = [pool.get_dummy_flat_data_page() for _ in range(2)]
    hit, miss = another.batch_get([KEYS[5], "none"], targets)
    assert torch.equal(hit.view(torch.int16), flat.view(torch.int16)) and miss is None
    assert another.get("none", targets[0]) is None
    for other in [backend(tmp_path, layout, rank=1)[0], backend(tmp_path, layout, model="other")[0]]:
        assert other.batch_exists(KEYS) == 0


def test_damage_and_wrong_pools_are_refused(tmp_path, rng):
    storage, pool = backend(tmp_path, "layer_first")
    fill(pool, rng)
    storage.batch_set_v1(KEYS[:2], INDICES[: 2 * PAGE])
    for path in tmp_path.rglob("*"):
        if path.is_file() and "data" in path.parts:
            path.write_bytes(path.read_bytes()[:-2] + b"no")
    assert storage.batch_get_v1(KEYS[:2], INDICES[: 2 * PAGE]) == [False, False]
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS[:2], INDICES[: 2 * PAGE]) == [True, True]
    assert not storage.set("key", torch.zeros(7, dtype=torch.bfloat16))
    for pool in [Pool("layer_first", layout="page_unified"), Pool("layer_first", v_head_dim=4)]:
        with pytest.raises(kvcodes.UnsupportedError):
            backend(tmp_path, "layer_first", pool=pool)
    with pytest.raises(kvcodes.ElementError):
        backend(tmp_path, "layer_first", pool=Pool("layer_first", dtype=torch.float8_e4m3fn))


def page_of(i: int) -> torch.Tensor:
    """The page number ``i``, flat."""
    bits = bf16(np.random.default_rng(i), (2, LAYERS, PAGE, HEADS, DIM)).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).flatten()


def keep(storage, pool: Pool, i: int) -> bool:
    """Whether the backend says that it has stored the page number ``i``, from the pool's first one."""
    pool.get_data_page(0, flat=False).copy_(page_of(i).view(2, LAYERS, PAGE, HEADS, DIM))
    return storage.batch_set_v1([f"{i:064x}"], INDICES[:PAGE]) == [True]


def whole(storage, pool: Pool, i: int) -> bool:
    """Whether the page number ``i`` is found, which must then be the right one."""
    (found,) = storage.batch_get_v1([f"{i:064x}"], INDICES[:PAGE])
    assert not found or torch.equal(pool.get_data_page(0).view(torch.int16), page_of(i).view(torch.int16)), i
    return found


WRITER = """
import os, sys
sys.path.insert(0, %r)
import test_sglang as test
storage, pool = test.backend(sys.argv[1], "layer_first")
for i in map(int, sys.argv[2].split(",")):
    if test.keep(storage, pool, i):
        os.write(1, b"%%d\\n" %% i)
"""


def test_two_processes_that_are_killed_lose_nothing(tmp_path):
    rng, acknowledged = np.random.default_rng(5), set()
    for _ in range(2):
        acknowledged |= killed_writers(WRITER, tmp_path, rng)
        storage, pool = backend(tmp_path, "layer_first")
        assert acknowledged <= {i for i in range(40) if whole(storage, pool, i)}
    assert acknowledged


def test_a_full_disk(small_disk):  # noqa: F811
    storage, pool = backend(small_disk, "layer_first", retry=1)
    stored = [keep(storage, pool, i) for i in range(100)]
    assert True in stored and False in stored
    assert [whole(storage, pool, i) for i in range(100)] == stored
