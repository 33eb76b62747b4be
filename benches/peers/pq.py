#!/usr/bin/env python3
"""pq-core against faiss-cpu, numpy and torch: same data, one run, one thread; writes a Markdown table.

    cargo build --release -p kv-benches
    pip install faiss-cpu numpy torch
    python benches/peers/pq.py target/release/pq_speed benches/results/pq.md
    python benches/peers/pq.py target/release/pq_speed attention.md --attention   # those rows alone

Every round runs the peers, then pq-core; figures are medians over rounds. faiss is tuned: since 1.15 its k-means takes a
path that is twelve times slower when n * dsub < 128,000, unless `distance_compute_blas_threshold` is lowered (its
default before was 20). Recall is that of the scores' top n/10 against the exact one, mean of 64 queries; MSE is relative
to the variance; both are computed here, from decoded vectors, for both sides.
"""

import argparse, json, os, statistics, subprocess, sys, tempfile

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[variable] = "1"
import faiss
import numpy as np
import tables
from programs import median
import torch

faiss.omp_set_num_threads(1)
torch.set_num_threads(1)
faiss.cvar.distance_compute_blas_threshold = 20

DIM = 128
CASES = [(2, 6), (4, 8), (16, 8), (64, 8), (32, 12), (16, 4), (32, 4), (64, 4)]


def keys_and_queries(n, queries, seed=20260101, rank=16):
    """Keys as attention has them: channel offsets and a few loud channels, a low-rank part correlated in time, noise."""
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((rank, DIM))
    decay = 1 / (1 + 0.25 * np.arange(rank))
    loud = np.zeros(DIM, bool)
    loud[[5, 21, 47, 66, 90, 101, 117]] = True
    offset = np.where(loud, 8 * rng.choice([-1, 1], DIM), 0.25 * rng.standard_normal(DIM))
    latent = rng.standard_normal((n, rank))
    for t in range(1, n):
        latent[t] = 0.9 * latent[t - 1] + 0.4375 * latent[t]
    noise = 0.7 * rng.standard_normal((n, DIM))
    keys = offset + np.where(loud, 3, 1) * (0.5 * (latent * decay) @ basis + noise)
    q = 0.25 * (rng.standard_normal((queries, rank)) * decay) @ basis + 0.5 * rng.standard_normal(
        (queries, DIM)
    )
    return keys.astype("<f4"), q.astype("<f4")


def top(scores, k):
    return [set(row) for row in np.argpartition(-scores, k - 1, axis=1)[:, :k].tolist()]


def quality(keys, queries, decoded, exact, k):
    found = top(queries @ decoded.T, k)
    recall = np.mean([len(a & b) / k for a, b in zip(found, exact)])
    centred = keys - keys.mean(0)
    mse = ((keys.astype(np.float64) - decoded) ** 2).sum() / (centred.astype(np.float64) ** 2).sum()
    return mse, float(recall)


