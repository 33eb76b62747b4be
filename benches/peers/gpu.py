#!/usr/bin/env python3
"""kv-gpu against PyTorch on one GPU: gpu.json and gpu.md.

    cargo build --release
    pip install torch flashinfer-python
    python benches/peers/gpu.py target/release/gpu_speed benches/results

Attention on codes is timed beside two peers: the best backend of torch in half precision, and FlashInfer with keys and values in
fp8 (e4m3) in pages of 64 tokens, by tensor cores or CUDA cores, whichever is faster. Where FlashInfer is not installed the table
says so; the peer of a kernel without one is `none`. On sm_90 the kernels of sm_80 are timed, too, with the shared memory of an
A100. A run that is cut short leaves its rows in `gpu.partial.json`.

Medians of 25 replays of CUDA graphs on buffers that together exceed the L2 cache, after 20 ms of the same; both sides in
one run. The floor of a kernel is the time in which the device copies as many bytes; of `gather`, the time in which the
bus does; of `encode` and `train`, their operations at one per lane and clock; of `prefill`, those of
tensor cores; of frames that are decoded while they are copied, the copy.
"""

import argparse, functools, json, math, os, re, shlex, subprocess, sys, time

import tables
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import flashinfer
except ImportError:
    flashinfer = None

DEVICE = "cuda"
A100 = "8.0:163"  # architecture and KiB of shared memory
ATTENDING = ("attend", "hybrid", "scalar attend")  # kernels of a decode step


