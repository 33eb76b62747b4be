#!/usr/bin/env python3
"""Decodes the test vectors by FORMAT.md alone: a second implementation, to find gaps of the specification.

    python codec-core/tests/format.py      # needs numpy
"""
import math, pathlib, struct, zlib
import numpy as np

F = np.float32
LARGEST = np.finfo(F).max
FOLDER = pathlib.Path(__file__).parent / "vectors"


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        assert self.at + n <= len(self.data), "truncated"
        self.at += n
        return self.data[self.at - n:self.at]

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
        return 0.5 - 0.75 * w + 0.25 * w ** 3
    shapes = [lambda u: math.erfc(u / math.sqrt(2)) / 2, lambda u: 1 / (1 + math.exp(math.pi * u / math.sqrt(3))),
              lambda u: math.exp(-math.sqrt(2) * u) / 2, student]
    return [[round(2 ** 20 * f(i / 16)) for i in range(161)] for f in shapes]


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
    counts, m = [2 ** 20 - 2 * beyond(0)], 1
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


class Plane:
    def __init__(self, data):
        assert zlib.crc32(data[:-4]) == struct.unpack("<I", data[-4:])[0]
        r = Reader(data[:-4])
        assert r.take(4) == b"KVCP"
        version, self.predictor, self.levels, models, self.range, zero = r.unpack("6B")
        assert version == 2 and zero == 0
        self.group, channels, dim = r.unpack("HII")
        self.channels, self.dim = channels, dim
        self.mean = r.floats(channels)
        self.factors = r.floats(channels) if self.predictor == 1 else np.zeros(channels, F)
        self.steps = r.floats(channels) if self.levels == 0 else np.array([], F)
        self.centroids = r.floats(2)
        maps = [r.floats(channels * dim).reshape(-1, dim, dim) for _ in range(2)] if dim else []
        self.inverse = maps[1] if dim else None
        if models == 0:
            raw = r.take(channels)
            self.models = [[family(byte)] for byte in raw]
        else:
            raw = r.take(2 * 65 * channels * models)
            words = np.frombuffer(raw, "<u2").reshape(channels, models, 65)
            self.models = [[table(words[c, k]) for k in range(models)] for c in range(channels)]
        assert r.at == len(r.data)
        numbers = [self.mean, self.factors if self.predictor == 1 else [], self.steps, self.centroids] + [m.ravel() for m in maps]
        head = struct.pack("<BHBBI", self.predictor, self.group, self.levels, self.range, dim)
        self.id = zlib.crc32(head + b"".join(np.asarray(x, "<f4").tobytes() for x in numbers) + bytes([models]) + raw)


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
    assert bits == 0
    out, last = [], [None] * lanes
    any_low = any(m[0][0] for m in models)
    for t in range(rows + 1):
        if t == rows - warmup:
            for i in range(lanes):
                x[i] -= 65536 * (carrying >> i & 1)
                assert x[i] >= 0
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
    assert x == [0] * lanes
    return out, r.at


