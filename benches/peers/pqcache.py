#!/usr/bin/env python3
"""PQCache's studies on the CPU, by `kv cost` and `kv compare`: its figures 7, 10(c), 10(d), and top-k quality next to exact top-k.

    cargo build --release
    python benches/peers/pqcache.py target/release/kv benches/results [--context 4096] \\
        [--smollm2 MODEL.gguf --text WIKITEXT]

Prefill: milliseconds for a layer, for offloading its rows to a file in the temporary folder, and for one k-means iteration over its heads;
the number of iterations that take as long as a layer, by a fit of both times; a layer followed by 4 iterations (in turn), and with the
iterations on threads that run concurrently with the following layers (overlapped), both on all cores. The times scatter by more than 4
iterations take (some layers are slower without iterations than with them), so no fraction that the overlap hides follows from them.
Iterations: KL divergence from the dense cache (teacher-forced) at a tenth of the tokens, and seconds to train all layers.
Hits: block-cache hit rate of the rows of a step, at a tenth of the tokens; KiB per step are summed over all layers and heads.
Quality: pqcache and the oracle with the same number of rows, at 8,192 tokens and, on WIKITEXT, at 16,000 or the model's maximum.
Shares of the tokens include sinks and window.
"""

import argparse, datetime, json, os, subprocess, tempfile

import record

EXACT = 68  # sinks and window
ITERATIONS = (1, 2, 4, 8, 16, 25)


class Bench:
    """Runs of `kv` on one model."""

    def __init__(self, kv, name, layers, context, decode, model=None, text=None):
        self.kv, self.name, self.layers, self.context, self.decode = kv, name, layers, context, decode
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


def prefill(bench, lengths, code, folder):
    return bench.run(
        "cost",
        "--method",
        f"pqcache:code={code}",
        "--lengths",
        ",".join(map(str, lengths)),
        "--offload",
        folder,
    )


def prefill_lines(profile):
    c, layer = profile["iteration"], profile["layer"]
    lines = [
        "| tokens | layer ms | offload ms | iteration ms | iterations | in turn ms | overlapped ms |",
        "|" + " --- |" * 7,
    ]
    for at in profile["times"]:
        n = at["tokens"]
        fits = (layer[0] + layer[1] * n + layer[2] * n * n) / (c[0] + c[1] * n)
        cells = [f"{1000 * at[key]:.2f}" for key in ("layer", "offload", "iteration")] + [
            f"{min(max(int(fits), 1), 25)}"
        ]
        cells += [f"{1000 * at[key]:.2f}" for key in ("in_turn", "overlapped")]
        lines.append("| " + " | ".join([str(n)] + cells) + " |")
    return lines


def iterations(bench, code, profile_path, profile):
    """KL by iterations, and with the number of iterations that the profile gives."""
    methods = [f"pqcache:ratio=0.1:code={code}:iterations={n}" for n in ITERATIONS + (profile_path,)]
    out = []
    for n, row in zip(ITERATIONS + ("adaptive",), bench.compare(methods)):
        row["setting"] = row["setting"].replace(profile_path, "adaptive")
        row["iterations"] = n if n != "adaptive" else follow(profile, bench.context - EXACT)
        row["label"] = str(n) if n != "adaptive" else f"adaptive: {row['iterations']}"
        out.append(row)
    return out


def follow(profile, n):
    c, layer = profile["iteration"], profile["layer"]
    return min(max(int((layer[0] + layer[1] * n + layer[2] * n * n) / (c[0] + c[1] * n) * (1 + 5e-7)), 1), 25)


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


def hit_lines(rows):
    lines = [
        "| cache | block | k-cache | LRU hits | LFU hits | LFU: KiB of misses per step | of blocks |",
        "|" + " --- |" * 7,
    ]
    for lru, lfu in zip(rows[::2], rows[1::2]):
        kib = lambda key: f"{lfu[key] / 1024:.0f}"
        cells = [
            lru["cache"],
            lru["block"],
            lru["k_cache"],
            *(f"{100 * row['block_hit_rate']:.0f} %" for row in (lru, lfu)),
        ]
        lines.append(
            "| "
            + " | ".join(map(str, cells + [kib("fetched_bytes_per_step"), kib("loaded_bytes_per_step")]))
            + " |"
        )
    return lines


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