def median_us(run, launches):
    """Microseconds of one of the `launches` that `run` puts on the stream, by a graph where it can be captured."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    except RuntimeError:
        replay = run
    torch.cuda.synchronize()
    time.sleep(0.15)
    start = time.perf_counter()
    while time.perf_counter() - start < 0.02:
        replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[12] * 1e3 / launches


def best(candidates):
    """(name, microseconds) of the fastest; backends that do not support the shape are left out. None runs: no time."""
    times = []
    for name, launches, run in candidates:
        try:
            times.append((median_us(run, launches), name))
        except (RuntimeError, ValueError):
            torch.cuda.synchronize()
    return min(times)[::-1] if times else ("none that runs", None)


def attention(query_heads, heads, batch, tokens, dim):
    """Half-precision decode attention by the best backend, with grouped heads as they are or folded into query rows."""
    copies = max(2, (200 << 20) // (4 * batch * heads * tokens * dim) + 1)
    keys = [torch.randn(batch, heads, tokens, dim, device=DEVICE, dtype=torch.float16) for _ in range(copies)]
    values = [torch.randn_like(k) for k in keys]
    group = query_heads // heads
    queries = {"": torch.randn(batch, query_heads, 1, dim, device=DEVICE, dtype=torch.float16)}
    if group > 1:
        queries[", folded"] = queries[""].view(batch, heads, group, dim)

    def run(query, backend, grouped):
        with sdpa_kernel(backend):
            for k, v in zip(keys, values):
                F.scaled_dot_product_attention(query, k, v, enable_gqa=grouped)

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return best(
        [
            (f"fp16 {name}{form}", copies, lambda q=query, b=backend, g=group > 1 and not form: run(q, b, g))
            for name, backend in backends.items()
            for form, query in queries.items()
        ]
    )


def fp8_attention(query_heads, heads, batch, tokens, dim):
    """Decode attention by FlashInfer with keys and values in fp8."""
    if flashinfer is None:
        return "not installed", None
    page = math.gcd(tokens, 64)
    pages = tokens // page
    copies = max(2, (200 << 20) // (2 * batch * heads * tokens * dim) + 1)
    size = (batch * pages, 2, heads, page, dim)
    caches = [
        torch.randn(size, device=DEVICE, dtype=torch.float16).to(torch.float8_e4m3fn) for _ in range(copies)
    ]
    query = torch.randn(batch, query_heads, dim, device=DEVICE, dtype=torch.float16)
    counts = dict(dtype=torch.int32, device=DEVICE)

    @functools.cache
    def planned(tensor_cores):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE),
            "HND",
            use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto",
        )
        wrapper.plan(
            torch.arange(0, batch + 1, **counts) * pages,
            torch.arange(0, batch * pages, **counts),
            torch.full((batch,), page, **counts),
            query_heads,
            heads,
            dim,
            page,
            q_data_type=torch.float16,
            kv_data_type=torch.float8_e4m3fn,
        )
        return wrapper

    def run(tensor_cores):
        for cache in caches:
            planned(tensor_cores).run(query, cache)

    return best([("tensor cores", copies, lambda: run(True)), ("CUDA cores", copies, lambda: run(False))])


def encoding(m, nbits, heads, n, dim):
    x = torch.randn(heads, m, n, dim // m, device=DEVICE)
    centroids = torch.randn(heads, m, 1 << nbits, dim // m, device=DEVICE)

    def run():
        for head in range(heads):  # all distances at once need 17 GB
            torch.cdist(x[head], centroids[head]).argmin(-1)

    return best([("cdist + argmin, f32", 1, run)])


def appending(m, nbits, heads, batch, n, dim):
    """Keys and values; codebooks from L2."""
    x, centroids = (
        torch.randn(2 * heads * m, rows, dim // m, device=DEVICE) for rows in (batch * n, 1 << nbits)
    )

    def run():
        for _ in range(16):
            torch.cdist(x, centroids).argmin(-1)

    return best([("cdist + argmin, f32", 16, run)])


def gathering(wanted, n, heads):
    keys, values = (torch.zeros(heads * n, 128, dtype=torch.float16).pin_memory() for _ in range(2))
    rows = torch.randint(0, n, (heads, wanted)) + torch.arange(heads)[:, None] * n
    staged = torch.empty(heads * wanted, 128, dtype=torch.float16).pin_memory()
    there = torch.empty(heads * wanted, 128, dtype=torch.float16, device=DEVICE)

    def run():
        for side in (keys, values):
            torch.index_select(side, 0, rows.flatten(), out=staged)
            there.copy_(staged, non_blocking=True)
            torch.cuda.synchronize()

    return "index_select on the host, copy", median_of_calls(run)


def median_of_calls(run):
    times = []
    for _ in range(9):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[4] * 1e6


def searching(m, nbits, heads, group, k, n):
    """As much as the kernel does; how long gather and topk alone take stands in the name."""
    luts = torch.randn(heads, group, m, 1 << nbits, device=DEVICE)
    codes = torch.randint(0, 1 << nbits, (heads, 1, m, n), device=DEVICE).expand(heads, group, m, n)
    scores = torch.randn(heads, n, device=DEVICE)
    alone = median_us(lambda: (torch.gather(luts, 3, codes), torch.topk(scores, k, sorted=False)), 1)

    def run():
        weights = torch.gather(luts, 3, codes).sum(2).softmax(-1).sum(1)
        torch.topk(weights, k, sorted=False)

    return best([(f"gather, sum, softmax, topk (gather and topk alone {alone:.1f} us)", 1, run)])


def projection(heads, n, dim, rank):
    copies = (200 << 20) // (heads * n * (dim + rank) * 2) + 2
    rows = [torch.randn(heads, n, dim, device=DEVICE, dtype=torch.float16) for _ in range(copies)]
    out = [torch.empty(heads, n, rank, device=DEVICE, dtype=torch.float16) for _ in range(copies)]
    columns = torch.randn(heads, dim, rank, device=DEVICE, dtype=torch.float16)

    def run():
        for x, y in zip(rows, out):
            torch.bmm(x, columns, out=y)

    return best([("bmm", copies, run)])


def second_moments(heads, n, dim):
    copies = (200 << 20) // (heads * n * dim * 2) + 2
    rows = [torch.randn(heads, n, dim, device=DEVICE, dtype=torch.float16) for _ in range(copies)]

    def run():
        for x in rows:
            torch.bmm(x.transpose(1, 2), x)

    return best([("bmm, sums in f32, results in f16", copies, run)])


def prompt_attention(query_heads, heads, batch, tokens, dim, element):
    """Causal, at full rank."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[element]
    query = torch.randn(batch, query_heads, tokens, dim, device=DEVICE, dtype=dtype)
    keys, values = (torch.randn(batch, heads, tokens, dim, device=DEVICE, dtype=dtype) for _ in range(2))

    def run(backend):
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return best(
        [(f"{element} {name}, causal", 1, lambda b=backend: run(b)) for name, backend in backends.items()]
    )


def window_attention(query_heads, heads, batch, tokens, dim, window):
    """Causal, at full rank, of one sequence."""
    if not flashinfer:
        return "none: FlashInfer is not installed", None
    query = torch.randn(tokens, query_heads, dim, device=DEVICE, dtype=torch.float16)
    keys, values = (torch.randn(tokens, heads, dim, device=DEVICE, dtype=torch.float16) for _ in range(2))

    def run():
        flashinfer.single_prefill_with_kv_cache(query, keys, values, causal=True, window_left=window - 1)

    return best([("fp16 FlashInfer, causal, window", 1, run)])


def chunk_attention(query_heads, heads, batch, tokens, dim, chunk):
    """Causal, at full rank, of the last queries of one sequence. PyTorch's mask would begin at the first key; none at all
    is less than 2 % more work."""
    query = torch.randn(batch, query_heads, chunk, dim, device=DEVICE, dtype=torch.float16)
    keys, values = (
        torch.randn(batch, heads, tokens, dim, device=DEVICE, dtype=torch.float16) for _ in range(2)
    )
    rows, cached = query[0].transpose(0, 1).contiguous(), [
        x[0].transpose(0, 1).contiguous() for x in (keys, values)
    ]

    def run(backend):
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def run_flashinfer(backend):
        flashinfer.single_prefill_with_kv_cache(rows, *cached, causal=True, backend=backend)

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    peers = [(f"fp16 {name}, no mask", 1, lambda b=backend: run(b)) for name, backend in backends.items()]
    if flashinfer:
        peers += [(f"fp16 FlashInfer {b}, causal", 1, lambda b=b: run_flashinfer(b)) for b in ("fa2", "fa3")]
    return best(peers)


