"""A secondary tier of vLLM's KV offloading (0.32): chunks leave the CPU's memory for a store.

``--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
"secondary_tiers": [{"type": "KvCodesTier", "module_path": "kvcodes.vllm", "url": "/caches", "kv_heads": 8,
"head_dim": 128}]}}'``

vLLM does not say how many heads a model has: ``kv_heads`` (those of the whole model) and ``head_dim`` are
needed. ``order`` and ``shape`` (as of ``Store.pages``) replace what follows from vLLM's configuration; a wrong
order costs bytes, and with a profile accuracy. The other parameters are those of ``EnginePages``. """

import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ._engine import EnginePages, Result, succeeded
from ._kvcodes import Pages
from .errors import ArgumentError, UnsupportedError

Geometry = tuple[str, tuple[int, ...]]


def geometry(config: Any, kv_heads: int, head_dim: int) -> Geometry:
    """The order and the shape of a chunk in the CPU's memory: of each worker its layers, blocks and heads."""
    if len(config.groups) != 1 or config.replicated_layout:
        raise UnsupportedError("models with several groups of layers, or with latent attention")
    parallel = config.parallel
    if parallel.pp_size * parallel.pcp_size * parallel.dcp_size != 1:
        raise UnsupportedError("pipeline and context parallelism, unless `order` and `shape` are given")
    if config.kv_cache_layout is None:
        raise UnsupportedError("a cache of unknown layout, unless `order` and `shape` are given")
    workers, heads = parallel.world_size, max(1, kv_heads // parallel.tp_size)
    if config.canonical_layout:
        workers, heads = 1, kv_heads
    # vLLM's letters: N tokens of a block, C the content of a head, its key and its value.
    order = "W" + config.kv_cache_layout.replace("N", "T").replace("C", "2D")
    (group,) = config.groups
    sizes = {"W": workers, "L": len(group.layer_names), "B": config.cache.blocks_per_chunk, "2": 2}
    sizes |= {"T": group.tokens_per_block, "H": heads, "D": head_dim}
    return order, tuple(sizes[letter] for letter in order)


class KvCodesTier(SecondaryTierManager):
    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        url: str,
        kv_heads: int = 0,
        head_dim: int = 0,
        order: str | None = None,
        shape: Sequence[int] | None = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        config = offloading_spec.config
        if order is None or shape is None:
            order, shape = geometry(config, kv_heads, head_dim)
        dtype = str(config.model.dtype).removeprefix("torch.")
        self._pages = EnginePages(url, order, shape, dtype, **options)
        parallel = config.parallel
        ranks = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
        self._model: Pages = self._pages.of(config.model.name, f"vllm {ranks} {order} {tuple(shape)}")
        chunk = prod(shape) * {"float32": 4, "f32": 4}.get(dtype, 2)
        # A chunk's slot is rounded up to pages of the system.
        slot = primary_kv_view.strides[0]
        if not chunk <= slot < chunk + mmap.PAGESIZE:
            raise ArgumentError(f"chunks of {chunk} B ({order} {tuple(shape)} {dtype}) in slots of {slot} B")
        self._chunks = np.asarray(primary_kv_view).view(np.uint8)[:, :chunk]
        self._lookups = _Lookups(tier_type, self._pages, self._model)
        self._idle = threading.Condition()
        self._running = 0
        self._finished: list[JobResult] = []
        self._loads: dict[int, list[OffloadKey]] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        def store(key: OffloadKey, chunk: int) -> bool:
            self._model.put(bytes(key), self._chunks[chunk])
            return True

        self._submit(job_metadata, store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        def load(key: OffloadKey, chunk: int) -> bool:
            return self._pages.get(self._model, bytes(key), self._chunks[chunk])

        self._loads[job_metadata.job_id] = list(job_metadata.keys)
        self._submit(job_metadata, load)

    def _submit(self, job: TransferJob, call: Any) -> None:
        keys, start = list(job.keys), time.monotonic()

        def done(results: list[Result]) -> None:
            moved = [key for key, result in zip(keys, results, strict=True) if succeeded(result)]
            result = JobResult(
                job_id=job.job_id,
                success=len(moved) == len(keys),
                successful_keys=tuple(moved) if job.is_promotion and 0 < len(moved) < len(keys) else None,
                transfer_time=time.monotonic() - start,
                transfer_bytes=len(moved) * self._chunks.shape[1],
            )
            with self._idle:
                self._finished.append(result)
                self._running -= 1
                self._idle.notify_all()

        with self._idle:
            self._running += 1
        self._pages.start(call, zip(keys, job.chunk_ids.tolist(), strict=True), done)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._idle:
            finished, self._finished = self._finished, []
        for result in finished:
            keys = self._loads.pop(result.job_id, [])
            if not result.success:
                loaded = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in keys if key not in loaded])
        return finished

    def has_pending_work(self) -> bool:
        with self._idle:
            return bool(self._running or self._finished)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._running)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._pages.close()
        del self._chunks  # vLLM closes the memory


class _Lookups(AsyncLookupManager):
    def __init__(self, tier_type: str, pages: EnginePages, model: Pages) -> None:
        self._pages, self._model = pages, model
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._pages.run(self._model.__contains__, ((bytes(key),) for key in keys))
