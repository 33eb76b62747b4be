#!/usr/bin/env python3
"""PQCache's studies on the CPU, by `kv compare`: its figures 10(c) and 10(d), and top-k quality next to exact top-k.

    cargo build --release
    python benches/peers/pqcache.py target/release/kv benches/results [--context 4096] \\
        [--smollm2 MODEL.gguf --text WIKITEXT]

Iterations: KL divergence from the dense cache (teacher-forced) at a tenth of the tokens.
Hits: block-cache hit rate of the rows of a step, at a tenth of the tokens; KiB per step are summed over all layers and heads.
Quality: pqcache and the oracle with the same number of rows, at 8,192 tokens and, on WIKITEXT, at 16,000 or the model's maximum.
Shares of the tokens include sinks and window.
"""

import argparse, json, os, subprocess, tempfile

import tables

EXACT = 68  # sinks and window
ITERATIONS = (1, 2, 4, 8, 16, 25)


class Bench:
    """Runs of `kv` on one model."""

    def __init__(self, kv, name, context, decode, model=None, text=None):
        self.kv, self.name, self.context, self.decode = kv, name, context, decode
        self.options = (["--model", model] if model else []) + (["--text", text] if text else [])

    def run(self, command, *arguments):
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run(
                [self.kv, command, "--device", "cpu", *self.options, "--json", file.name, *arguments],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            return json.load(open(file.name))

    def compare(self, methods):
        arguments = [
            "--context",
            str(self.context),
            "--decode",
            str(self.decode),
            "--methods",
            ",".join(methods),
        ]
        rows = self.run("compare", *arguments)["methods"]
        return [{key: value for key, value in row.items() if key != "kl_by_position"} for row in rows]


def iterations(bench, code):
    """KL by iterations."""
    methods = [f"pqcache:ratio=0.1:code={code}:iterations={n}" for n in ITERATIONS]
    return [row | {"iterations": n} for n, row in zip(ITERATIONS, bench.compare(methods))]


def hits(bench, code, settings, folder):
    """Block caches by (evict, k-cache, tokens, block)."""
    methods = [
        f"pqcache:ratio=0.1:code={code}:iterations=4:offload={folder}:evict={e}:k-cache={k}:cache={c}:block={b}"
        for e, k, c, b in settings
    ]
    rows = bench.compare(methods)
    for row, (evict, k, tokens, block) in zip(rows, settings):
        row.update(
            setting=row["setting"].replace(folder, "FOLDER"),
            evict=evict,
            k_cache=k,
            cache=tokens,
            block=block,
        )
    return rows


def grid(context):
    """k-cache, capacity and block length around an eighth of the context in 32 blocks of which a step loads 8."""
    cache = context // 8
    block = cache // 32
    points = [(k, cache, block) for k in (1, 2, 4, 8, 32)]
    points += [(8, part, block) for part in (context // 32, context // 4, context // 2)]
    points += [(max(cache // b // 4, 1), cache, b) for b in (block // 4, block * 2, block * 8)]
    return [(evict, *point) for point in points for evict in ("lru", "lfu")]


def quality(bench, codes):
    """Rows of exact top-k, then of each code, at a fifth, a tenth, and 256 rows."""
    n = bench.context
    shares = [("1/5", 0.2), ("1/10", 0.1), ("256 rows", (256 + EXACT) / (n + 1))]
    methods = [
        f"{m}:ratio={ratio:.5f}"
        for _, ratio in shares
        for m in ["oracle"] + [f"pqcache:code={code}" for code in codes]
    ]
    rows = bench.compare(methods)
    step = 1 + len(codes)
    for i, row in enumerate(rows):
        row["share"], row["over_oracle"] = shares[i // step][0], row["kl"] / rows[i // step * step]["kl"]
    return rows


def study(bench, code, codes, texts, settings, write):
    """The results on one model, which are written after each part."""
    result = {"name": bench.name, "code": code, "context": bench.context}
    result |= {"quality": [], "iterations": [], "hits": []}
    with tempfile.TemporaryDirectory() as folder:
        for text in texts:
            result["quality"].append(
                {"name": text.name, "context": text.context, "rows": quality(text, codes)}
            )
            write(result)
        result["iterations"] = iterations(bench, code)
        write(result)
        result["hits"] = hits(bench, code, settings, folder)
        write(result)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    made, studies = {"date": tables.today(), "commit": tables.commit()}, []

    def write(unfinished):
        tables.write(os.path.join(args.results, "pqcache.json"), made | {"studies": studies + [unfinished]})

    n = args.context
    codes = ("2x6", "8x8", "16x8", "32x8")
    name = "tiny-llama-12m, State of the Union addresses"
    bench, texts = Bench(args.kv, name, n, 64), [Bench(args.kv, name, 8192, 64)]
    if args.text:
        texts.append(Bench(args.kv, "tiny-llama-12m, WikiText-2", 16_000, 64, text=args.text))
    studies.append(study(bench, "2x6", codes, texts, grid(n), write))
    if args.smollm2:
        name, model = "SmolLM2-135M-Instruct, WikiText-2", (args.smollm2, args.text)
        bench, texts = Bench(args.kv, name, n, 48, *model), [Bench(args.kv, name, 8000, 48, *model)]
        few = [(evict, k, n // 8, n // 256) for k in (2, 8, 32) for evict in ("lru", "lfu")]
        study(bench, "2x6", codes, texts, few, write)


if __name__ == "__main__":
    main()