def shape_of_attention(row):
    """Query heads, heads, batch, tokens and components; of a ragged batch, for which no peer has a form, the mean length."""
    query_heads, heads, batch, tokens, *longest, dim = (int(x) for x in re.findall(r"\d+", row["shape"]))
    return query_heads, heads, batch, (tokens + sum(longest)) // (1 + len(longest)), dim


def peer_of(row):
    """(name, microseconds)."""
    numbers = [int(x) for x in re.findall(r"\d+", row["shape"])]
    kernel = row["kernel"].removesuffix(", overlapped")
    if kernel.startswith(ATTENDING):
        return attention(*shape_of_attention(row))
    if kernel.startswith(("encode", "train")):
        return encoding(*(int(x) for x in re.findall(r"\d+", kernel)), *numbers)
    if kernel.startswith("append"):
        return appending(*(int(x) for x in re.findall(r"\d+", kernel)), *numbers)
    if kernel == "gather":
        return gathering(*numbers)
    if kernel == "project":
        return projection(*numbers)
    if kernel == "gram":
        return second_moments(*numbers)
    if window := re.search(r"prefill.*window of (\d+)", kernel):
        return window_attention(*numbers, int(window[1]))
    if chunk := re.search(r"prefill.*chunk of (\d+)", kernel):
        return chunk_attention(*numbers, int(chunk[1]))
    if kernel.startswith("prefill"):
        return prompt_attention(*numbers, "bf16" if kernel.endswith("bf16") else "fp16")
    if kernel.startswith("search"):
        return searching(*(int(x) for x in re.findall(r"\d+", kernel)), *numbers)
    return "none", None


def measured(binary, only, **environment):
    """The lines that the binary prints, one at a time: the device first."""
    with subprocess.Popen(
        [binary, *only], stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def peers_of(row, known):
    """What is timed beside a row, once for all attention of the same heads and tokens."""
    kernel = row["kernel"].removesuffix(", overlapped")
    attends = kernel.startswith(ATTENDING)
    key = shape_of_attention(row) if attends else (kernel, row["shape"])
    if key not in known:
        known[key] = peer_of(row), fp8_attention(*key) if attends else (None, None)
        torch.cuda.empty_cache()
    return known[key]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("binary")
    parser.add_argument("results")
    parser.add_argument("--only", nargs="*", default=[], help="measurements whose name contains one of these")
    parser.add_argument("--name", default="gpu", help="of the file of results, such as gpu-scalar")
    parser.add_argument(
        "--commit", help="what the binary was built from, where it is not the commit that is checked out"
    )
    arguments = parser.parse_args()
    arguments.commit = arguments.commit or tables.commit()
    lines = measured(arguments.binary, arguments.only)
    copy = next(lines)
    result = {
        "device": copy["device"],
        "copy_tb_s": copy["tb_s"],
        "date": tables.today(),
        "commit": arguments.commit,
        "torch": torch.__version__,
        "flashinfer": flashinfer and flashinfer.__version__,
        "options": f" --name {arguments.name} --only {shlex.join(arguments.only)}" if arguments.only else "",
        "rows": [],
    }
    os.makedirs(arguments.results, exist_ok=True)
    partial = os.path.join(arguments.results, f"{arguments.name}.partial.json")

    def measure(what, rows):
        """The rows with what they have so far, which outlives a run that is cut short, and replaces no whole table."""
        for row in progress(what, rows):
            yield row
            with open(partial, "w") as file:
                json.dump(result, file, indent=1)

    for row in measure("kernels", lines):
        result["rows"].append(row)
    if torch.cuda.get_device_capability() >= (9, 0):
        rows = {(row["kernel"], row["shape"]): row for row in result["rows"]}
        lines = measured(arguments.binary, arguments.only, GPU_LIMIT=A100)
        next(lines)
        for row in measure("kernels of sm_80", lines):
            rows.get((row["kernel"], row["shape"]), {})["sm_80_us"] = row["us"]
    known = {}
    for row in measure("peers", result["rows"]):
        for column, peer in zip(("peer", "fp8"), peers_of(row, known)):
            row[column], row[f"{column}_us"] = peer
    tables.write(os.path.join(arguments.results, f"{arguments.name}.json"), result)
    os.remove(partial)
    print(tables.page(arguments.name, result))


def progress(what, rows):
    """The rows, which are counted on the standard error."""
    start = time.perf_counter()
    for count, row in enumerate(rows, 1):
        seconds = time.perf_counter() - start
        print(f"{seconds:6.1f} s {what} {count}: {row['kernel']}, {row['shape']}", file=sys.stderr)
        yield row


if __name__ == "__main__":
    main()
