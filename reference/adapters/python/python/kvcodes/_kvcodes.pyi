from collections.abc import Sequence
from typing import Any, Literal, Protocol, SupportsIndex

from typing_extensions import Buffer

class _Dlpack(Protocol):
    def __dlpack__(self) -> object: ...

Array = Buffer | _Dlpack | View
"""Elements of f32, f16 or bf16 in the memory of the host, with any strides that are not negative."""

Dtype = Literal["f32", "f16", "bf16"]

class View:
    """Elements in bytes that Python knows no type of: bf16, or an engine's pool. Strides are in elements."""

    def __init__(
        self,
        buffer: Buffer,
        dtype: Dtype,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def dtype(self) -> str: ...

class Codebook:
    """The centroids of a product quantizer: (m, ksub, dsub), with ``ksub = 2 ** nbits``."""

    def __init__(self, centroids: Array) -> None: ...
    @staticmethod
    def train(vectors: Array, m: int, nbits: int = 8, *, iterations: int = 25, seed: int = 0) -> Codebook:
        """k-means on vectors (n, dim). A seed gives the same bytes for any number of threads."""

    @staticmethod
    def gaussian(dim: int, m: int, nbits: int = 8) -> Codebook:
        """For rows in a Hadamard basis that are divided by their norms: needs no data."""

    def encode(self, vectors: Array) -> Codes: ...
    @property
    def centroids(self) -> memoryview: ...
    @property
    def dim(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def nbits(self) -> int: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Codebook: ...

class Codes:
    """Vectors as packed codes of a codebook."""

    def append(self, vectors: Array) -> float:
        """Encodes vectors (n, dim), and returns their summed squared error."""

    def decode(self, *, out: Array | None = None) -> Any: ...
    def truncate(self, n: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def codebook(self) -> Codebook: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(codebook: Codebook, data: bytes) -> Codes: ...

def search(codes: Codes, queries: Array, k: int) -> tuple[memoryview, memoryview]:
    """The ``k`` codes of the highest inner products with ``queries`` (n, dim): indices and scores, (n, k)."""

def attend(
    queries: Array,
    keys: Codes,
    values: Codes,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    out: Array | None = None,
) -> Any:
    """Attention of the queries of a head, (query heads, dim), over keys and values that are codes.

    ``scale`` is ``1 / sqrt(dim)`` by default.
    """

class ProductQuantizer:
    """The codebooks of a layer: one of keys and one of values for every KV head."""

    def __init__(self, keys: Sequence[Codebook], values: Sequence[Codebook]) -> None: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def to_bytes(self) -> list[bytes]:
        """The bytes of the codebooks of each head."""

    @staticmethod
    def from_bytes(heads: Sequence[bytes]) -> ProductQuantizer: ...

class Basis:
    """The basis of a head with scalar codes, for any number of bits.

    ``mean`` (dim,) is that of keys before RoPE; ``basis``, ``dual`` (dim, dim) and ``sigma`` (dim,) are those
    of ``Rotation.query_metric``, for keys without their mean and relative to the middle of their block of
    ``block`` tokens. ``value_scale``, a power of two, is the unit of the norms of values without their mean
    ``value_mean``: codes hold those of 2^-8 to 2^8 of it. """

    def __init__(
        self,
        mean: Array,
        basis: Array,
        dual: Array,
        sigma: Array,
        value_mean: Array,
        value_scale: float,
        *,
        block: int = 64,
    ) -> None: ...
    @staticmethod
    def fit_layer(
        keys: Array,
        queries: Array,
        values: Array,
        frequencies: Array,
        *,
        block: int = 64,
        rotated_from: int | None = None,
    ) -> list[Basis]:
        """Fits the bases of all KV heads to keys and values (tokens, KV heads, head_dim) and queries (tokens,
        query heads, head_dim) of any text, without its first few tokens.

        ``frequencies`` (head_dim / 2,) are RoPE's radians per position, of pairs ``i`` and
        ``i + head_dim / 2``. Keys and queries are those before RoPE, or after it with the first of them at
        position ``rotated_from``. """

    @property
    def mean(self) -> memoryview: ...
    @property
    def basis(self) -> memoryview: ...
    @property
    def dual(self) -> memoryview: ...
    @property
    def sigma(self) -> memoryview: ...
    @property
    def value_mean(self) -> memoryview: ...
    @property
    def value_scale(self) -> float: ...
    @property
    def block(self) -> int: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Basis: ...

class ScalarQuantizer:
    """The bases of a layer at some number of bits, for scalar codes of keys after RoPE and of values: a basis
    for every KV head, and the ``frequencies`` that they were fitted with.

    ``key_bits`` are in eighths. The default of ``mean_error`` is whether values have 1 or 2 bits. """

    def __init__(
        self,
        bases: Sequence[Basis],
        frequencies: Array,
        *,
        key_bits: float = 3.0,
        value_bits: int = 3,
        mean_error: bool | None = None,
    ) -> None: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bits(self) -> list[tuple[float, float]]: ...
    def to_bytes(self) -> list[bytes]:
        """The bytes of each head."""

    @staticmethod
    def from_bytes(heads: Sequence[bytes]) -> ScalarQuantizer: ...

class LayerCache:
    """The keys and values of a layer of one sequence: the first ``sinks`` and at least the last ``recent``
    tokens as exact rows of ``dtype``, all others as codes. Tokens leave the window ``batch`` at a time, with
    scalar codes in whole blocks.

    Keys are those after RoPE; the first token is at position 0. Several threads may attend at once; to append
    meanwhile is a ``RuntimeError``. After an error the cache is as before.
    """

    def __init__(
        self,
        quantizer: ProductQuantizer | ScalarQuantizer,
        *,
        sinks: int = 4,
        recent: int = 64,
        batch: int = 32,
        dtype: Dtype = "f32",
    ) -> None: ...
    def append(self, keys: Array, values: Array) -> None:
        """Appends rows (tokens, KV heads, head_dim)."""

    def attend(
        self,
        queries: Array,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        out: Array | None = None,
    ) -> Any:
        """Attention of ``queries`` (tokens, query heads, head_dim), those of the last tokens, causally.

        ``window`` is the number of tokens that a query sees, its own included. The result is (tokens, query
        heads, dim of the values). """

    def truncate(self, len: int) -> None:
        """Keeps the first ``len`` tokens. Codes stay codes: the window refills from the next token on."""

    def copy(self) -> LayerCache: ...
    def __copy__(self) -> LayerCache: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache: ...
    def __len__(self) -> int: ...
    @property
    def coded(self) -> int:
        """Tokens that are codes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens, without the quantizer."""

    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def quantizer(self) -> ProductQuantizer | ScalarQuantizer: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(quantizer: ProductQuantizer | ScalarQuantizer, data: bytes) -> LayerCache: ...

class Hadamard:
    """The Hadamard transform with fixed signs of rows (..., dim)."""

    def __init__(self, dim: int) -> None: ...
    @property
    def dim(self) -> int: ...
    def forward(self, rows: Array, *, out: Array | None = None) -> Any: ...
    def inverse(self, rows: Array, *, out: Array | None = None) -> Any: ...

class Rotation:
    """A basis and its dual, (dim, dim): column ``c`` gives component ``c`` of a stored row and of a query. At
    full rank ``q . k = (q @ dual) . (k @ basis)``. ``sigma`` (dim,) are the deviations of the components."""

    @staticmethod
    def principal(rows: Array) -> Rotation:
        """The principal directions of rows (n, dim)."""

    @staticmethod
    def query_metric(rows: Array, queries: Array) -> Rotation:
        """The directions of rows (n, dim) in the metric of queries: the least error of inner products."""

    @property
    def dim(self) -> int: ...
    @property
    def basis(self) -> memoryview: ...
    @property
    def dual(self) -> memoryview: ...
    @property
    def sigma(self) -> memoryview: ...

class Profile:
    """The planes of a model, which encode contexts (layers, 2, tokens, heads, head_dim) as frames."""

    @staticmethod
    def fit(
        rows: Array,
        model: int | str,
        *,
        steps: Sequence[float] = (0.1, 0.25, 0.5),
        lossless: bool = False,
        keys_rotated: bool = True,
    ) -> Profile:
        """Fits a level for each of ``steps``, in deviations of each channel, to the rows of a sample text.

        ``lossless`` adds a first level that keeps every bit of f16 or bf16 rows. """

    def encode(self, rows: Array, *, level: int = 0, first_token: int = 0) -> bytes: ...
    def decode(self, frame: bytes, out: Array) -> None:
        """Writes a frame's rows to ``out`` of their shape. After an error its contents are undefined."""

    @property
    def levels(self) -> int: ...
    def is_lossless(self, level: int) -> bool: ...
    @property
    def model_id(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def keys_rotated(self) -> bool: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Profile: ...

class Frame:
    """What the header of a frame says; its checksum is verified, the payload is not."""

    @staticmethod
    def parse(data: bytes) -> Frame: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def first_token(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def level(self) -> int: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def keys_rotated(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def model_id(self) -> int: ...

class Store:
    """Caches in a folder, in memory (``memory:///``) or, in a build with the feature ``s3``, in a bucket
    (``s3://BUCKET/PATH``).

    ``settings`` are those of the bucket, such as ``aws_endpoint``, before those of the environment. ``retry``
    is the number of seconds for which the store may be away before calls fail. """

    def __init__(self, url: str, *, settings: dict[str, str] = {}, retry: float = 60.0) -> None: ...
    def space(
        self,
        model: str,
        profile: Profile,
        *,
        chunk: int = 1500,
        tail: int = 100,
        salt: str | bytes | None = None,
    ) -> Space:
        """The caches of a model, which ``model`` names with its revision, under a profile.

        ``salt`` separates rows that differ though their tokens do not: those of an adapter, of a rank of
        tensor parallelism, of a tenant that shares no caches. """

    def pages(
        self,
        model: str,
        order: str,
        shape: Sequence[int],
        *,
        dtype: Dtype = "bf16",
        part: str = "",
        profile: Profile | None = None,
    ) -> Pages:
        """Pages of a model; ``part`` names the part of it that they hold, such as a rank of tensor parallelism.

        ``order`` has a letter for each dimension of ``shape``, the outermost first: ``2`` (keys, values),
        ``L`` (layers), ``T`` (tokens), ``H`` (KV heads) and at the end ``D`` (components); ``B`` for blocks of
        ``T`` tokens and ``W`` for workers of ``L`` layers, if there are several. Without a profile pages keep
        every bit; with one they are stored at all of its levels. """

class Pages:
    """Pages of one shape under keys that the engine makes. Methods may be called by many threads at once.

    Arrays are of the pages' shape, with any strides, or flat, or contiguous bytes without a type. """

    def put(self, key: str | bytes, page: Array) -> bool:
        """Stores a page. Returns whether it was missing; when it returns, all processes find it."""

    def get(self, key: str | bytes, out: Array, *, level: int = 0) -> bool:
        """Decodes a page to ``out``, and returns whether it was there; if not, rows may have been written.

        A damaged page is deleted, and was not there. """

    def __contains__(self, key: str | bytes) -> bool: ...
    def delete(self, key: str | bytes) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes of a page in memory."""

class Space:
    """Contexts in chunks of tokens. Those with the same beginning share chunks."""

    def put(self, tokens: Sequence[SupportsIndex], rows: Array) -> int:
        """Stores rows (layers, 2, tokens, heads, head_dim). Returns the number of chunks that were missing."""

    def find(self, tokens: Sequence[SupportsIndex]) -> int:
        """Tokens of the longest stored prefix."""

    def load(self, tokens: Sequence[SupportsIndex], out: Array, *, level: int = 0) -> int:
        """Decodes the longest stored prefix to the first rows of ``out``. Returns its number of tokens."""

    def stream(
        self, tokens: Sequence[SupportsIndex], out: Array, seconds: float, *, first_level: int | None = None
    ) -> tuple[int, list[int]]:
        """As ``load``, each chunk at the least lossy level at which the rest is expected within ``seconds``.

        The first chunk has ``first_level``, by default the middle one. Returns the tokens and the levels. """
