"""LMCache's connector: its protocol on file descriptors, then LMCache's own storage manager over it."""

import argparse
import ctypes
import json
import select
import threading
import time

import numpy as np
import pytest
from conftest import settings
from test_pages import bf16, killed_writers, small_disk  # noqa: F401

import kvcodes
from kvcodes.lmcache import Connector

SHAPE = (2, 3, 16, 2, 8)
NBYTES = 2 * int(np.prod(SHAPE))


def key(i: int, rank: int = 0x02000100, salt: str = "") -> str:
    """The name of an object as LMCache writes it."""
    return f"org/model@{rank:08x}@0@{i:064x}" + (f"@{salt}" if salt else "")


def memory(data: bytes) -> memoryview:
    """A view of ctypes' bytes, whose format is `<B`, as LMCache's."""
    return memoryview((ctypes.c_ubyte * len(data)).from_buffer_copy(data))


class Client:
    """What `NativeConnectorL2Adapter` does: submits batches and waits for the file descriptor."""

    def __init__(self, folder, **options):
        self.connector = Connector(url=str(folder), shape=SHAPE, **options)
        self.poll = select.poll()
        self.poll.register(self.connector.event_fd(), select.POLLIN)
        self.ended = {}

    def wait(self, batch):
        deadline = time.monotonic() + 60
        while batch not in self.ended:
            assert self.poll.poll(1000) or time.monotonic() < deadline
            for number, *completion in self.connector.drain_completions():
                assert number not in self.ended
                self.ended[number] = completion
        return self.ended.pop(batch)

    def set(self, keys, objects):
        return self.wait(self.connector.submit_batch_set(keys, objects))

    def get(self, keys, objects):
        return self.wait(self.connector.submit_batch_get(keys, objects))


@pytest.fixture
def objects(rng):
    return [bf16(rng, SHAPE).tobytes() for _ in range(6)]


def test_batches_end_as_completions(tmp_path, objects):
    client = Client(tmp_path)
    keys = [key(i) for i in range(6)]
    assert client.wait(client.connector.submit_batch_exists(keys)) == [True, "", [False] * 6]
    assert client.set(keys, [memory(data) for data in objects]) == [True, "", [True] * 6]
    out = [memory(bytes(NBYTES)) for _ in keys]
    assert client.get([*keys[:5], key(99)], out) == [True, "", [True] * 5 + [False]]
    assert [bytes(view) for view in out[:5]] == objects[:5]
    assert client.wait(client.connector.submit_batch_delete(keys[:1])) == [True, "", [True]]
    exists = client.connector.submit_batch_exists([*keys, key(0, rank=1), key(1, salt="tenant")])
    assert client.wait(exists) == [True, "", [False] + [True] * 5 + [False, False]]
    assert client.wait(client.connector.submit_batch_exists([])) == [True, "", []]
    assert client.connector.drain_completions() == []
    client.connector.close()


def test_wrong_short_and_foreign_objects_are_refused(tmp_path, objects):
    client = Client(tmp_path)
    ok, error, stored = client.set(
        [key(0), key(1), key(2), "no@key"],
        [memory(objects[0]), memory(objects[1][:-2]), memory(objects[2] * 2), memory(objects[3])],
    )
    assert not ok and stored == [True, False, False, False] and "expected" in error
    out = [memory(bytes(n)) for n in (NBYTES, 10, NBYTES)]
    ok, error, loaded = client.get([key(0), key(0), "no@key"], out)
    assert not ok and loaded == [True, False, False]
    other = Connector(url=str(tmp_path), shape=(2, 16, 3, 2, 8), order="2TLHD")  # as many bytes
    other.submit_batch_get([key(0)], [memory(bytes(NBYTES))])
    other.submit_batch_exists([key(0)])
    while len(completions := other.drain_completions()) == 0:
        select.select([other.event_fd()], [], [], 10)
    other.close()
    assert all(found == [False] for _, _, _, found in completions)
    for wrong in [dict(shape=[2, 3]), dict(shape=SHAPE, dtype="fp8"), dict(shape=SHAPE, level=1)]:
        with pytest.raises(kvcodes.Error):
            Connector(url=str(tmp_path), **wrong)
    client.connector.close()


def test_64_batches_at_once(tmp_path, objects):
    client, keys = Client(tmp_path, threads=16), [key(i) for i in range(6)]
    batches = [client.connector.submit_batch_set(keys, [memory(data) for data in objects]) for _ in range(64)]
    assert all(client.wait(batch)[0] for batch in batches)
    out = [[memory(bytes(NBYTES)) for _ in keys] for _ in range(64)]
    batches = [client.connector.submit_batch_get(keys, views) for views in out]
    assert all(client.wait(batch) == [True, "", [True] * 6] for batch in batches)
    assert all([bytes(view) for view in views] == objects for views in out)
    client.connector.close()


