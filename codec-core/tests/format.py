#!/usr/bin/env python3
"""Reads any frame by FORMAT.md alone: a second implementation, to find gaps of the specification. Needs numpy.

    format.py PROFILE... FRAME          prints what the frame has: one line for each layer's keys and values
    format.py PROFILE... FRAME -o OUT   and writes the elements (layers, 2, tokens, heads, head_dim) to OUT: f32, or the
                                        bits of 16-bit elements of a lossless frame
    format.py                           decodes the test vectors and compares them with their elements

PROFILE is a profile (KVCM) or a plane (KVCP, KVCL; for any layer and side that was coded under it). FRAME is a frame (KVCC),
or a chunk (KVCS), whose frames are read one after the other.
"""

import argparse, math, pathlib, struct, sys, zlib
import numpy as np

F = np.float32
LARGEST = np.finfo(F).max
FOLDER = pathlib.Path(__file__).parent / "vectors"


class Bad(Exception):
    """A file that is not what FORMAT.md says."""


def check(condition, message="the coded data is corrupt"):
    if not condition:
        raise Bad(message)


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        check(self.at + n <= len(self.data), "the data ends too early")
        self.at += n
        return self.data[self.at - n : self.at]

    def unpack(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def floats(self, n):
        return np.frombuffer(self.take(4 * n), "<f4")


def zigzag_back(x):
    return x >> 1 ^ -(x & 1)


# Families
def tails():
    def student(u):
        v = math.sqrt(2) * u
        w = v / math.sqrt(4 + v * v)
        return 0.5 - 0.75 * w + 0.25 * w**3

    shapes = [
        lambda u: math.erfc(u / math.sqrt(2)) / 2,
        lambda u: 1 / (1 + math.exp(math.pi * u / math.sqrt(3))),
        lambda u: math.exp(-math.sqrt(2) * u) / 2,
        student,
    ]
    return [[round(2**20 * f(i / 16)) for i in range(161)] for f in shapes]


T = tails()
ROOT = [65536, 75281, 86475, 99334, 114105]


def family(byte):
    shape, scale = byte // 64, byte % 64
    low_bits = -(-(scale - 28) // 5) if scale > 28 else 0
    e = 41 - (scale - 5 * low_bits)

    def beyond(m):
        at = ((2 * m + 1) * 8 * (ROOT[e % 5] << (e // 5))) >> 5
        i, f = at >> 16, at & 65535
        return 0 if i >= 160 else T[shape][i] - (((T[shape][i] - T[shape][i + 1]) * f) >> 16)

    counts, m = [2**20 - 2 * beyond(0)], 1
    while m <= 31 and beyond(m - 1) - beyond(m) >= 64:
        counts += [beyond(m - 1) - beyond(m)] * 2
        m += 1
    counts.append(2 * beyond(m - 1))
    widths = [1 + (4096 - len(counts)) * c // sum(counts) for c in counts]
    widths[0] += 4096 - sum(widths)
    return low_bits, [sum(widths[:i]) for i in range(len(widths))] + [4096]


def table(words):
    starts = [int(x) for x in words[1:] if x < 4096]
    return int(words[0]), starts + [4096]


def opened(data, magic, *versions):
    """The fields of a form that ends with its CRC-32."""
    check(data[:4] == magic, f"not a {magic.decode()}")
    check(len(data) > 8 and data[4] in versions, f"{magic.decode()} of an unknown version")
    check(
        zlib.crc32(data[:-4]) == struct.unpack("<I", data[-4:])[0],
        f"{magic.decode()} does not match its checksum",
    )
    return Reader(data[5:-4])


class Plane:
    lossless = False
    mantissa = None

    def __init__(self, data, transform=None):
        """`transform`: another plane, whose transform this one has."""
        r = opened(data, b"KVCP", 2, 3)
        self.predictor, self.levels, models, self.range, zero = r.unpack("5B")
        check(zero == 0)
        self.group, channels, dim = r.unpack("HII")
        self.channels, self.dim, self.coefficients = channels, dim, channels
        if data[4] == 3:
            (self.coefficients,) = r.unpack("I")
            check(self.coefficients < channels, "coefficients of a square transform")
        n = self.coefficients
        self.mean = r.floats(channels)
        self.factors = r.floats(n) if self.predictor == 1 else np.zeros(n, F)
        self.steps = r.floats(n) if self.levels == 0 else np.array([], F)
        self.centroids = r.floats(2)
        heads = channels // dim if dim else 0
        check(heads == 0 or channels == heads * dim and n % heads == 0, "heads of different ranks")
        shapes = [(heads, dim, -1), (heads, -1, dim)] if dim else []
        self.maps = [r.floats(n * dim).reshape(shape) for shape in shapes]
        if models == 0:
            raw = r.take(n)
            self.models = [[family(byte)] for byte in raw]
        else:
            raw = r.take(2 * 65 * n * models)
            words = np.frombuffer(raw, "<u2").reshape(n, models, 65)
            self.models = [[table(words[c, k]) for k in range(models)] for c in range(n)]
        check(r.at == len(r.data), "there are bytes after the end of the plane")
        if transform:
            check(dim == 0 and transform.dim, "a transform that is not shared")
            check(self.coefficients == transform.coefficients, "a transform of another rank")
            self.dim, self.maps = transform.dim, transform.maps
        numbers = [self.mean, self.factors if self.predictor == 1 else [], self.steps, self.centroids]
        numbers += [m.ravel() for m in self.maps]
        rank = struct.pack("<I", self.maps[1].shape[1]) if self.coefficients < channels else b""
        head = struct.pack("<BHBBI", self.predictor, self.group, self.levels, self.range, self.dim)
        numbers = b"".join(np.asarray(x, "<f4").tobytes() for x in numbers)
        self.id = zlib.crc32(head + rank + numbers + bytes([models]) + raw)


class LosslessPlane:
    lossless = True

    def __init__(self, data):
        r = opened(data, b"KVCL", 1)
        self.mantissa, zero, self.channels = r.unpack("BHI")
        check(self.mantissa in (7, 10) and zero == 0)
        self.tops = np.frombuffer(r.take(self.channels), np.uint8)
        raw = r.take(2 * 65 * self.channels)
        self.models = [[table(words)] for words in np.frombuffer(raw, "<u2").reshape(-1, 65)]
        check(r.at == len(r.data), "there are bytes after the end of the plane")
        self.id = zlib.crc32(bytes([self.mantissa]) + self.tops.tobytes() + b"\1" + raw)


def planes(data):
    """The planes of a profile or of a file with one plane."""
    if data[:4] == b"KVCP":
        return [Plane(data)]
    if data[:4] == b"KVCL":
        return [LosslessPlane(data)]
    r = opened(data, b"KVCM", 1)
    rotated, levels, layers, heads, dim, model = r.unpack("BHIIIQ")
    check(rotated <= 1 and 1 <= levels <= 256 and layers > 0, "a profile with a field of an unknown value")
    all = []
    first = None  # the planes of the first level with loss
    for _ in range(levels):
        level = []
        for i in range(2 * layers):
            kind, length = r.unpack("BI")
            check(kind <= 2 and (kind != 1 or first), "a transform that is not shared")
            data = r.take(length)
            level.append(LosslessPlane(data) if kind == 2 else Plane(data, first[i] if kind == 1 else None))
            check(level[i].channels == heads * dim, "planes of different numbers of channels")
            same = level[i].lossless == level[0].lossless
            check(same and level[i].mantissa == level[0].mantissa, "planes of different kinds in a level")
        first = first or (None if level[0].lossless else level)
        all += level
    check(r.at == len(r.data), "there are bytes after the end of the profile")
    return all


def context(k, code, low_bits):
    if k == 1 or code is None or code >> low_bits == 0:
        return 0
    return 1 if (code >> low_bits) % 2 else 2


def find(starts, slot):
    symbol = max(i for i, s in enumerate(starts[:-1]) if s <= slot)
    return symbol, starts[symbol], starts[symbol + 1] - starts[symbol]


def decode_rans(data, models, rows):
    r, lanes = Reader(data), len(models)
    warmup, carrying = r.unpack("HI")
    nibbles = r.take(-(-lanes // 2))
    lengths = [16 + (nibbles[i // 2] >> 4 * (i % 2) & 15) for i in range(lanes)]
    bits = int.from_bytes(r.take(-(-sum(lengths) // 8)), "little")
    x = []
    for n in lengths:
        x.append(1 << n | bits & ((1 << n) - 1))
        bits >>= n
    check(bits == 0)
    out, last = [], [None] * lanes
    any_low = any(m[0][0] for m in models)
    for t in range(rows + 1):
        if t == rows - warmup:
            for i in range(lanes):
                x[i] -= 65536 * (carrying >> i & 1)
                check(x[i] >= 0)
        if t == rows:
            break
        row = []

        def refill(i):
            if t < rows - warmup and x[i] < 65536:
                x[i] = x[i] << 16 | r.unpack("H")[0]

        for i in range(lanes):
            low, starts = models[i][context(len(models[i]), last[i], models[i][0][0])]
            slot = x[i] & 4095
            symbol, start, width = find(starts, slot)
            x[i] = width * (x[i] >> 12) + slot - start
            row.append(None if symbol == len(starts) - 2 else symbol << low)
        for i in range(lanes):
            refill(i)
        if any_low:
            for i in range(lanes):
                b = models[i][0][0]
                if row[i] is not None:
                    row[i] |= x[i] & ((1 << b) - 1)
                x[i] >>= b
            for i in range(lanes):
                refill(i)
        out.append(row)
        last = row
    check(x == [0] * lanes)
    return out, r.at


def decode_range(data, models, rows):
    at, rng, code = 4, 2**32 - 1, int.from_bytes(data[:4], "big")
    out, last = [], [None] * len(models)
    for _ in range(rows):
        row = []
        for i, model in enumerate(models):
            low, starts = model[context(len(model), last[i], model[0][0])]
            for k in (12, low):
                unit = rng >> k
                slot = min(code // unit, 2**k - 1)
                symbol, start, width = find(starts, slot) if k == 12 else (slot, slot, 1)
                code -= unit * start
                rng = unit * width
                while rng < 2**24:
                    code, rng, at = code << 8 | data[at], rng << 8, at + 1
                if k == 12:
                    value, high = (None if symbol == len(starts) - 2 else symbol), symbol
                    if value is None:
                        break
                else:
                    value = high << low | symbol
                if low == 0:
                    break
            row.append(value)
        out.append(row)
        last = row
    return out, at


def decode_tile(data, plane, first, lanes, rows):
    """Bins, and the exponent of a tile without prediction."""
    kind, a, b, c = data[:4]
    if kind == 0:
        bits = int.from_bytes(data[4:], "little")
        get = lambda i: zigzag_back(bits >> a * i & ((1 << a) - 1))
        return [[get(t * lanes + i) for i in range(lanes)] for t in range(rows)], b
    escapes = b | c << 8
    at = 4
    models = plane.models[first : first + lanes]
    if kind == 2:
        models = [[family(byte)] for byte in data[4 : 4 + lanes]]
        at += lanes + lanes % 2
    end = len(data) - 2 * escapes - a
    codes, used = (decode_range if kind == 3 else decode_rans)(data[at:end], models, rows)
    escaped = struct.unpack(f"<{escapes}h", data[len(data) - 2 * escapes :])
    it = iter(escaped)
    out = []
    for row in codes:
        bins = []
        for i, code in enumerate(row):
            low = models[i][0][0]
            half = (1 << low) >> 1
            bins.append(
                next(it)
                if code is None
                else (zigzag_back(code >> low) << low) + (code & ((1 << low) - 1)) - half
            )
        out.append(bins)
    check(next(it, None) is None and end - at == used)
    return out, None


def decode_block(data, lengths, plane, tokens):
    r = Reader(data)
    channels = plane.coefficients
    anchors, scales = {}, None
    if plane.predictor == 2:
        for t in range(0, tokens, plane.group):
            scale = r.floats(1)[0]
            check(0 <= scale and np.isfinite(scale * F(127)))
            anchors[t] = np.frombuffer(r.take(channels), np.int8).astype(F) * scale
    if plane.levels:
        raw = np.frombuffer(r.take(2 * tokens), "<u2").astype("<u4") << 16
        check((raw < 0x7F80 << 16).all())
        scales = np.maximum(raw.view("<f4") / F(plane.levels), F(2.0**-126))
    coded = [t for t in range(tokens) if t not in anchors]
    check(coded or not any(lengths))
    check(not any(lengths[-(-channels // 32) :]))
    y = np.zeros((tokens, channels), F)
    for tile, length in enumerate(lengths[: -(-channels // 32)]):
        first = 32 * tile
        lanes = min(32, channels - first)
        if not coded:
            continue
        bins, exponent = decode_tile(r.take(2 * length), plane, first, lanes, len(coded))
        number = np.zeros(lanes, F)
        for t, row in zip(coded, bins):
            row = np.array(row)
            steps = plane.steps[first : first + lanes] if scales is None else scales[t]
            if exponent is not None:
                number = (
                    row.astype(F) * steps * F(2.0 ** (exponent // 2)) * F(2.0 ** (exponent - exponent // 2))
                )
                y[t, first : first + lanes] = np.clip(number, -LARGEST, LARGEST)
                continue
            c = np.where(
                abs(row) == 1, plane.centroids[0], np.where(abs(row) == 2, plane.centroids[1], F(0))
            ) * np.sign(row).astype(F)
            number = number * plane.factors[first : first + lanes] + (row.astype(F) + c.astype(F))
            y[t, first : first + lanes] = number * steps
    check(r.at == len(data))
    for t in range(tokens):
        if plane.predictor == 2:
            anchor = anchors[t // plane.group * plane.group]
            y[t] = anchor if t in anchors else y[t] + anchor
    if plane.dim:
        x = np.zeros((tokens, plane.channels), F)
        for h, inverse in enumerate(plane.maps[1]):
            part, rank = slice(h * plane.dim, (h + 1) * plane.dim), len(inverse)
            for i in range(rank):
                x[:, part] = x[:, part] + y[:, h * rank + i, None] * inverse[i]
        y = x
    y = np.clip(y + plane.mean, -LARGEST, LARGEST)
    check(not np.isnan(y).any(), "decoded values must be finite")
    return y


def unpack(body, models, tokens):
    """The number of low bits and those of each lane, the bytes after them, and the models without low bits."""
    bits = {model[0][0] for model in models}
    check(len(bits) == 1 and bits != {0})
    (b,) = bits
    words = -(-tokens * b // 16)
    low = np.frombuffer(body, "<u2", words * len(models)) if len(body) >= 2 * words * len(models) else None
    check(low is not None, "the data is too short")
    lanes = [int.from_bytes(lane.tobytes(), "little") for lane in low.reshape(words, len(models)).T]
    return (b, lanes), body[low.nbytes :], [[(0, starts) for _, starts in model] for model in models]


def decode_lossless_block(data, lengths, plane, tokens):
    r, m = Reader(data), plane.mantissa
    out = np.zeros((tokens, plane.channels), np.uint16)
    for tile, length in enumerate(lengths):
        first = 32 * tile
        lanes = min(32, plane.channels - first)
        tile = Reader(r.take(2 * length))
        kind, padding, escapes = tile.unpack("BBH")
        body = tile.take(2 * length - 4)
        if kind == 0:
            check(padding == escapes == 0 and len(body) == 2 * tokens * lanes)
            out[:, first : first + lanes] = np.frombuffer(body, "<u2").reshape(tokens, lanes)
            continue
        check(kind in (1, 2) and padding <= 1)
        models, packed = plane.models[first : first + lanes], None
        if kind == 2:
            packed, body, models = unpack(body, models, tokens)
        end = len(body) - 2 * escapes - padding
        codes, used = decode_rans(body[:end], models, tokens)
        check(used == end)
        escaped = iter(struct.unpack(f"<{escapes}H", body[end + padding :]))
        for t, row in enumerate(codes):
            for i, code in enumerate(row):
                if code is None:
                    code = next(escaped)
                elif packed:
                    code = code << packed[0] | packed[1][i] >> t * packed[0] & ((1 << packed[0]) - 1)
                exponent = (int(plane.tops[first + i]) - (code >> (m + 1))) % 2 ** (15 - m)
                out[t, first + i] = (code >> m & 1) << 15 | exponent << m | code & ((1 << m) - 1)
        check(next(escaped, None) is None)
    check(r.at == len(data))
    return out


class Frame:
    """Header and elements of a frame."""

    def __init__(self, data, planes):
        """`planes`: planes by id."""
        check(data[:4] == b"KVCC", "not a frame (KVCC)")
        check(len(data) > 64 and data[4] == 2, "a frame of an unknown version")
        check(
            zlib.crc32(data[:60]) == struct.unpack("<I", data[60:64])[0],
            "the header does not match its checksum",
        )
        order, self.element, self.rotated, layout, self.level, self.lossless, zero = data[5:12]
        known = (
            order == 1 and self.element < 3 and self.rotated < 2 and self.lossless < 2 and layout == zero == 0
        )
        check(known, "a frame with a field of an unknown value")
        (
            self.layers,
            self.heads,
            self.dim,
            self.first,
            self.tokens,
            self.block_tokens,
            self.model,
            payload_len,
        ) = struct.unpack("<3IQ2IQQ", data[12:56])
        check(
            all((self.layers, self.heads, self.dim)) and 1 <= self.block_tokens <= 1024,
            "a frame with a size of zero",
        )
        channels = self.heads * self.dim
        tiles, blocks = -(-channels // 32), -(-self.tokens // self.block_tokens)
        index_len = 2 * self.layers * (4 + blocks * (12 + 2 * tiles))
        index, payload = data[64 : 64 + index_len], data[64 + index_len + 4 :]
        check(len(index) == index_len and len(payload) == payload_len, "the length is not that of the header")
        check(
            zlib.crc32(index) == struct.unpack("<I", data[64 + index_len :][:4])[0],
            "the index does not match its checksum",
        )
        r = Reader(index)
        ids = r.unpack(f"{2 * self.layers}I")
        start, rows = 0, []
        for i, id in enumerate(ids):
            name = f"layer {i // 2} {('keys', 'values')[i % 2]}"
            check(id in planes, f"{name}: coded under plane {id:08x}, which the profile does not have")
            plane = planes[id]
            check(
                plane.channels == channels and plane.lossless == bool(self.lossless),
                f"{name}: a plane of another kind",
            )
            decode = decode_lossless_block if self.lossless else decode_block
            for block in range(blocks):
                end, checksum, *lengths = r.unpack(f"QI{tiles}H")
                check(
                    zlib.crc32(payload[start:end]) == checksum,
                    f"{name}: block {block} does not match its checksum",
                )
                tokens = min(self.block_tokens, self.tokens - block * self.block_tokens)
                rows.append(decode(payload[start:end], lengths, plane, tokens))
                start = end
        check(start == len(payload))
        shape = self.layers, 2, self.tokens, self.heads, self.dim
        kind = "<u2" if self.lossless else "<f4"
        self.rows = np.concatenate(rows).astype(kind).reshape(shape) if rows else np.zeros(shape, kind)

    def values(self):
        """The elements as numbers."""
        if not self.lossless:
            return self.rows
        return self.rows.view("<f2") if self.element == 1 else (self.rows.astype("<u4") << 16).view("<f4")

    def describe(self):
        coding = (
            f"lossless {('f32', 'f16', 'bf16')[self.element]}" if self.lossless else f"level {self.level}"
        )
        keys = f"keys {('before', 'after')[self.rotated]} RoPE"
        yield (
            f"model {self.model:016x}, {coding}, {keys}, tokens {self.first} to {self.first + self.tokens}, "
            f"{self.heads} heads of {self.dim}"
        )
        for layer, sides in enumerate(self.values()):
            for name, rows in zip(("keys", "values"), sides):
                rows = rows.astype("f8")
                spread = (
                    f"{rows.min():.5g} to {rows.max():.5g}, deviation {rows.std():.5g}"
                    if rows.size
                    else "empty"
                )
                yield f"layer {layer} {name}: {spread}"


def frames(data, planes):
    """The frames of a chunk, or one frame."""
    if data[:4] != b"KVCS":
        return [Frame(data, planes)]
    check(len(data) >= 8 and data[4] == 1 and data[5] == 0, "a chunk of an unknown version")
    entries = struct.unpack("<H", data[6:8])[0]
    at = 8 + 24 * entries
    check(
        zlib.crc32(data[:at]) == struct.unpack("<I", data[at : at + 4])[0],
        "the directory does not match its checksum",
    )
    r, at, all = Reader(data[8:at]), at + 4, []
    for _ in range(entries):
        first, tokens, level, lossless, zero, length = r.unpack("QIBBHQ")
        frame = Frame(data[at : at + length], planes)
        said = frame.first, frame.tokens, frame.level, frame.lossless
        check(
            said == (first, tokens, level, lossless) and zero == 0,
            "an entry of the directory differs from its frame",
        )
        all.append(frame)
        at += length
    check(at == len(data), "there are bytes after the last frame")
    return all


def read(profiles, frame):
    by_id = {plane.id: plane for path in profiles for plane in planes(pathlib.Path(path).read_bytes())}
    return frames(pathlib.Path(frame).read_bytes(), by_id)


def check_vectors():
    table_bytes = b"".join(struct.pack("<161I", *t) for t in T)
    check(zlib.crc32(table_bytes) == 0x088E9F43, "the tables of the families")
    for profile in sorted(path for path in FOLDER.iterdir() if path.suffix in (".kvcp", ".kvcl", ".kvcm")):
        [frame] = read([profile], profile.with_suffix(".kvcc"))
        expected = profile.with_suffix(".u16" if frame.lossless else ".f32").read_bytes()
        check(frame.rows.tobytes() == expected, f"{profile.stem} differs")
        print(f"{profile.stem}: {frame.rows.size} elements, the same bits")
    both = read([FOLDER / "transform.kvcp", FOLDER / "tables.kvcp"], FOLDER / "levels.kvcs")
    for frame, name in zip(both, ("transform", "tables")):
        check(frame.rows.tobytes() == (FOLDER / f"{name}.f32").read_bytes(), f"{name} of the chunk differs")
    print("levels: a chunk of 2 frames, the same bits")


def main():
    parser = argparse.ArgumentParser(
        usage="format.py [PROFILE... FRAME [-o OUT]]", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="*", metavar="PROFILE... FRAME")
    parser.add_argument("-o", metavar="OUT", dest="out")
    arguments = parser.parse_args()
    *profiles, frame = arguments.files or [None]
    if frame is None:
        return check_vectors()
    if not profiles:
        parser.error("a profile or a plane, then a frame")
    all = read(profiles, frame)
    for frame in all:
        print(*frame.describe(), sep="\n")
    if arguments.out:
        pathlib.Path(arguments.out).write_bytes(b"".join(frame.rows.tobytes() for frame in all))


if __name__ == "__main__":
    try:
        main()
    except (Bad, OSError) as error:
        sys.exit(f"format.py: {error}")
    except (
        IndexError,
        StopIteration,
        ValueError,
        struct.error,
    ):  # of lists and numbers read from forged bytes
        sys.exit("format.py: the coded data is corrupt")
