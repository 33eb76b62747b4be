"""Caches of codes for transformers: ``CodesCache`` and the attention function ``"kvcodes"``, on the CPU.

    from kvcodes.transformers import CodesCache, calibrate

    calibration = calibrate(model, tokenizer(texts).input_ids)
    model.generate(**inputs, cache=CodesCache(model, calibration))

A prompt attends to its own exact rows, and every later token to the codes. The cache hands its layer to the
attention function with the keys that ``update`` returns, so that models run unchanged. """

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from os import PathLike
from typing import Any, Literal

import safetensors.torch
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import (
    ArgumentError,
    Basis,
    Codebook,
    FormatError,
    LayerCache,
    ProductQuantizer,
    ScalarQuantizer,
    UnsupportedError,
)

__all__ = ["ATTENTION", "Calibration", "CodesCache", "CodesLayer", "calibrate"]

ATTENTION = "kvcodes"
"""The name of the attention function."""

SINKS = 4
"""Leading tokens that calibration skips: caches keep them exact, and their norms are outliers."""

COPIES = 4
"""Positions of each key that codebooks are trained on: at its own alone, they know no others."""

FEWEST = 64
"""The fewest tokens to calibrate on."""

SEED = 0x6B76
"""Of the training of codebooks; that of ``kv calibrate``."""

ITERATIONS = 8
"""Of the training of codebooks; the default of ``kv calibrate``, whose entries name it."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose RoPE rotates component ``i`` with ``i + head_dim / 2``, all of them."""

Dtype = Literal["f32", "f16", "bf16"]
DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class _Geometry:
    """What caches and calibration need to know of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        if config.model_type not in FAMILIES:
            raise UnsupportedError(
                f"models of type {config.model_type}: expected one of {', '.join(FAMILIES)}"
            )
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
            raise UnsupportedError("layers of sliding windows")
        if (
            getattr(config, "sliding_window", None) is not None
            and getattr(config, "layer_types", None) is None
        ):
            raise UnsupportedError("layers of sliding windows")
        rope = model.base_model.rotary_emb
        if getattr(rope, "rope_type", "default") in ("dynamic", "longrope"):
            raise UnsupportedError(f"RoPE of type {rope.rope_type}: its frequencies change with the length")
        self.config = config
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.frequencies = rope.inv_freq.detach().float().cpu()
        self.positions = min(config.max_position_embeddings, 1 << 17)


def _rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotates rows (..., n, dim) by RoPE to positions (n,), or back from them if they are negative."""
    angles = positions.double()[:, None] * frequencies.double()
    cos, sin = angles.cos(), angles.sin()
    low, high = rows.double().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).float()


# Calibration