WRITER = """
import os, sys
sys.path.insert(0, %r)
import test_lmcache as test
client = test.Client(sys.argv[1])
for i in map(int, sys.argv[2].split(",")):
    if client.set([test.key(i)], [test.memory(test.page_of(i))])[0]:
        os.write(1, b"%%d\\n" %% i)
"""


def page_of(i: int) -> bytes:
    """The page number ``i``."""
    return bf16(np.random.default_rng(i), SHAPE).tobytes()


def whole(client: Client, i: int) -> bool:
    """Whether a page is found, which must then be the right one."""
    out = memory(bytes(NBYTES))
    ok, _, (found,) = client.get([key(i)], [out])
    assert ok and (not found or bytes(out) == page_of(i)), i
    return found


def test_two_processes_that_are_killed_lose_nothing(tmp_path):
    rng, acknowledged = np.random.default_rng(5), set()
    for _ in range(3):
        acknowledged |= killed_writers(WRITER, tmp_path, rng)
        client = Client(tmp_path)
        assert acknowledged <= {i for i in range(40) if whole(client, i)}
        client.connector.close()
    assert acknowledged


def test_a_full_disk(small_disk):
    client = Client(small_disk, retry=1)
    stored = [client.set([key(i)], [memory(page_of(i))])[0] for i in range(100)]
    assert True in stored and False in stored
    assert [whole(client, i) for i in range(100)] == stored
    client.connector.close()


def test_closing_ends_what_is_under_way(tmp_path, objects):
    client = Client(tmp_path, threads=1)
    for i in range(32):
        client.connector.submit_batch_set([key(i)], [memory(objects[0])])
    client.connector.close()
    assert threading.active_count() < 32
    with pytest.raises(RuntimeError):
        client.connector.submit_batch_set([key(0)], [memory(objects[0])])


def test_the_settings_of_the_page_are_those_of_the_connector(tmp_path):
    found = settings("lmcache", tmp_path)
    assert (found["module_path"], found["class_name"]) == ("kvcodes.lmcache", "Connector")
    Connector(**found["adapter_params"]).close()


def lmcache_manager(adapter: dict):
    """LMCache's storage manager with this adapter below a few MB of memory."""
    config = pytest.importorskip("lmcache.v1.distributed.config", exc_type=ImportError)
    from lmcache.v1.distributed.storage_manager import StorageManager

    parser = config.add_storage_manager_args(argparse.ArgumentParser())
    arguments = ["--l1-size-gb", "0.25", "--l1-use-lazy", "--eviction-policy", "LRU"]
    return StorageManager(
        config.parse_args_to_config(parser.parse_args([*arguments, "--l2-adapter", json.dumps(adapter)]))
    )


def test_lmcaches_storage_manager_stores_evicts_and_loads(tmp_path, rng):
    adapter = settings("lmcache", tmp_path)
    adapter["adapter_params"]["shape"] = SHAPE
    manager = lmcache_manager(adapter)
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec

    layout = MemoryLayoutDesc([torch.Size((2, 3, 16, 16))], [torch.bfloat16])
    keys = [ObjectKey(bytes([i]) * 32, "org/model", 0x02000100, 0, "") for i in range(4)]
    pages = [bf16(rng, SHAPE).tobytes() for _ in keys]
    try:
        reserved = manager.reserve_write(keys, layout)
        for name, page in zip(keys, pages, strict=True):
            reserved[name].byte_array.cast("B")[:] = page
        manager.finish_write(keys)
        deadline = time.monotonic() + 60
        while sum(path.parts[-2] == "chunks" for path in tmp_path.rglob("*")) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while manager.delete_l1_keys(keys)[1]:  # still locked by the store task
            assert time.monotonic() < deadline
            time.sleep(0.05)
        wanted = [*keys, ObjectKey(b"x" * 32, "org/model", 0x02000100, 0, "")]
        handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(wanted, 0, layout)]))
        assert manager.wait_prefetch_status(handle, 60)
        result = manager.query_prefetch_status(handle)
        assert (result.l1_hit_count, result.l2_hit_count) == (0, 4)
        with manager.read_prefetched_results(keys) as loaded:
            assert [bytes(found.byte_array) for found in loaded] == pages
        manager.finish_read_prefetched(keys)
    finally:
        manager.close()
