"""A storage connector of LMCache (0.5.6) for its adapters of the type ``native_plugin``.

``--l2-adapter '{"type": "native_plugin", "module_path": "kvcodes.lmcache", "class_name": "Connector",
"adapter_params": {"url": "/caches", "shape": [2, 32, 256, 8, 128]}}'``

``shape`` is (2, layers, tokens of a chunk, KV heads, head_dim) of a worker's objects; the other parameters
are those of ``EnginePages``. Objects are named by model, rank, object group, hash and salt, as LMCache names
them. LMCache counts the capacity of an adapter in bytes of uncompressed objects. """

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

from ._engine import EnginePages, Result, succeeded
from .errors import ArgumentError

Completion = tuple[int, bool, str, list[bool] | None]


class Connector:
    """The methods that ``NativeConnectorL2Adapter`` calls: batches begin at once, and end as completions."""

    def __init__(self, url: str, shape: Sequence[int], *, order: str = "2LTHD", **options: Any) -> None:
        self._pages, self._order = EnginePages(url, order, shape, **options), order
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._completions: list[Completion] = []

    def event_fd(self) -> int:
        """A file descriptor that can be read when there are completions."""
        return self._event

    def submit_batch_set(self, keys: Sequence[str], objects: Sequence[memoryview]) -> int:
        return self._submit(self._set, keys, objects)

    def submit_batch_get(self, keys: Sequence[str], objects: Sequence[memoryview]) -> int:
        return self._submit(self._get, keys, objects)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._submit(self._exists, keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self._submit(self._delete, keys)

    def drain_completions(self) -> list[Completion]:
        """(batch, whether all succeeded, the first error, whether each did) of batches that have ended."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        with self._lock:
            completions, self._completions = self._completions, []
        return completions

    def close(self) -> None:
        self._pages.close()
        os.close(self._event)

    def _submit(self, call: Any, *columns: Sequence[Any]) -> int:
        batch = next(self._ids)

        def done(results: list[Result]) -> None:
            errors = [str(result) for result in results if isinstance(result, Exception)]
            found = [succeeded(result) for result in results]
            with self._lock:
                self._completions.append((batch, not errors, errors[0] if errors else "", found))
            os.eventfd_write(self._event, 1)

        self._pages.start(call, zip(*columns, strict=True), done)
        return batch

    def _named(self, key: str) -> tuple[Any, str]:
        """The pages of an object, and its key among them."""
        try:
            model, rank, group, name = key.split("@", 3)
        except ValueError:
            raise ArgumentError(f"`{key}` is not MODEL@RANK@GROUP@HASH") from None
        return self._pages.of(model, f"lmcache {rank}@{group} {self._order}"), name

    def _set(self, key: str, page: memoryview) -> bool:
        pages, name = self._named(key)
        pages.put(name, page)
        return True

    def _get(self, key: str, out: memoryview) -> bool:
        return self._pages.get(*self._named(key), out)

    def _exists(self, key: str) -> bool:
        pages, name = self._named(key)
        return name in pages

    def _delete(self, key: str) -> bool:
        pages, name = self._named(key)
        pages.delete(name)
        return True