class Calibration:
    """What codes need to know of a model: means, bases and codebooks by layer and head.

    Entries have the names of ``kv calibrate``'s, whose profiles ``load`` reads too.
    """

    def __init__(self, entries: dict[str, torch.Tensor], frequencies: torch.Tensor | None = None) -> None:
        self.entries = entries
        self.frequencies = frequencies

    def save(self, path: str | PathLike[str]) -> None:
        entries = dict(self.entries)
        if self.frequencies is not None:
            entries["frequencies"] = self.frequencies
        safetensors.torch.save_file(entries, path, metadata={"format": "kvcodes-1"})

    @staticmethod
    def load(path: str | PathLike[str]) -> Calibration:
        """Reads what ``save`` or ``kv calibrate`` wrote."""
        with _format_errors(path), safetensors.safe_open(path, "pt") as file:
            entries = {name: file.get_tensor(name) for name in file.keys()}
        return Calibration(entries, entries.pop("frequencies", None))

    def _entry(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.entries:
            raise ArgumentError(f"the calibration has no entry {name}: calibrate for this method and setting")
        entry = self.entries[name]
        if entry.dtype != torch.float32 or entry.numel() != torch.Size(shape).numel():
            raise FormatError(
                f"the entry {name} has {entry.numel()} elements of {entry.dtype}, expected {shape}"
            )
        return entry.reshape(shape)

    def _scalar(self, geometry: _Geometry, layer: int, settings: dict[str, Any]) -> ScalarQuantizer:
        dim, bits = geometry.dim, dict(settings)
        block = bits.pop("block")
        shapes = {
            "mean": (dim,),
            "basis": (dim, dim),
            "dual": (dim, dim),
            "sigma": (dim,),
            "value-mean": (dim,),
            "value-scale": (1,),
        }

        def basis(head: int) -> Basis:
            name = f"sq/{block}/{layer}/{head}"
            *parts, scale = (self._entry(f"{name}/{part}", *shape) for part, shape in shapes.items())
            return Basis(*parts, scale.item(), block=block)

        return ScalarQuantizer([basis(h) for h in range(geometry.kv_heads)], geometry.frequencies, **bits)

    def _product(self, geometry: _Geometry, layer: int, settings: dict[str, Any]) -> ProductQuantizer:
        def book(side: str, head: int) -> Codebook:
            m, nbits = settings[side]
            name = _codebook(side, m, nbits, layer, head)
            if m < 1 or geometry.dim % m or not 1 <= nbits <= 12:
                raise ArgumentError(
                    f"{side}=({m}, {nbits}) does not divide heads of {geometry.dim} components"
                )
            return Codebook(self._entry(name, m, 1 << nbits, geometry.dim // m))

        heads = range(geometry.kv_heads)
        return ProductQuantizer([book("k", h) for h in heads], [book("v", h) for h in heads])


@contextlib.contextmanager
def _format_errors(path: str | PathLike[str]) -> Iterator[None]:
    try:
        yield
    except safetensors.SafetensorError as e:
        raise FormatError(f"{path}: {e}") from e


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    *,
    methods: Sequence[str] = ("sq",),
    tokens: int = 4096,
    block: int = 64,
    k: tuple[int, int] | None = None,
    v: tuple[int, int] | None = None,
) -> Calibration:
    """Runs the model over at most ``tokens`` tokens of ``texts``, in turns of 128, and fits what ``methods``
    need.

    Take texts of several kinds: what is fitted to one may lose quality on another. ``sq`` needs means and
    second moments for a ``block``, for any number of bits; ``million`` codebooks of ``k`` and ``v``, each
    (subspaces, bits), by default 8 bits for two components. """
    geometry = _Geometry(model)
    if unknown := set(methods) - {"sq", "million"}:
        raise ArgumentError(f"unknown methods: {', '.join(sorted(unknown))}")
    ids = _mixed([list(text) for text in texts], min(tokens, geometry.positions))
    if len(ids) < FEWEST:
        raise ArgumentError(f"{len(ids)} tokens to calibrate on: expected at least {FEWEST}")
    books = {"k": k or (geometry.dim // 2, 8), "v": v or (geometry.dim // 2, 8)}
    entries: dict[str, torch.Tensor] = {}

    def record(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        queries, keys, values = (x[0, :, SINKS:].transpose(0, 1).float().cpu() for x in (query, key, value))
        if "sq" in methods:
            bases = Basis.fit_layer(
                keys, queries, values, geometry.frequencies, block=block, rotated_from=SINKS
            )
            for head, basis in enumerate(bases):
                entries.update(_parts(f"sq/{block}/{layer}/{head}", basis))
        if "million" in methods:
            before = -torch.arange(SINKS, SINKS + len(keys))
            keys = _rotate(keys.transpose(0, 1), before, geometry.frequencies)
            for head in range(geometry.kv_heads):
                entries.update(_fit_product(layer, head, books, geometry, keys[head], values[:, head]))

    token = _RECORD.set(record)
    try:
        with _attention(model), torch.no_grad():
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        _RECORD.reset(token)
    return Calibration(entries, geometry.frequencies)


def _mixed(texts: list[list[int]], n: int) -> list[int]:
    """The first tokens of each text in equal shares, in turns."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    left = n
    for done, i in enumerate(order):
        texts[i] = texts[i][: left // (len(texts) - done)]
        left -= len(texts[i])
    turns = max((len(text) for text in texts), default=0)
    return [id for at in range(0, turns, 128) for text in texts for id in text[at : at + 128]]


def _codebook(side: str, m: int, nbits: int, layer: int, head: int) -> str:
    """The name of the entry."""
    return f"million/{m}x{nbits}/{ITERATIONS}/0/{side}/{layer}/{head}/centroids"


def _parts(name: str, basis: Basis) -> dict[str, torch.Tensor]:
    """The entries of a head's basis."""
    parts = {
        "mean": basis.mean,
        "basis": basis.basis,
        "dual": basis.dual,
        "sigma": basis.sigma,
        "value-mean": basis.value_mean,
    }
    entries = {f"{name}/{part}": _tensor(rows) for part, rows in parts.items()}
    return entries | {f"{name}/value-scale": torch.tensor([basis.value_scale])}


def _fit_product(
    layer: int,
    head: int,
    books: dict[str, tuple[int, int]],
    geometry: _Geometry,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The codebooks of a head, from rows (n, dim) before RoPE. Keys are at positions all over the context."""
    copies = keys.repeat(COPIES, 1)
    share = (torch.arange(len(copies)).double() * 0.618_033_988_749_894_9).frac()
    positions = SINKS + (share * (geometry.positions - SINKS)).long()
    rows = {"k": _rotate(copies, positions, geometry.frequencies), "v": values}
    entries = {}
    for side, (m, nbits) in books.items():
        book = Codebook.train(rows[side].contiguous(), m, nbits, iterations=ITERATIONS, seed=SEED)
        entries[_codebook(side, m, nbits, layer, head)] = _tensor(book.centroids)
    return entries


def _tensor(rows: memoryview) -> torch.Tensor:
    return torch.frombuffer(rows, dtype=torch.float32)


@contextlib.contextmanager
def _attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# The cache


class CodesCache(Cache):
    """A cache of codes for a model on the CPU, which is set to the attention function of this module.

    ``method`` is ``"sq"`` (scalar codes, which hold on any text) or ``"million"`` (product codes). Settings
    of ``sq``: ``key_bits`` (3.0), ``value_bits`` (3), ``block`` (64; 256 is less work, and fewer bits
    from some ten thousand tokens on), ``mean_error``. Settings of ``million``: ``k``, ``v``, each
    (subspaces, bits). Exact rows: ``sinks`` first and ``recent`` last tokens, which leave in multiples of
    ``batch``, as elements of ``dtype`` (that of the model). """

    layers: list[CodesLayer]  # type: ignore[assignment]

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        method: str = "sq",
        *,
        sinks: int = 4,
        recent: int = 64,
        batch: int | None = None,
        dtype: Dtype | None = None,
        **settings: Any,
    ) -> None:
        geometry = _Geometry(model)
        if calibration.frequencies is not None and not torch.equal(
            calibration.frequencies, geometry.frequencies
        ):
            raise ArgumentError("the calibration is of a model with other frequencies of RoPE")
        defaults: dict[str, Any] = {
            "sq": {"key_bits": 3.0, "value_bits": 3, "block": 64, "mean_error": None},
            "million": {"k": (geometry.dim // 2, 8), "v": (geometry.dim // 2, 8)},
        }
        if method not in defaults:
            raise ArgumentError(f"unknown method {method}: expected one of {', '.join(defaults)}")
        if unknown := set(settings) - set(defaults[method]):
            raise ArgumentError(f"{method} has no setting {', '.join(sorted(unknown))}")
        settings = defaults[method] | settings
        make: Callable[..., Any] = {"sq": calibration._scalar, "million": calibration._product}[method]
        window = {"sinks": sinks, "recent": recent, "batch": 1 if batch is None else batch}
        layers = [
            CodesLayer(geometry.config, make(geometry, layer, settings), dtype=dtype, **window)
            for layer in range(geometry.layers)
        ]
        super().__init__(layers=layers)
        model.set_attn_implementation(ATTENTION)

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens, without what sequences share."""
        return sum(sequence.nbytes for layer in self.layers for sequence in layer.sequences)

    @property
    def shared_nbytes(self) -> int:
        """Bytes that all sequences share: codebooks, or transforms."""
        return sum(layer.quantizer.nbytes for layer in self.layers)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the tokens; ``load`` needs a cache of the same model, calibration and settings."""
        tensors = {
            f"{l}/{i}": torch.frombuffer(bytearray(sequence.to_bytes()), dtype=torch.uint8)
            for l, layer in enumerate(self.layers)
            for i, sequence in enumerate(layer.sequences)
        }
        state = [{"seen": layer.seen, "pads": layer.pads} for layer in self.layers]
        safetensors.torch.save_file(
            tensors, path, metadata={"format": "kvcodes-cache-1", "layers": json.dumps(state)}
        )

    def load(self, path: str | PathLike[str]) -> None:
        """Replaces the tokens by saved ones. After an error the cache is as before."""
        with _format_errors(path), safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != "kvcodes-cache-1":
                raise FormatError(f"{path}: not a saved cache")
            try:
                state = [
                    (int(layer["seen"]), [int(n) for n in layer["pads"]])
                    for layer in json.loads(metadata["layers"])
                ]
            except (KeyError, TypeError, ValueError) as e:
                raise FormatError(f"{path}: the lengths of the sequences are damaged") from e
            if len(state) != len(self.layers):
                raise FormatError(f"{path}: {len(state)} layers, expected {len(self.layers)}")
            names = {f"{l}/{i}" for l, (_, pads) in enumerate(state) for i in range(len(pads))}
            if names != set(file.keys()):
                raise FormatError(f"{path}: sequences are missing")
            read = [
                [
                    LayerCache.from_bytes(layer.quantizer, file.get_tensor(f"{l}/{i}").numpy().tobytes())
                    for i in range(len(state[l][1]))
                ]
                for l, layer in enumerate(self.layers)
            ]
        for (seen, pads), sequences in zip(state, read, strict=True):
            if any(len(sequence) + n != seen for sequence, n in zip(sequences, pads, strict=True)):
                raise FormatError(f"{path}: the lengths of the sequences differ")
        for layer, (seen, pads), sequences in zip(self.layers, state, read, strict=True):
            layer.sequences, layer.pads, layer.seen = sequences, pads, seen
            layer.is_initialized, layer.waits = bool(sequences), False


class CodesLayer(CacheLayerMixin):
    """The keys and values of a layer for a batch of sequences, which may be padded on the left."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        config: Any,
        quantizer: ProductQuantizer | ScalarQuantizer,
        *,
        dtype: Dtype | None,
        **window: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.quantizer = quantizer
        self.dtype = dtype
        self.window = window
        self.sequences: list[LayerCache] = []
        self.pads: list[int] = []  # before the first token of each sequence
        self.seen = 0  # tokens of the longest sequence, and the padding of all others
        self.waits = False  # for the attention function, which appends what `update` has got

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.device.type != "cpu":
            raise UnsupportedError(f"a cache on {key_states.device}: expected a model on the CPU")
        if key_states.dtype not in DTYPES:
            raise UnsupportedError(f"a model of {key_states.dtype}")
        dtype = self.dtype or DTYPES[key_states.dtype]
        batch = key_states.shape[0]
        self.sequences = [LayerCache(self.quantizer, dtype=dtype, **self.window) for _ in range(batch)]
        self.pads = [0] * batch
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new rows to the attention function, which appends them."""
        if self.config._attn_implementation != ATTENTION:
            raise UnsupportedError(
                f'the model attends by "{self.config._attn_implementation}", not by "{ATTENTION}"'
            )
        if self.waits:
            raise UnsupportedError("the last step did not end in the attention function: reset the cache")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.sequences):
            raise ArgumentError(
                f"a batch of {key_states.shape[0]}, a cache of {len(self.sequences)} sequences"
            )
        self.waits = True
        # A view, so that the mark is on no tensor of the model.
        key_states = key_states.view_as(key_states)
        setattr(key_states, _LAYER, self)
        return key_states, value_states

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Appends the rows (batch, heads, tokens, head_dim) of a step and attends to all tokens: (batch,
        tokens, query heads, head_dim)."""
        if torch.is_grad_enabled() and query.requires_grad:
            raise UnsupportedError("gradients: run under torch.no_grad()")
        batch, heads, tokens, dim = query.shape
        pads = self._new_pads(attention_mask, tokens)
        if isinstance(self.quantizer, ScalarQuantizer):
            self._check_positions(kwargs.get("position_ids"), pads, tokens)
        prompt = None
        if self.seen == 0:
            prompt, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        out = torch.empty(batch, tokens, heads, dim, dtype=query.dtype) if prompt is None else prompt
        rows = [x.detach().transpose(1, 2) for x in (query, key, value)]
        for i, (sequence, pad) in enumerate(zip(self.sequences, pads, strict=True)):
            of_query, of_key, of_value = (x[i, pad:] for x in rows)
            sequence.append(of_key, of_value)
            if prompt is None and pad < tokens:
                out[i, :pad] = 0
                sequence.attend(of_query, scale=scaling, softcap=kwargs.get("softcap"), out=out[i, pad:])
        self.pads = [before + pad for before, pad in zip(self.pads, pads, strict=True)]
        self.seen += tokens
        self.waits = False
        return out

    def _new_pads(self, mask: torch.Tensor | None, tokens: int) -> list[int]:
        """The padding among the new tokens of each sequence."""
        if mask is None:
            padding = None
        elif not hasattr(mask, _PADDING):
            raise UnsupportedError(
                "a mask of the caller: expected one of tokens that are padding, (batch, tokens)"
            )
        else:
            padding = getattr(mask, _PADDING)
        if padding is None:
            return [0] * len(self.sequences)
        real = padding.sum(1).tolist()
        seen = self.seen + tokens
        pads = [seen - n for n in real]
        firsts = padding.int().argmax(1).tolist()
        for i, (pad, before, first) in enumerate(zip(pads, self.pads, firsts, strict=True)):
            # A sequence that is padding up to here has no first token.
            on_the_left = pad == first or real[i] == 0
            known = pad == before or (pad > before and len(self.sequences[i]) == 0)
            if padding.shape[1] != seen or not on_the_left or not known:
                raise UnsupportedError("padding that is not on the left, or other tokens that the mask hides")
        return [pad - before for pad, before in zip(pads, self.pads, strict=True)]

    def _check_positions(self, positions: torch.Tensor | None, pads: list[int], tokens: int) -> None:
        """Scalar codes are relative to blocks of positions: a sequence's first token must be at 0."""
        if positions is None:
            return
        last = positions.expand(len(pads), -1)[:, -1].tolist()
        for sequence, pad, position in zip(self.sequences, pads, last, strict=True):
            if pad < tokens and position != len(sequence) + tokens - pad - 1:
                raise UnsupportedError(
                    f"the last of {len(sequence) + tokens - pad} tokens is at position {position}: pass position_ids "
                    "that count from each sequence's first token"
                )

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.sequences, self.pads, self.seen = [], [], 0
        self.is_initialized = self.waits = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens. Codes stay codes."""
        if tokens_to_remove > 0:
            raise ArgumentError("crop takes minus the number of tokens to remove")
        self.seen = max(self.seen + tokens_to_remove, 0)
        self.pads = [min(pad, self.seen) for pad in self.pads]
        for sequence, pad in zip(self.sequences, self.pads, strict=True):
            sequence.truncate(self.seen - pad)

    def _take(self, indices: list[int]) -> None:
        """Keeps these sequences, in this order; copies those that occur again."""
        taken: set[int] = set()
        sequences = []
        for i in indices:
            sequences.append(self.sequences[i].copy() if i in taken else self.sequences[i])
            taken.add(i)
        self.sequences, self.pads = sequences, [self.pads[i] for i in indices]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.is_initialized:
            self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take(torch.arange(len(self.sequences))[indices].tolist())

    def offload(self) -> None:
        raise UnsupportedError("offloading: the cache is in the memory of the host")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> CodesLayer:
        """Copies the tokens, and shares quantizer and configuration."""
        other = copy.copy(self)
        other.sequences = [sequence.copy() for sequence in self.sequences]
        other.pads = list(self.pads)
        return other


# What the model calls

_LAYER = "_kvcodes_layer"
"""The mark of keys: the layer of the cache that gets them."""

_PADDING = "_kvcodes_padding"
"""The mark of masks: the padding that they are made of, (batch, tokens), or none."""

_Record = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
_RECORD: ContextVar[_Record | None] = ContextVar("kvcodes_record", default=None)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention to the layer of a ``CodesCache`` that the keys are marked with, else that of PyTorch."""
    if (record := _RECORD.get()) is not None:
        record(module.layer_idx, query, key, value)
    layer: CodesLayer | None = getattr(key, _LAYER, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return layer.attend(module, query, key, value, attention_mask, scaling, **kwargs), None


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """PyTorch's mask, with the padding that it is made of."""
    mask = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    if mask is not None:
        setattr(mask, _PADDING, attention_mask)
    return mask


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)