def quality_lines(rows):
    lines = [
        "| tokens | method | rows per step and head | bits per value | KL | KL over oracle's | top-1 |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        code = next((part[5:] for part in row["setting"].split(":") if part.startswith("code=")), "")
        cells = [
            row["share"],
            f"{row['name']} {code}".strip(),
            f"{row['fetched_rows_per_step']:.1f}",
            f"{row['bits_per_value']:.2f}",
            f"{row['kl']:.5f}",
            f"{row['over_oracle']:.2f}",
            f"{100 * row['top1']:.1f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary(texts, codes):
    """The smallest and the largest ratio of each code."""
    step = 1 + len(codes)
    ratios = [
        [row["over_oracle"] for text in texts for row in text["rows"][1 + i :: step]]
        for i in range(len(codes))
    ]
    parts = [f"{min(found):.2f} to {max(found):.2f} with {code}" for code, found in zip(codes, ratios)]
    return f"Range of KL over oracle's at equal rows: {', '.join(parts)}."


def study(bench, code, codes, lengths, texts, settings, out, write):
    """Adds sections to `out` and their data to the result; both are written after each section."""
    result = {"name": bench.name}
    out += [f"## {bench.name}", ""]

    def section(title, key, found, lines):
        result[key] = found
        out.extend([title, "", *lines, ""])
        write(result)

    with tempfile.TemporaryDirectory() as folder:
        profile = prefill(bench, lengths, code, folder)
        path = os.path.join(folder, "cost.json")
        with open(path, "w") as file:
            json.dump(profile, file)
        section(f"Prefill, {code}, {profile['threads']} threads:", "prefill", profile, prefill_lines(profile))
        result["quality"] = []
        for text in texts:
            rows = quality(text, codes)
            result["quality"].append({"name": text.name, "context": text.context, "rows": rows})
            out.extend([f"Quality, {text.name}, {text.context} tokens, {text.decode} decoded:", ""])
            out.extend([*quality_lines(rows), ""])
            write(result)
        out.extend([summary(result["quality"], codes), ""])
        sizes = f"{bench.context} tokens, {bench.decode} decoded"
        rows = iterations(bench, code, path, profile)
        c, n = profile["iteration"], bench.context - EXACT
        lines = ["| iterations | seconds | KL | top-1 |", "|" + " --- |" * 4]
        for row in rows:
            seconds = bench.layers * row["iterations"] * (c[0] + c[1] * n)
            lines.append(f"| {row['label']} | {seconds:.2f} | {row['kl']:.5f} | {100 * row['top1']:.1f} % |")
        section(f"Iterations, {code}, {sizes}:", "iterations", rows, lines)
        rows = hits(bench, code, settings, folder)
        section(f"Hits, {code}, {sizes}:", "hits", rows, hit_lines(rows))
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    commit = record.commit()
    doc = __doc__.strip().splitlines()
    out, studies = (
        ["# PQCache on the CPU", "", f"{datetime.date.today()}, commit {commit}. Made by", ""]
        + doc[2:]
        + [""],
        [],
    )

    def write(unfinished):
        record.write(os.path.join(args.results, "pqcache.md"), out)
        text = json.dumps({"commit": commit, "studies": studies + [unfinished]}, indent=1)
        record.write(os.path.join(args.results, "pqcache.json"), [text])

    n = args.context
    lengths = (n // 8, n // 4, n // 2, n)
    codes = ("2x6", "8x8", "16x8", "32x8")
    name = "tiny-llama-12m, State of the Union addresses"
    bench, texts = Bench(args.kv, name, 6, n, 64), [Bench(args.kv, name, 6, 8192, 64)]
    if args.text:
        texts.append(Bench(args.kv, "tiny-llama-12m, WikiText-2", 6, 16_000, 64, text=args.text))
    studies.append(study(bench, "2x6", codes, lengths, texts, grid(n), out, write))
    if args.smollm2:
        name, model = "SmolLM2-135M-Instruct, WikiText-2", (args.smollm2, args.text)
        bench, texts = Bench(args.kv, name, 30, n, 48, *model), [Bench(args.kv, name, 30, 8000, 48, *model)]
        few = [(evict, k, n // 8, n // 256) for k in (2, 8, 32) for evict in ("lru", "lfu")]
        study(bench, "2x6", codes, lengths, texts, few, out, write)


if __name__ == "__main__":
    main()