def faiss_case(keys, queries, m, nbits, say):
    n, case = len(keys), f"{m}x{nbits}"
    pq = faiss.ProductQuantizer(DIM, m, nbits)
    pq.cp.niter = 25
    pq.cp.max_points_per_centroid = 1 << 30
    pq.cp.min_points_per_centroid = 1
    say(case, "train", median(1, lambda: pq.train(keys)))
    say(case, "encode", median(3 if nbits == 12 else 5, lambda: pq.compute_codes(keys)))
    decoded = pq.decode(pq.compute_codes(keys))
    q8 = queries[:8]
    index = faiss.IndexPQ(DIM, m, nbits, faiss.METRIC_INNER_PRODUCT)
    index.pq, index.is_trained = pq, True
    index.add(keys)
    search = lambda k: [index.search(q8[i : i + 1], k) for i in range(len(q8))]
    say(case, "scan", median(5, lambda: search(1)) / len(q8))
    say(case, "scan + top n/10", median(3, lambda: search(n // 10)) / len(q8))
    if nbits == 4:
        fast = faiss.IndexPQFastScan(DIM, m, 4, faiss.METRIC_INNER_PRODUCT, 32)
        fast.pq.cp.niter = 4
        fast.train(keys)
        fast.add(keys)
        search = lambda k: [fast.search(q8[i : i + 1], k) for i in range(len(q8))]
        say(case, "FastScan scan", median(9, lambda: search(1)) / len(q8))
        say(case, "FastScan scan + top n/10", median(5, lambda: search(n // 10)) / len(q8))
    return decoded


def dense_attention(say):
    """Dense f32 in torch: the best form found, with a group's queries packed as rows, and SDPA as a model calls it."""
    heads, n = 8, 32768
    k, v = torch.randn(heads, n, DIM), torch.randn(heads, n, DIM)
    attention = torch.nn.functional.scaled_dot_product_attention
    for group in (1, 4):
        q = torch.randn(heads, group, DIM)
        matmul = lambda: torch.softmax(q @ k.transpose(1, 2) / DIM**0.5, -1) @ v
        packed = lambda: attention(q, k, v)
        grouped = lambda: attention(q.view(1, heads * group, 1, DIM), k[None], v[None], enable_gqa=True)
        say("dense", f"{group} queries", min(median(5, matmul), median(5, packed)))
        say("dense", f"{group} queries, enable_gqa", median(5, grouped))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("out")
    parser.add_argument("--n", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", action="store_true", help="only the rows on attention")
    args = parser.parse_args()
    shapes = [] if args.attention else CASES
    keys, queries = keys_and_queries(args.n, 64)
    k = args.n // 10
    exact = top(queries @ keys.T, k)
    peer, ours, quality_of = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        keys.tofile(f"{folder}/keys.f32")
        queries.tofile(f"{folder}/queries.f32")
        for round in range(args.rounds):
            say = lambda case, what, seconds: peer.setdefault((case, what), []).append(seconds)
            for m, nbits in shapes:
                decoded = faiss_case(keys, queries, m, nbits, say)
                if round == 0:
                    quality_of["faiss", f"{m}x{nbits}"] = quality(keys, queries, decoded, exact, k)
            rows = queries @ keys.T
            say(
                "top-k",
                "argpartition",
                median(3, lambda: [np.argpartition(row, args.n - k) for row in rows]) / 64,
            )
            dense_attention(say)
            cases = ",".join(f"{m}x{nbits}" for m, nbits in shapes)
            lines = subprocess.run(
                [args.binary, folder, cases], check=True, capture_output=True, text=True
            ).stdout
            for line in map(json.loads, lines.splitlines()):
                ours.setdefault((line["case"], line["what"], line["path"]), []).append(line["seconds"])
            print(f"round {round + 1} of {args.rounds}", file=sys.stderr)
        for m, nbits in shapes:
            decoded = np.fromfile(f"{folder}/decoded_{m}x{nbits}.f32", "<f4").reshape(-1, DIM)
            quality_of["ours", f"{m}x{nbits}"] = quality(keys, queries, decoded, exact, k)
    write(args, shapes, peer, ours, quality_of)


def duration(seconds):
    return (
        f"{seconds * 1e6:.1f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def write(args, shapes, peer, ours, quality_of):
    commit = tables.commit()
    out = [
        "# pq-core against its peers",
        "",
        f"{tables.today()}, commit {commit}, {tables.cpu()}, one thread, {args.n:,} keys of {DIM} components, medians of"
        f" {args.rounds} rounds. faiss-cpu {faiss.__version__} (tuned, see the script), numpy {np.__version__}, torch"
        f" {torch.__version__}. Made by",
        "",
        "    cargo build --release -p kv-benches && python benches/peers/pq.py target/release/pq_speed"
        f" {args.out}" + " --attention" * args.attention,
        "",
        "A factor is the peer's time over ours. Times of a query contain its table; `u8` quantizes that table; faiss's scan"
        " is its search for the best one, since it does not return all scores.",
        "",
    ]
    paths = [path for path in ("Avx512", "Avx2", "Neon") if any(key[2] == path for key in ours)]
    out += ["| what | shape | peer | " + " | ".join(f"pq-core {path}" for path in paths) + " |"]
    out += ["| --- " * (3 + len(paths)) + "|"]

    def row(what, case, peer_key, our_what, shown=paths):
        reference = statistics.median(peer[peer_key])
        cells = []
        for path in paths:
            times = ours.get((case, our_what, path)) if path in shown else None
            cells.append(
                ""
                if times is None
                else f"{duration(statistics.median(times))} ({reference / statistics.median(times):.1f}x)"
            )
        out.append(f"| {what} | {case} | {duration(reference)} | " + " | ".join(cells) + " |")

    names = [f"{m}x{nbits}" for m, nbits in shapes]
    for case in names:
        row("train, 25 iterations", case, (case, "train"), "train")
    for case in names:
        row("encode", case, (case, "encode"), "encode")
    for table in ("f32", "u8"):
        for case in names:
            if not (table == "u8" and case.endswith("x12")):
                row(f"scan, {table} table, all scores", case, (case, "scan"), f"scan {table}")
                row(
                    f"scan, {table} table, + top n/10",
                    case,
                    (case, "scan + top n/10"),
                    f"scan {table} + top n/10",
                )
    for case in names:
        if case.endswith("x4"):
            row("scan, u8 table, against FastScan", case, (case, "FastScan scan"), "scan u8")
            row("the same + top n/10", case, (case, "FastScan scan + top n/10"), "scan u8 + top n/10")
    row("top n/10, against numpy argpartition", "top-k", ("top-k", "argpartition"), "n/10")
    std = ours["top-k", "select_nth_unstable", "Scalar"]
    peer["top-k", "std"] = std
    row("top n/10, against Rust select_nth_unstable", "top-k", ("top-k", "std"), "n/10")
    for group in (1, 4):
        name = f"8 kv heads, {group} queries each"
        row(
            f"attention, {name}, against dense f32 in torch",
            "attention 64x8",
            ("dense", f"{group} queries"),
            name,
        )
    name = "8 kv heads, 4 queries each"
    what = f"hybrid with 1 % exact rows, {name}, against"
    row(f"{what} dense f32 in torch", "hybrid 16x8", ("dense", "4 queries"), name)
    row(f"{what} torch's SDPA with enable_gqa", "hybrid 16x8", ("dense", "4 queries, enable_gqa"), name)
    for path in paths:
        peer["codes", path] = ours["attention 64x8", name, path]
        row(f"{what} attention on (64, 8) codes on {path}", "hybrid 16x8", ("codes", path), name, [path])
    if names:
        out += quality_table(names, quality_of)
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    tables.write_printed(args.out, out)


def quality_table(names, quality_of):
    out = [
        "",
        "Quality after 25 iterations:",
        "",
        "| shape | MSE / variance, faiss | pq-core | recall of top n/10, faiss | pq-core |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in names:
        (a, b), (c, d) = quality_of["faiss", case], quality_of["ours", case]
        out.append(f"| {case} | {a:.5f} | {c:.5f} ({100 * (c / a - 1):+.2f} %) | {b:.4f} | {d:.4f} |")
    return out


main()
