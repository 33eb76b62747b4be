"""What the doors into engines share: the pages of an engine in a store, on threads."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ._kvcodes import Pages, Profile, Store
from .errors import ArgumentError

logger = logging.getLogger("kvcodes")

Result = bool | Exception


class EnginePages:
    """The pages of an engine, of one shape, by the models and the parts of models that they belong to.

    ``url``, ``settings`` and ``retry`` are those of ``Store``; ``order``, ``shape`` and ``dtype`` those of
    ``Store.pages``. ``profile`` is the file of a profile (``Profile.to_bytes``), at whose ``level`` pages are
    loaded; without it they keep every bit. ``threads`` encode, decode and wait for the store at once. """

    def __init__(
        self,
        url: str,
        order: str,
        shape: Sequence[int],
        dtype: str = "bf16",
        *,
        profile: str | None = None,
        level: int = 0,
        threads: int = 4,
        retry: float = 5.0,
        settings: dict[str, str] | None = None,
    ) -> None:
        read = Profile.from_bytes(Path(profile).read_bytes()) if profile else None
        if not 0 <= level < (read.levels if read else 1):
            raise ArgumentError(f"level {level} of a profile with {read.levels if read else 1}")
        self._store = Store(url, settings=settings or {}, retry=retry)
        self._geometry = order, tuple(shape)
        self._options = {"dtype": dtype, "profile": read}
        self._level = level
        self._opened: dict[tuple[str, str], Pages] = {}
        self._threads = ThreadPoolExecutor(threads, "kvcodes")
        self.of("", "")  # wrong settings are an error here, not at the first page

    def of(self, model: str, part: str) -> Pages:
        """The pages of a part of a model."""
        pages = self._opened.get((model, part))
        if pages is None:
            opened = self._store.pages(model, *self._geometry, part=part, **self._options)
            pages = self._opened.setdefault((model, part), opened)
        return pages

    def get(self, pages: Pages, key: str | bytes, out: Any) -> bool:
        return pages.get(key, out, level=self._level)

    def start(
        self, call: Callable[..., bool], rows: Iterable[Sequence[Any]], done: Callable[[list[Result]], None]
    ) -> None:
        """Calls ``call`` with each of ``rows`` on the threads, then ``done`` with results or exceptions."""
        futures = [self._threads.submit(call, *row) for row in rows]
        if not futures:
            return done([])
        lock, left = threading.Lock(), len(futures)

        def ended(_: Future[bool]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            done([_result(future) for future in futures])

        for future in futures:
            future.add_done_callback(ended)

    def run(self, call: Callable[..., bool], rows: Iterable[Sequence[Any]]) -> list[bool]:
        """Calls ``call`` with each of ``rows`` on the threads, and waits. A logged failure is False."""
        futures = [self._threads.submit(call, *row) for row in rows]
        return [succeeded(_result(future)) for future in futures]

    def close(self) -> None:
        """Waits for calls under way; those that have not begun are cancelled."""
        self._threads.shutdown(cancel_futures=True)


def _result(future: "Future[bool]") -> Result:
    try:
        return future.result()
    except Exception as e:  # of the call, or that it was cancelled
        return e


def succeeded(result: Result) -> bool:
    """The result of a call; False for an exception, which is logged."""
    if isinstance(result, Exception):
        logger.warning("%s: %s", type(result).__name__, result)
        return False
    return result
