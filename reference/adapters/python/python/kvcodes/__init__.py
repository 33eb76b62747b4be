"""Compressed KV caches: codes that attention reads as they are.

Arrays are objects with the buffer protocol or DLPack, in the memory of the host: of NumPy, of torch, or a
``View`` of bytes. Elements are f32, f16 or bf16. Results are written to ``out`` or returned as memory views,
which ``numpy.asarray`` takes without a copy. Calls release the interpreter's lock; do not write to an
argument while a call runs. """

from ._kvcodes import (
    Basis,
    Codebook,
    Codes,
    Frame,
    Hadamard,
    LayerCache,
    Pages,
    ProductQuantizer,
    Profile,
    Rotation,
    ScalarQuantizer,
    Space,
    Store,
    View,
    attend,
    search,
)
from .errors import ArgumentError, ElementError, Error, FormatError, StoreError, UnsupportedError

__all__ = [
    "ArgumentError",
    "Basis",
    "Codebook",
    "Codes",
    "ElementError",
    "Error",
    "FormatError",
    "Frame",
    "Hadamard",
    "LayerCache",
    "Pages",
    "ProductQuantizer",
    "Profile",
    "Rotation",
    "ScalarQuantizer",
    "Space",
    "Store",
    "StoreError",
    "UnsupportedError",
    "View",
    "attend",
    "search",
]
