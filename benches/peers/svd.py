#!/usr/bin/env python3
"""svd-core against LAPACK, numpy and torch, its schedules against their ideal (svd.md); what rank buys on two models (svd-quality.md).

    cargo build --release
    pip install faiss-cpu numpy torch
    python benches/peers/svd.py target/release benches/results [--smollm2 MODEL.gguf --text WIKITEXT --other TEXT]

Speeds are on one thread, unless said: medians of three rounds, in each of which the peers run right before.

The rotation is the closed form, and ranks follow from one removal rate, unless said. `kv compare` made the rows of quality:
the prompt's tokens between 4 sinks and a window of 64 are compressed, perplexity and KL are of the tokens decoded after it,
bits are all that is kept, exact tokens included, over the numbers cached.
"""

import argparse, json, math, os, statistics, tempfile, time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
import faiss
import numpy as np
import programs, tables
from programs import compared, given, median, run
import torch
import torch.nn.functional as F

faiss.omp_set_num_threads(1)
torch.set_num_threads(1)
faiss.cvar.distance_compute_blas_threshold = 20
DIM = 128


def table(out, head, rows):
    out += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    out += ["| " + " | ".join(str(x) for x in row) + " |" for row in rows] + [""]


def speeds(out, folder):
    rng = np.random.default_rng(7)
    n = 57344
    q, _ = np.linalg.qr(rng.standard_normal((n, DIM)))
    v, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
    rows = ((q * np.logspace(0, -6, DIM)) @ v.T).astype("<f4")
    wide = rows.astype(np.float64)

    def gram_eigh():
        x = rows.astype(np.float64)
        return np.linalg.eigh(x.T @ x)

    rounds = []
    with tempfile.TemporaryDirectory() as data:
        rows.tofile(f"{data}/rows.f32")
        for _ in range(3):
            found = {
                ("gesdd", ""): median(3, lambda: np.linalg.svd(wide, full_matrices=False)),
                ("numpy", ""): median(9, gram_eigh),
            }
            found |= torch_attention()
            ours = [json.loads(line) for line in run([f"{folder}/svd_speed", data]).splitlines()]
            found |= {(r["what"], r["path"]): r["seconds"] for r in ours if r["what"] != "schedule"}
            rounds.append(found)
        basis = np.fromfile(f"{data}/basis.f64").reshape(DIM, DIM)
    seconds = {what: statistics.median(found[what] for found in rounds) for what in rounds[0]}
    lapack, numpy = seconds["gesdd", ""], seconds["numpy", ""]
    path = (
        "Avx512"
        if ("attend, f32, rank 128", "Avx512") in seconds
        else next(p for w, p in seconds if w == "attend, f32, rank 128")
    )

    # Residual energy at every rank, and the least possible. Both are computed from the rows: the energy of what projecting
    # on the last directions gives.
    _, sigma, _ = np.linalg.svd(wide, full_matrices=False)
    energy = ((wide @ basis) ** 2).sum(0)
    left = np.cumsum(energy[::-1])[::-1]
    best = np.cumsum((sigma**2)[::-1])[::-1]
    total = best[0]
    worst = max(abs(left - best)[1:] / total)
    relative = max((abs(left - best) / best)[1:97])
    orthonormal = abs(basis.T @ basis - np.eye(DIM)).max()
    assert orthonormal < 1e-13, orthonormal

    out += ["## From 57,344 x 128 rows to an ordered rotation", "", "Spectrum 1 to 1e-6, f32 rows.", ""]
    one = {p: s for (w, p), s in seconds.items() if w == "rotation, 1 threads"}
    two = {p: s for (w, p), s in seconds.items() if w == "rotation, 2 threads"}
    rows_ = [
        ["LAPACK gesdd, f64 (numpy)", f"{1e3 * lapack:.0f} ms", "1"],
        ["numpy Gram in f64, eigh", f"{1e3 * numpy:.1f} ms", f"{lapack / numpy:.0f}x"],
    ]
    for p in one:
        rows_.append(
            [
                f"svd-core, {p}",
                f"{1e3 * one[p]:.1f} ms",
                f"{lapack / one[p]:.0f}x; numpy's Gram {numpy / one[p]:.2f}x",
            ]
        )
        rows_.append(
            [
                f"svd-core, {p}, 2 threads",
                f"{1e3 * two[p]:.1f} ms",
                f"{lapack / two[p]:.0f}x; one thread {one[p] / two[p]:.2f}x",
            ]
        )
    table(out, ["", "time", "faster than gesdd"], rows_)
    out += [
        f"The eigenproblem alone takes {1e3 * seconds['eigenproblem', '']:.1f} ms, the closed form of two Grams {1e3 * seconds['closed form', '']:.1f} ms.",
        f"Residual energy against the optimum: at most {worst:.0e} of the total energy off at every rank, {relative:.0e} of the residual itself up to rank 96.",
        "",
    ]

    out += [
        "## Decode attention",
        "",
        "32 query heads on 8 key/value heads x 32,768 x 128, one token. `read` touches every byte of keys and values once.",
        "",
    ]
    rows_ = []
    for name in ("f32", "bf16", "f16"):
        full, half = seconds[f"attend, {name}, rank 128", path], seconds[f"attend, {name}, rank 64", path]
        read = seconds[f"read, {name}", ""]
        peers = [seconds.get((f"torch {form}", name)) for form in ("gqa", "packed", "matmul")]
        rows_.append(
            [
                name,
                *(f"{1e3 * s:.1f}" if s else "-" for s in peers),
                f"{1e3 * read:.1f}",
                f"{1e3 * full:.1f}",
                f"{min(peers) / full:.1f}x" if all(peers) else "-",
                f"{full / read:.2f}",
                f"{1e3 * half:.1f}",
                f"{full / half:.2f}x",
            ]
        )
    table(
        out,
        [
            "ms",
            "torch SDPA enable_gqa",
            "torch SDPA packed",
            "torch matmul packed",
            "read",
            f"svd-core {path}",
            "against torch's best",
            "over `read`",
            "rank 64",
            "against full rank",
        ],
        rows_,
    )
    avx2 = {n: seconds.get((f"attend, {n}, rank 128", "Avx2")) for n in ("f32", "bf16", "f16")}
    if path == "Avx512" and all(avx2.values()):
        out += ["AVX2: " + ", ".join(f"{n} {1e3 * s:.1f} ms" for n, s in avx2.items()) + ".", ""]

    out += [
        "## Schedules",
        "",
        "Ranks of 8 heads with a coefficient of variation of .45 in multiples of 16, 2,048 units for a task, sequences of a quarter to the whole of the length;",
        "busiest processor over the work shared out evenly, mean and worst of 50 draws. Prefill: four query heads a key/value head, causal, blocks of 128 rows and more.",
        "",
    ]
    table(
        out,
        [
            "processors",
            "batch x longest",
            "tasks",
            "decode: mean, worst",
            "prefill: mean, worst",
            "planning decode",
        ],
        [
            [
                r["processors"],
                f"{r['batch']} x {r['longest']:,}",
                f"{r['tasks']:.0f}",
                f"{r['decode']:.3f}, {r['decode_worst']:.3f}",
                f"{r['prefill']:.4f}, {r['prefill_worst']:.4f}",
                f"{1e6 * r['seconds']:.0f} us",
            ]
            for r in ours
            if r["what"] == "schedule"
        ],
    )


