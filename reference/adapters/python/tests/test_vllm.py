"""vLLM's own tiering manager over the tier: chunks leave its memory, are found, and come back."""

import itertools
import time
import uuid

import numpy as np
import pytest
from conftest import settings
from test_pages import bf16, killed_writers, small_disk  # noqa: F401

pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="vLLM is not installed", exc_type=ImportError)

from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadingSpec,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

import kvcodes  # noqa: E402

LAYERS, BLOCKS, TOKENS, HEADS, DIM, SLOTS = 3, 2, 16, 4, 16, 8


class Spec(OffloadingSpec):
    def get_manager(self):
        raise NotImplementedError

    def get_worker(self, kv_caches):
        raise NotImplementedError


def spec(workers: int = 1, layout: str | None = "LBNHC", groups: int = 1) -> Spec:
    block = 2 * LAYERS * TOKENS * HEADS * DIM * 2 // workers
    layers = tuple(f"model.layers.{i}.self_attn" for i in range(LAYERS))
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, layers, i) for i in range(groups)),
        worker_kv_bytes_per_block=block,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig("org/model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, BLOCKS),
        parallel=OffloadingParallelConfig(0, workers, workers, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout=layout,
    )
    return Spec(config)


class Engine:
    """The tiering manager of an engine, and its memory."""

    def __init__(self, folder, workers: int = 1, slots: int = SLOTS, **tier):
        self.spec = spec(workers)
        self.nbytes = 2 * LAYERS * BLOCKS * TOKENS * HEADS * DIM * 2
        slot = -(-self.nbytes // 4096) * 4096
        region = SharedOffloadRegion(uuid.uuid4().hex, slots, None, slot, slot)
        primary = CPUPrimaryTierOffloadingManager(num_chunks=slots, mmap_region=region)
        (config,) = settings("vllm", folder)["kv_connector_extra_config"]["secondary_tiers"]
        config |= {"kv_heads": HEADS, "head_dim": DIM} | tier
        view = primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(config, view, self.spec)
        self.manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[self.tier])
        self.memory = np.asarray(view).view(np.uint8)

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        deadline = time.monotonic() + 60
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.005)
        self.step()

    def request(self, name: str) -> ReqContext:
        context = ReqContext(name)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, keys, pages) -> None:
        prepared = self.manager.prepare_store(keys, context)
        for key, slot in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
            self.memory[slot, : self.nbytes] = np.frombuffer(pages[keys.index(key)], np.uint8)
        self.manager.complete_store(prepared.keys_to_store, context)
        self.settle()

    def find(self, context: ReqContext, key) -> LookupResult:
        deadline = time.monotonic() + 60
        while (found := self.manager.lookup(key, context)) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.002)
        return found

    def transfer(self, submit, i: int) -> bool:
        """Whether the tier, alone, moves the chunk number ``i`` between its store and the first slot."""
        job = TransferJob(next(JOBS), [key_of(i)], np.array([0]), submit == self.tier.submit_load, ReqContext("a"))
        submit(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == job.job_id
        return result.success

    def keep(self, i: int) -> bool:
        """Whether the tier says that it has stored the chunk number ``i``."""
        self.memory[0, : self.nbytes] = np.frombuffer(page_of(i), np.uint8)
        return self.transfer(self.tier.submit_store, i)

    def whole(self, i: int) -> bool:
        """Whether the chunk number ``i`` is found, which must then be the right one."""
        self.memory[0] = 0
        found = self.transfer(self.tier.submit_load, i)
        assert not found or self.memory[0, : self.nbytes].tobytes() == page_of(i), i
        return found

    def load(self, context: ReqContext, key) -> bytes:
        (slot,) = self.manager.prepare_load([key], context).chunk_ids.tolist()
        found = self.memory[slot, : self.nbytes].tobytes()
        self.manager.complete_load([key], context)
        return found


JOBS = itertools.count()


def key_of(i: int):
    return make_offload_key(bytes([i]) * 32, 0)


def page_of(i: int) -> bytes:
    """The chunk number ``i``."""
    return bf16(np.random.default_rng(i), (LAYERS, BLOCKS, TOKENS, HEADS, 2, DIM)).tobytes()


KEYS = [key_of(i) for i in range(12)]


@pytest.fixture
def pages():
    return [page_of(i) for i in range(len(KEYS))]


@pytest.mark.parametrize("workers", [1, 2])
def test_chunks_leave_memory_and_come_back(tmp_path, pages, workers):
    engine = Engine(tmp_path, workers)
    context = engine.request("a")
    for i in range(0, 12, 4):
        engine.store(context, KEYS[i : i + 4], pages[i : i + 4])
    for key, page in zip(KEYS, pages, strict=True):  # through eight slots
        assert engine.find(context, key) is LookupResult.HIT
        assert engine.load(context, key) == page
    assert engine.find(context, make_offload_key(b"x" * 32, 0)) is LookupResult.MISS
    engine.manager.on_request_finished(context)
    engine.manager.reset_cache()
    context = engine.request("b")
    assert engine.find(context, KEYS[3]) is LookupResult.HIT and engine.load(context, KEYS[3]) == pages[3]
    engine.manager.on_request_finished(context)
    engine.close()
    another = Engine(tmp_path, workers)
    context = another.request("c")
    assert another.find(context, KEYS[7]) is LookupResult.HIT and another.load(context, KEYS[7]) == pages[7]
    other = Engine(tmp_path, 3 - workers)
    assert other.find(other.request("d"), KEYS[7]) is LookupResult.MISS
    another.close()
    other.close()


def test_damaged_chunks_are_misses(tmp_path, pages):
    engine = Engine(tmp_path, slots=2)
    context = engine.request("a")
    engine.store(context, KEYS[:2], pages[:2])
    engine.store(context, KEYS[2:4], pages[2:4])
    for path in tmp_path.rglob("*"):
        if path.is_file() and "data" in path.parts:
            path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    context = engine.request("b")
    assert engine.find(context, KEYS[0]) is LookupResult.MISS
    engine.store(context, KEYS[:1], pages[:1])
    engine.store(context, KEYS[2:4], pages[2:4])
    engine.manager.on_request_finished(context)  # vLLM keeps the miss until then
    assert engine.find(engine.request("c"), KEYS[0]) is LookupResult.HIT
    engine.close()


def test_what_the_tier_cannot_know_is_refused(tmp_path):
    for wrong in [{"kv_heads": 2}, {"head_dim": 0}, {"order": "2LTHD", "shape": [2, 3, 4, 5, 6]}, {"level": 1}]:
        with pytest.raises(kvcodes.Error):
            Engine(tmp_path, **wrong)
    for wrong in [spec(layout=None), spec(groups=2)]:
        view = memoryview(np.zeros((2, 4096), np.int8))
        config = {"type": "KvCodesTier", "module_path": "kvcodes.vllm", "url": str(tmp_path)}
        with pytest.raises(kvcodes.UnsupportedError):
            SecondaryTierFactory.create_secondary_tier(
                config | {"kv_heads": HEADS, "head_dim": DIM}, view, wrong
            )


def test_backpressure_of_vllm_drops_stores(tmp_path, pages):
    pressure = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    engine = Engine(tmp_path, backpressure=pressure)
    assert engine.tier.bp_detector is not None
    engine.store(engine.request("a"), KEYS[:4], pages[:4])
    engine.close()


WRITER = """
import os, sys
sys.path.insert(0, %r)
import test_vllm as test
engine = test.Engine(sys.argv[1], slots=1)
for i in map(int, sys.argv[2].split(",")):
    if engine.keep(i):
        os.write(1, b"%%d\\n" %% i)
"""


def test_two_processes_that_are_killed_lose_nothing(tmp_path):
    rng, acknowledged = np.random.default_rng(5), set()
    for _ in range(2):
        acknowledged |= killed_writers(WRITER, tmp_path, rng)
        engine = Engine(tmp_path, slots=1)
        assert acknowledged <= {i for i in range(40) if engine.whole(i)}
        engine.close()
    assert acknowledged


def test_a_full_disk(small_disk):  # noqa: F811
    engine = Engine(small_disk, slots=1, retry=1)
    stored = [engine.keep(i) for i in range(40)]
    assert True in stored and False in stored
    assert [engine.whole(i) for i in range(40)] == stored
    engine.close()
