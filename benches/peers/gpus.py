#!/usr/bin/env python3
"""Decode steps of a model in parts on several GPUs of one host, against one GPU and a torch loop over NCCL: gpus.{json,md}.

    cargo build --release -p kv-benches --bin decode_speed
    pip install torch
    python benches/peers/gpus.py target/release/decode_speed benches/results [--ranks 2] [--cases INDICES]

Other numbers of ranks than two go to gpus-RANKS.{json,md}. Weights and caches are random; that ranks compute what one does is a test
(`kv-reference`, device, `ranks`). The torch loop has the same shards in bf16: per layer two all-reduces of the hidden state, compiled
norms, RoPE and SwiGLU, cuDNN's attention, all of it in one CUDA graph; a step's time is the median of 15 replays of the slowest rank. Of
fewer key/value heads than ranks, several ranks hold the same one. What does not run, for want of memory for example, is reported.
"""

import argparse, json, os, subprocess, sys, tempfile

import tables

# hidden, intermediate, layers, query heads, key/value heads, vocabulary
SHAPES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128256),
}
METHODS = ["dense:dtype=bf16", "million:exact=bf16"]
# No row of a step is resident: each travels over the link of its rank.
ON_HOST = ["pqcache:tokens=2048:exact=bf16:codebooks=profile", "hybrid:rows=0.0625:exact=bf16"]
LONG = ["million:exact=bf16", "hybrid:rows=0.0025:offloaded=int8:exact=bf16"]
# shape, context, batch, methods; whether one GPU has room; whether torch runs it
CASES = [
    ("llama-3.1-8b", 8192, 1, METHODS, True, True),
    ("llama-3.1-8b", 8192, 16, METHODS, True, True),
    ("llama-3.1-8b", 131072, 1, METHODS, True, True),
    ("llama-3.1-70b", 32768, 1, METHODS, False, True),
    ("llama-3.1-70b", 131072, 1, METHODS, False, True),
    ("llama-3.1-70b", 131072, 4, METHODS, False, True),
    ("llama-3.1-8b", 131072, 16, METHODS, True, True),
    ("llama-3.1-70b", 32768, 8, METHODS, False, True),
    ("llama-3.1-70b", 131072, 8, METHODS, False, True),
    ("llama-3.1-70b", 131072, 16, METHODS, False, True),
    ("llama-3.1-8b", 32768, 8, ON_HOST, True, False),
    ("llama-3.1-70b", 1000000, 1, LONG, False, False),
]


def torch_rank(rank, ranks, shape, context, batch):
    """Times the loop of one rank."""
    import torch, torch.distributed as dist, torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from torch_loop import act, graph_of, milliseconds, norm, rope

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    inner, heads, kv_heads = inner // ranks, heads // ranks, max(kv_heads // ranks, 1)
    random = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) * 0.02
    sizes = [((heads + 2 * kv_heads) * 128, hidden), (hidden, heads * 128), (2 * inner, hidden), (hidden, inner)]
    weights = [[random(*size) for size in sizes] for _ in range(layers)]
    cache = [[random(batch, kv_heads, context, 128) for _ in "kv"] for _ in range(layers)]
    embedding, output = random(vocab, hidden), random(vocab // ranks, hidden)
    cos, sin = torch.rand(2, 64, device="cuda")
    token = torch.ones(batch, dtype=torch.long, device="cuda")
    parts = torch.empty(ranks, batch, vocab // ranks, device="cuda", dtype=torch.bfloat16)

    def summed(x):
        dist.all_reduce(x)
        return x

    def step():
        x = embedding[token]
        for (qkv_weight, o, gate_up, down), (k, v) in zip(weights, cache):
            qkv = F.linear(norm(x), qkv_weight).view(batch, heads + 2 * kv_heads, 128)
            qk = rope(qkv[:, : heads + kv_heads], cos, sin)
            k[:, :, -1], v[:, :, -1] = qk[:, heads:], qkv[:, heads + kv_heads :]
            a = F.scaled_dot_product_attention(qk[:, :heads].unsqueeze(2), k, v, enable_gqa=True)
            x = x + summed(F.linear(a.reshape(batch, heads * 128), o))
            x = x + summed(F.linear(act(F.linear(norm(x), gate_up)), down))
        dist.all_gather_into_tensor(parts, F.linear(norm(x), output))
        token.copy_(parts.transpose(0, 1).reshape(batch, vocab).argmax(-1))

    with torch.no_grad(), sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        graph, times = graph_of(step), []
        for _ in range(17):
            dist.barrier()
            times.append(milliseconds(graph.replay))
    slowest = torch.tensor(sorted(times[2:])[7], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"step_ms": slowest.item(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}))
    sys.stdout.flush()
    os._exit(0)  # destroying the group waits for the graph


def spawn(ranks, shape, context, batch):
    import torch.multiprocessing as mp

    mp.spawn(torch_rank, (ranks, shape, context, batch), nprocs=ranks)


def run(command):
    """The last line that a command prints, or why there is none."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return None, (result.stderr.strip().splitlines() or ["no message"])[-1][-300:]
    return result.stdout.splitlines()[-1], None


def times(decode_speed, ranks, shape, context, batch, method):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "json")
        options = ["--random", shape, "--contexts", context, "--batches", batch, "--methods", method, "--ranks", ranks, "--json", path]
        _, missing = run([decode_speed, *map(str, options)])
        if missing:
            return {"method": method, "missing": missing}
        with open(path) as file:
            return json.load(file)["rows"][0]


def torch_times(ranks, shape, context, batch):
    """The step of the torch loop, and the versions of what it ran on."""
    peer = [sys.executable, __file__, "-", "--ranks", ranks, "--peer", shape, context, batch]
    said, missing = run(list(map(str, peer)))
    times = json.loads(said) if said else {"missing": missing}
    return times, {name: times.pop(name) for name in ("torch", "gpu") if name in times}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("decode_speed")
    parser.add_argument("results", nargs="?", help="a folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", default="", help="indices of cases, separated by commas [default: all]")
    parser.add_argument("--commit", help="of the program, where there is no repository")
    parser.add_argument("--peer", nargs=3)
    args = parser.parse_args()
    if args.peer:
        shape, context, batch = args.peer
        return spawn(args.ranks, shape, int(context), int(batch))
    cases, versions = [], {}
    for i in [int(i) for i in args.cases.split(",") if i] or range(len(CASES)):
        shape, context, batch, methods, fits_one, has_torch = CASES[i]
        torch, found = torch_times(args.ranks, shape, context, batch) if has_torch else ({}, {})
        versions |= found
        rows = [
            {"ranks": ranks} | times(args.decode_speed, ranks, shape, context, batch, method)
            for method in methods
            for ranks in ([1] if fits_one else []) + [args.ranks]
        ]
        cases.append({"shape": shape, "context": context, "batch": batch, "torch": torch, "rows": rows})
        data = {"date": tables.today(), "commit": args.commit or tables.commit(), "ranks": args.ranks, "versions": versions, "cases": cases}
        name = "gpus.json" if args.ranks == 2 else f"gpus-{args.ranks}.json"
        tables.write(os.path.join(args.results, name), data)


if __name__ == "__main__":
    main()