def torch_attention():
    found = {}
    with torch.inference_mode():
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            torch.manual_seed(0)
            q = torch.randn(1, 32, 1, DIM).to(dtype)
            k, v = (torch.randn(1, 8, 32768, DIM).to(dtype) for _ in range(2))
            packed = q.reshape(1, 8, 4, DIM)
            forms = {
                "gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                "packed": lambda: F.scaled_dot_product_attention(packed, k, v),
                "matmul": lambda: torch.matmul(
                    torch.softmax(torch.matmul(packed, k.transpose(-1, -2)) * DIM**-0.5, -1), v
                ),
            }
            for form in forms.values():
                form()
            found |= {(f"torch {what}", name): median(7, form) for what, form in forms.items()}
    return found


def softmax(x):
    x = np.exp(x - x.max(1, keepdims=True))
    return x / x.sum(1, keepdims=True)


def rotations(out, folder, model, text, length):
    with tempfile.TemporaryDirectory() as data:
        result = json.loads(run([f"{folder}/svd_quality", model, text, "4096", str(length), data]))
        dim = result["head_dim"]
        out += [
            "### Error at equal rank",
            "",
            f"Calibrated on 4,096 tokens, tested on the {length:,} after them; mean over heads. Keys: of the scores. Values: of what W_O makes of them.",
            "`not best`: heads in which the closed form is not the lowest of the three on unseen tokens.",
            "",
        ]
        rows = []
        for side in ("keys", "values"):
            for r in result["errors"][side]:
                rows.append(
                    [
                        side,
                        r["rank"],
                        f"{r['principal']:.4f}",
                        f"{r['stacked']:.4f}",
                        f"{r['closed']:.4f}",
                        f"{r['closed'] / r['principal']:.2f}, {r['closed'] / r['stacked']:.2f}",
                        f"{r['worse']} of {r['heads']}",
                    ]
                )
        table(
            out,
            [
                "",
                f"rank of {dim}",
                "own PCA",
                "stacked (ZACK)",
                "closed form",
                "closed over PCA, stacked",
                "not best",
            ],
            rows,
        )
        codes(out, result, data, dim)


