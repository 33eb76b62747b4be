#!/usr/bin/env python3
"""Decode steps of a model in parts on several GPUs of one host, against one GPU and a torch loop over NCCL: gpus.{json,md}.

    cargo build --release -p kv-benches --bin decode_speed
    pip install torch
    python benches/peers/gpus.py target/release/decode_speed benches/results [--ranks 2]

Weights and caches are random; that ranks compute what one does is a test (`kv-reference`, device, `ranks`). The torch loop has the same
shards in bf16: per layer two all-reduces of the hidden state, compiled norms, RoPE and SwiGLU, cuDNN's attention, all of it in one CUDA
graph; a step's time is the median of 15 replays of the slowest rank. What does not run, for want of memory for example, is reported.
"""

import argparse, json, os, subprocess, sys, tempfile

import tables

# hidden, intermediate, layers, query heads, key/value heads, vocabulary
SHAPES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128256),
}
# shape, context, batch; and whether one GPU has room for the weights
CASES = [
    ("llama-3.1-8b", 8192, 1, True),
    ("llama-3.1-8b", 8192, 16, True),
    ("llama-3.1-8b", 131072, 1, True),
    ("llama-3.1-70b", 32768, 1, False),
    ("llama-3.1-70b", 131072, 1, False),
    ("llama-3.1-70b", 131072, 4, False),
]
METHODS = ["dense:dtype=bf16", "million:exact=bf16"]


def torch_rank(rank, ranks, shape, context, batch):
    """Times the loop of one rank."""
    import torch, torch.distributed as dist, torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from torch_loop import act, graph_of, milliseconds, norm, rope

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    inner, heads, kv_heads = inner // ranks, heads // ranks, kv_heads // ranks
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("decode_speed")
    parser.add_argument("results", nargs="?", help="a folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first of them alone")
    parser.add_argument("--commit", help="of the program, where there is no repository")
    parser.add_argument("--peer", nargs=3)
    args = parser.parse_args()
    if args.peer:
        shape, context, batch = args.peer
        return spawn(args.ranks, shape, int(context), int(batch))
    cases, versions = [], {}
    for shape, context, batch, fits in CASES[: args.cases]:
        peer = [sys.executable, __file__, "-", "--ranks", args.ranks, "--peer", shape, context, batch]
        said, missing = run(list(map(str, peer)))
        torch = json.loads(said) if said else {"missing": missing}
        versions |= {name: torch.pop(name) for name in ("torch", "gpu") if name in torch}
        rows = [
            {"ranks": ranks} | times(args.decode_speed, ranks, shape, context, batch, method)
            for method in METHODS
            for ranks in ([1] if fits else []) + [args.ranks]
        ]
        cases.append({"shape": shape, "context": context, "batch": batch, "torch": torch, "rows": rows})
        data = {"date": tables.today(), "commit": args.commit or tables.commit(), "ranks": args.ranks, "versions": versions, "cases": cases}
        tables.write(os.path.join(args.results, "gpus.json"), data)


if __name__ == "__main__":
    main()
