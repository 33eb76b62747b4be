"""A storage backend of SGLang's hierarchical cache (0.5.23), loaded as ``dynamic``.

``--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name": "kvcodes", "module_path": "kvcodes.sglang", "class_name": "KvCodesStorage",
"interface_v1": 1, "url": "/caches"}'``

``interface_v1`` saves a copy of each page. Shapes are those of the host pool; the other parameters are those
of ``EnginePages``. """

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from ._engine import EnginePages
from ._kvcodes import Pages
from .errors import UnsupportedError

ORDERS = {
    "layer_first": "2LTHD",
    "page_first": "2TLHD",
    "page_first_direct": "2BLTHD",
    "page_head": "2BHTLD",
}
"""The dimensions of a page of the host pool, by the pool's layout; ``B`` is one page."""

OURS = {"backend_name", "module_path", "class_name", "interface_v1"}
"""Settings of SGLang beside those of ``EnginePages``."""


class KvCodesStorage(HiCacheStorage):
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        if storage_config.is_mla_model:
            raise UnsupportedError("models with latent attention")
        extra = storage_config.extra_config or {}
        self._options = {name: value for name, value in extra.items() if name not in OURS}
        self._model = self._options.pop("model", storage_config.model_name)
        if not self._model:
            raise UnsupportedError("a model without a name: set `model`")
        config = storage_config
        self._part = (
            f"tp {config.tp_rank} of {config.tp_size}, pp {config.pp_rank} of {config.pp_size}, "
            f"cp {config.attn_cp_rank} of {config.attn_cp_size}"
        )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pool = mem_pool_host
        if pool.layout not in ORDERS or getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
            raise UnsupportedError(f"a host pool of layout `{pool.layout}`, keys and values of other lengths")
        order = ORDERS[pool.layout]
        sizes = {"2": 2, "B": 1, "L": pool.layer_num, "T": pool.page_size}
        sizes |= {"H": pool.head_num, "D": pool.head_dim}
        dtype = str(pool.dtype).removeprefix("torch.")
        self._pages = EnginePages(
            order=order, shape=[sizes[letter] for letter in order], dtype=dtype, **self._options
        )
        self._own: Pages = self._pages.of(self._model, self._part)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        found = self._pages.run(self._own.__contains__, ((key,) for key in keys))
        return found.index(False) if False in found else len(found)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._pages.run(self._put, zip(keys, self._slots(keys, host_indices), strict=True))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._pages.run(self._get, zip(keys, self._slots(keys, host_indices), strict=True))

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(self._pages.run(self._put, zip(keys, values or (), strict=True)))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Any] | None = None, target_sizes: Any = None
    ) -> list[Any]:
        targets = target_locations or ()
        found = self._pages.run(self._get, zip(keys, targets, strict=True))
        return [target if there else None for target, there in zip(targets, found, strict=True)]

    def _slots(self, keys: list[str], host_indices: Any) -> list[Any]:
        """The pages of the host pool from these tokens on, in place."""
        size = self.mem_pool_host.page_size
        first = host_indices.tolist()[::size]
        return [self.mem_pool_host.get_data_page(index, flat=False) for index in first[: len(keys)]]

    def _put(self, key: str, page: Any) -> bool:
        self._own.put(key, page)
        return True

    def _get(self, key: str, page: Any) -> bool:
        return self._pages.get(self._own, key, page)