def decode_range(data, models, rows):
    at, rng, code = 4, 2 ** 32 - 1, int.from_bytes(data[:4], "big")
    out, last = [], [None] * len(models)
    for _ in range(rows):
        row = []
        for i, model in enumerate(models):
            low, starts = model[context(len(model), last[i], model[0][0])]
            for k in (12, low):
                unit = rng >> k
                slot = min(code // unit, 2 ** k - 1)
                symbol, start, width = find(starts, slot) if k == 12 else (slot, slot, 1)
                code -= unit * start
                rng = unit * width
                while rng < 2 ** 24:
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
    models = plane.models[first:first + lanes]
    if kind == 2:
        models = [[family(byte)] for byte in data[4:4 + lanes]]
        at += lanes + lanes % 2
    end = len(data) - 2 * escapes - a
    codes, used = (decode_range if kind == 3 else decode_rans)(data[at:end], models, rows)
    escaped = struct.unpack(f"<{escapes}h", data[len(data) - 2 * escapes:])
    it = iter(escaped)
    out = []
    for row in codes:
        bins = []
        for i, code in enumerate(row):
            low = models[i][0][0]
            half = (1 << low) >> 1
            bins.append(next(it) if code is None else (zigzag_back(code >> low) << low) + (code & ((1 << low) - 1)) - half)
        out.append(bins)
    assert next(it, None) is None and end - at == used
    return out, None


def decode_block(data, lengths, plane, tokens):
    r = Reader(data)
    channels = plane.channels
    anchors, scales = {}, None
    if plane.predictor == 2:
        for t in range(0, tokens, plane.group):
            scale = r.floats(1)[0]
            assert 0 <= scale and np.isfinite(scale * F(127))
            anchors[t] = np.frombuffer(r.take(channels), np.int8).astype(F) * scale
    if plane.levels:
        raw = np.frombuffer(r.take(2 * tokens), "<u2").astype("<u4") << 16
        assert (raw < 0x7f80 << 16).all()
        scales = np.maximum(raw.view("<f4") / F(plane.levels), F(2.0 ** -126))
    coded = [t for t in range(tokens) if t not in anchors]
    assert coded or not any(lengths)
    y = np.zeros((tokens, channels), F)
    for tile, length in enumerate(lengths):
        first = 32 * tile
        lanes = min(32, channels - first)
        if not coded:
            continue
        bins, exponent = decode_tile(r.take(2 * length), plane, first, lanes, len(coded))
        number = np.zeros(lanes, F)
        for t, row in zip(coded, bins):
            row = np.array(row)
            steps = plane.steps[first:first + lanes] if scales is None else scales[t]
            if exponent is not None:
                number = row.astype(F) * steps * F(2.0 ** (exponent // 2)) * F(2.0 ** (exponent - exponent // 2))
                y[t, first:first + lanes] = np.clip(number, -LARGEST, LARGEST)
                continue
            c = np.where(abs(row) == 1, plane.centroids[0], np.where(abs(row) == 2, plane.centroids[1], F(0))) * np.sign(row).astype(F)
            number = number * plane.factors[first:first + lanes] + (row.astype(F) + c.astype(F))
            y[t, first:first + lanes] = number * steps
    assert r.at == len(data)
    for t in range(tokens):
        if plane.predictor == 2:
            anchor = anchors[t // plane.group * plane.group]
            y[t] = anchor if t in anchors else y[t] + anchor
    if plane.dim:
        x = np.zeros_like(y)
        for h, inverse in enumerate(plane.inverse):
            part = slice(h * plane.dim, (h + 1) * plane.dim)
            for i in range(plane.dim):
                x[:, part] = x[:, part] + y[:, part][:, i:i + 1] * inverse[i]
        y = x
    y = np.clip(y + plane.mean, -LARGEST, LARGEST)
    assert not np.isnan(y).any()
    return y


def decode_frame(data, plane):
    assert data[:8] == b"KVCC\2\1\0\0" and zlib.crc32(data[:60]) == struct.unpack("<I", data[60:64])[0]
    layers, heads, dim = struct.unpack("<3I", data[12:24])
    tokens, block_tokens = struct.unpack("<2I", data[32:40])
    channels = heads * dim
    tiles, blocks = -(-channels // 32), -(-tokens // block_tokens)
    index_len = 2 * layers * (4 + blocks * (12 + 2 * tiles))
    index, payload = data[64:64 + index_len], data[64 + index_len + 4:]
    assert zlib.crc32(index) == struct.unpack("<I", data[64 + index_len:][:4])[0]
    r = Reader(index)
    assert all(id == plane.id for id in r.unpack(f"{2 * layers}I")), "another plane"
    start, planes = 0, []
    for _ in range(2 * layers):
        rows = []
        for block in range(blocks):
            end, checksum, *lengths = r.unpack(f"QI{tiles}H")
            assert zlib.crc32(payload[start:end]) == checksum
            rows.append(decode_block(payload[start:end], lengths, plane, min(block_tokens, tokens - block * block_tokens)))
            start = end
        planes.append(np.concatenate(rows))
    assert start == len(payload)
    return np.concatenate(planes)


table_bytes = b"".join(struct.pack("<161I", *t) for t in T)
assert zlib.crc32(table_bytes) == 0x088E9F43, "the tables of the families"
for path in sorted(FOLDER.glob("*.kvcp")):
    plane = Plane(path.read_bytes())
    decoded = decode_frame(path.with_suffix(".kvcc").read_bytes(), plane)
    expected = np.frombuffer(path.with_suffix(".f32").read_bytes(), "<f4").reshape(decoded.shape)
    assert (decoded == expected).all(), (path.stem, abs(decoded - expected).max())
    print(f"{path.stem}: {decoded.size} numbers, the same bits")