def codes(out, result, data, dim):
    """Plain, rotated and OPQ codes of the same keys."""
    names = ("plain", "rotated", "opq")
    sums = {name: np.zeros(4) for name in names}
    for i, case in enumerate(result["codes"]):
        load = lambda name: np.fromfile(f"{data}/{name}_{i}.f32", "<f4").reshape(-1, dim)
        train, test, queries = load("train"), load("test"), load("queries")
        start = time.perf_counter()
        opq = faiss.OPQMatrix(dim, dim // 2)
        opq.niter = 50
        inner = faiss.ProductQuantizer(dim, dim // 2, 8)
        inner.cp.min_points_per_centroid = 1  # no warning at every iteration
        opq.pq = inner
        opq.train(train)
        opq_seconds = time.perf_counter() - start
        pq = faiss.ProductQuantizer(dim, dim // 2, 8)
        pq.cp.min_points_per_centroid, pq.cp.max_points_per_centroid = 1, 1 << 30
        pq.train(opq.apply(train))
        decoded = {
            "plain": load("plain"),
            "rotated": load("rotated"),
            "opq": opq.reverse_transform(pq.decode(pq.compute_codes(opq.apply(test)))),
        }
        seconds = {"plain": 0.0, "rotated": case["rotate_seconds"], "opq": opq_seconds}
        exact = queries @ test.T
        attention = softmax(exact / math.sqrt(dim))
        k = len(test) // 10
        top = np.argpartition(-exact, k - 1, axis=1)[:, :k]
        for name in names:
            scores = queries @ decoded[name].T
            found = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            recall = np.mean([len(set(a) & set(b)) / k for a, b in zip(top.tolist(), found.tolist())])
            coded = softmax(scores / math.sqrt(dim))
            kl = np.mean((attention * (np.log(attention + 1e-30) - np.log(coded + 1e-30))).sum(1))
            error = ((scores - exact) ** 2).mean() / exact.var()
            sums[name] += [recall, kl, error, seconds[name]]
    n = len(result["codes"])
    out += [
        f"### Codes of {dim // 2} x 8 bits on rotated keys",
        "",
        f"Keys after RoPE of {n} heads, trained on 4,092 tokens, tested on others: recall of the tenth of the tokens with the highest scores, KL of the attention, squared error of the scores over their variance; mean over heads. Seconds to find the rotation, one head.",
        "",
    ]
    labels = {
        "plain": "plain PQ",
        "rotated": "query-metric rotation, balanced",
        "opq": "faiss OPQ, 50 iterations",
    }
    table(
        out,
        ["", "recall", "KL", "error", "seconds"],
        [
            [
                labels[m],
                f"{sums[m][0] / n:.4f}",
                f"{sums[m][1] / n:.5f}",
                f"{sums[m][2] / n:.5f}",
                f"{sums[m][3] / n:.4f}",
            ]
            for m in names
        ],
    )
    out += [f"The rotation takes {100 * sums['rotated'][3] / sums['opq'][3]:.2f} % of OPQ's time.", ""]


PARTS = (0.9, 0.75, 0.6, 0.5)


def compare(folder, model, text, context, decode, specs, profile=None):
    options = given(model=model, text=text, profile=profile)
    return compared(f"{folder}/kv", specs, context, decode, *options)["methods"]


HEAD = ["method", "setting", "bits", "perplexity", "KL", "top-1", "needle"]


def row(r):
    setting = r["setting"].replace(":", " ").replace(" basis=closed", "")
    return [
        r["name"],
        setting,
        f"{r['bits_per_value']:.2f}",
        f"{r['perplexity']:.3f}",
        f"{r['kl']:.4f}",
        f"{100 * r['top1']:.1f} %",
        f"{round(r['needle'] * r['needle_trials'])}/{r['needle_trials']}",
    ]


def removed(rows, loss, limit):
    """The largest part of the bytes (of 16 bits) removed while the loss stays within the limit, interpolated along a curve."""
    points = sorted((1 - r["bits_per_value"] / 16, loss(r)) for r in rows)
    best = 0.0
    for (x0, y0), (x1, y1) in zip([(0.0, 0.0)] + points, points):
        if y1 > limit:
            return f"{x0 + (limit - y0) * (x1 - x0) / (y1 - y0):.2f}"
        best = x1
    return f"{best:.2f} and more"


def quality(out, folder, model, text, other, context, decode, pairs):
    go = lambda specs, profile=None: compare(folder, model, text, context, decode, specs, profile)
    dense = go(["dense"])[0]
    out += [
        f"### Ranks: {context:,} tokens of prompt, {decode} decoded, dense perplexity {dense['perplexity']:.3f}",
        "",
    ]
    curves = {}
    for rule in ("uniform", "removal", "loss"):
        curves[rule] = go([f"zack:k={p}:v={p}:ranks={rule}" for p in PARTS])
    curves["removal, keys cut"] = go([f"zack:k={p}:v=1" for p in PARTS[::2]])
    curves["removal, values cut"] = go([f"zack:k=1:v={p}" for p in PARTS[::2]])
    curves["removal, 4 bits"] = go([f"zack:k={p}:v={p}:bits=4" for p in (1,) + PARTS])
    curves["loss, 4 bits"] = go([f"zack:k={p}:v={p}:ranks=loss:bits=4" for p in PARTS[::2]])
    table(out, HEAD, [row(r) for rows in curves.values() for r in rows])
    perplexity = lambda r: r["perplexity"] / dense["perplexity"] - 1
    out += [
        "Bytes removed, exact tokens counted, interpolated along each curve. Ranks are of any size here (`multiple=1`); the GPU kernels store them in multiples of 8:",
        "",
    ]
    table(
        out,
        ["curve", "perplexity at most 1 % above dense", "KL at most .005"],
        [
            [name, removed(rows, perplexity, 0.01), removed(rows, lambda r: r["kl"], 0.005)]
            for name, rows in curves.items()
        ],
    )

    out += ["### Rotations, eviction, and rivals at equal bytes", ""]
    table(
        out,
        HEAD,
        [
            row(r)
            for r in go(
                [
                    f"zack:k={p}:v={p}:basis={basis}"
                    for p in (0.75, 0.5)
                    for basis in ("closed", "stacked", "principal")
                ]
                + [
                    "snapkv:tokens=0.5",
                    "snapkv:tokens=0.25",
                    "zack:k=0.75:v=0.75:tokens=0.5",
                    "zack:k=0.75:v=0.75:tokens=0.25",
                    "zack:k=0.75:v=0.75:tokens=0.5:bits=4",
                ]
                + [
                    "int8",
                    "int4",
                    "int4:k=3:v=3",
                    "int2",
                    "zack:k=0.9:v=0.9:bits=3",
                    "zack:k=0.75:v=0.75:bits=3",
                ]
                + [f"pqklt:k={m}:v={m}" for m in pairs]
                + ["cachegen:bits=2.5", "cachegen:bits=4"]
            )
        ],
    )

    out += [
        "### Calibration",
        "",
        "Moments after RoPE are taken at positions spread over the model's whole context, whatever the number of tokens.",
        "",
    ]
    rows = []
    with tempfile.TemporaryDirectory() as data:
        specs = ["zack:k=0.75:v=0.75", "zack:k=0.5:v=0.5"]
        for name, source in (("the text's start", text), ("another text", other)):
            for tokens in (256, 1024, 4096) if name == "the text's start" else (4096,):
                if source is None and name == "another text":
                    continue  # without --text the shipped one is read; without --other there is no other
                command = [
                    f"{folder}/kv",
                    "calibrate",
                    f"{data}/p",
                    "--tokens",
                    str(tokens),
                    "--methods",
                    ",".join(specs),
                ]
                command += ["--model", model] if model else []
                command += ["--text", source] if source else []
                run(command)
                rows += [[name, f"{tokens:,}"] + row(r)[1:] for r in go(specs, f"{data}/p")]
                os.remove(f"{data}/p")
    table(out, ["calibrated on", "tokens"] + HEAD[1:], rows)


def retrieval(out, folder, model, text, lengths):
    """Pass keys and lines to be recalled, as `kv eval` prints them."""
    specs = (
        ["dense", "int4"]
        + [f"zack:k={p}:v={p}{more}" for p in (0.75, 0.5) for more in ("", ":basis=stacked", ":bits=4")]
        + ["snapkv:tokens=0.5"]
    )
    out += programs.retrieval(f"{folder}/kv", specs, lengths, *(["--model", model, "--text", text] if model else []))


def section(out, folder, name, model, text, other, path, length, context, decode, pairs, lengths):
    out += [f"## {name}", ""]
    rotations(out, folder, path, text or "reference/assets/sotu-heldout.txt", length)
    quality(out, folder, model, text, other, context, decode, pairs)
    retrieval(out, folder, model, text, lengths)


def head(title, notes, commit):
    doc = __doc__.strip().splitlines()
    cpu = tables.cpu()
    versions = f"numpy {np.__version__}, torch {torch.__version__}, faiss {faiss.__version__}"
    return (
        [
            f"# {title}",
            "",
            f"{tables.today()}, commit {commit}, {cpu}, {os.cpu_count()} cores; {versions}. Made by",
            "",
        ]
        + doc[2:5]
        + [""]
        + doc[notes]
        + [""]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--only", choices=("speed", "quality"))
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument("--other")
    args = parser.parse_args()
    commit = tables.commit()
    if args.only != "quality":
        out = head("svd-core", slice(6, 7), commit)
        speeds(out, args.folder)
        tables.write_printed(f"{args.out}/svd.md", out)
    if args.only != "speed":
        out = head("Quality by rank", slice(8, 11), commit)
        section(
            out,
            args.folder,
            "tiny-llama-12m, State of the Union addresses",
            None,
            None,
            args.other,
            "reference/assets/tiny-llama-12m",
            2048,
            2048,
            384,
            ("64x4", "64x6"),
            [512, 2048],
        )
        tables.write_printed(f"{args.out}/svd-quality.md", out)
        if args.smollm2:
            section(
                out,
                args.folder,
                "SmolLM2-135M-Instruct, WikiText-2",
                args.smollm2,
                args.text,
                args.other,
                args.smollm2,
                2048,
                1024,
                192,
                ("32x4", "32x6"),
                [1024],
            )
            tables.write_printed(f"{args.out}/svd-quality.md", out)


main()
