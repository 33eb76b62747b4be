#!/usr/bin/env python3
"""Rivals as they were published next to this project's methods, by `kv eval`: margins.{json,md}.

    cargo build --release -p kv-reference
    python benches/peers/margins.py target/release/kv benches/results --wikitext WIKITEXT [--text NAME=FILE]... \\
        [--run LENGTH:DECODE:TRIALS]... [--texts N] [--only REGEX]

Token selection at shares of the tokens, sinks and window included, and codes at 4, 3 and 2 bits. The profile is of the first 4,096 tokens
of WIKITEXT. Texts are code (this repository's Rust sources) and those of `--text`; `--texts N` takes the first N. A run is a prompt
of LENGTH tokens, DECODE tokens after it, and TRIALS pass keys and recall lines at half of its depth. `--only REGEX` runs the methods that it
matches, and keeps the stored rows of the others.

Intervals are bootstraps over blocks of 16 consecutive decoded tokens of all texts of a length (95 %); each method is compared with
the family's own by the paired difference. Before it measures, the script asserts on 512 tokens that the rows which each method reads are
no more than its budget, and that bits are those of each format.
"""

import json, os, random, re, tempfile

import tables, texts

SHARES = [0.05, 0.1]
EXTRA = 1 / 128  # of H2O's compensation for what others read to score: PQCache, 4.1.3
BLOCK, SAMPLES = 16, 2000


def selection(share):
    """Methods that read a share of the tokens; the first is the family's own."""
    return [
        f"pqcache:ratio={share}",
        f"pqcache:ratio={share}:code=2x6",
        f"oracle:ratio={share}",
        f"sparq:ratio={share}:r=32",
        f"sparq:ratio={share}:r=1",
        f"quest:ratio={share}",
        f"quest:ratio={share}:skip=0",
        f"infllm:ratio={share}",
        f"infllm:ratio={share}:r=1",
        f"h2o:ratio={share + EXTRA:.4f}",
        f"snapkv:tokens={share}",
    ]


FAMILIES = {f"{share:.0%} of the rows": selection(share) for share in SHARES} | {
    "hybrid": ["hybrid", "hybrid:rows=0.05"],
    "8 bits": ["int8", "fp8", "fp8:scale=calibrated"],
    "4 bits": ["sq:k=4:v=4", "million:k=8/2:v=8/2", "pqklt:k=8/2:v=8/2", "kivi:k=4:v=4", "kvquant:k=4:v=4", "nvfp4", "nvfp4:scale=calibrated"],
    "3 bits": ["sq:k=3:v=3", "million:k=6/2:v=6/2", "pqklt:k=6/2:v=6/2", "kivi:k=3:v=3", "kvquant:k=3:v=3"],
    "2 bits": ["sq:k=2:v=2", "million:k=4/2:v=4/2", "pqklt:k=4/2:v=4/2", "kivi:k=2:v=2", "kvquant:k=2:v=2"],
}
FITTED = ("hybrid", "sq:", "million", "pqklt", "kvquant", "fp8:scale=calibrated", "nvfp4:scale=calibrated")
# Bits of an element in the store, and the tokens of a prompt of 512 and 32 decoded that stay exact.
FORMATS = {"fp8": (8, 68), "nvfp4": (4.5, 68), "kivi:k=4:v=4": (5, 128), "kivi:k=2:v=2": (3, 128)}


def is_fitted(method):
    return method.startswith(FITTED)


def check(bench, text):
    """What must hold of any text."""
    length, decode, share = 512, 32, 0.2
    tokens = length + decode
    chosen = [method.replace(f"{SHARES[0]}", f"{share}") for method in selection(SHARES[0])]
    rows = bench.eval(text, [*chosen, *FORMATS], length, decode, 0, profile=False)
    for method in chosen:
        if not method.startswith(("snapkv", "h2o")) and "quest:ratio=0.2" != method:
            unit = 128 if method.startswith("infllm") else 16  # the least that InfLLM and Quest read
            read = rows[method]["fetched_rows_per_step"]
            assert 0 < read <= max(share * tokens - 68 + 1, unit), (method, read)
    for method, (bits, exact) in FORMATS.items():
        expected = (bits * (tokens - exact) + 16 * exact) / tokens
        assert abs(rows[method]["bits_per_value"] - expected) < 1e-6, (method, expected, rows[method]["bits_per_value"])


def measured(row):
    """What is stored of a row of `kv eval`."""
    return {
        "bits": row["bits_per_value"],
        "rows": row["fetched_rows_per_step"],
        "read_bytes": row["fetched_bytes_per_step"],
        "scored_bytes": row["scored_bytes_per_step"],
        "top1": row["top1"],
        "needle": texts.found(row["needle"]),
        "recall": texts.found(row["recall"]),
        "kl": [float(f"{kl:.4g}") for kl in row["kl_by_position"]],
    }


def interval(samples):
    ordered = sorted(samples)
    return [ordered[int(len(ordered) * part)] for part in (0.025, 0.975)]


def resampled(values, seed=0):
    """Means of resampled blocks of the texts' tokens: `values` has a list for each text."""
    blocks = [text[i : i + BLOCK] for text in values for i in range(0, len(text), BLOCK)]
    blocks = [(sum(block), len(block)) for block in blocks]
    choose = random.Random(seed)
    for _ in range(SAMPLES):
        sums, sizes = zip(*choose.choices(blocks, k=len(blocks)))
        yield sum(sums) / sum(sizes)


def summarized(runs):
    """A row for every length and method, with intervals, of the stored runs."""
    rows = []
    for length in sorted({run["length"] for run in runs}):
        of_length = [run["methods"] for run in runs if run["length"] == length]
        for family, methods in FAMILIES.items():
            present = [method for method in methods if all(method in run for run in of_length)]
            for method in present:
                of = [run[method] for run in of_length]
                base = [run[present[0]] for run in of_length]
                kls = [row["kl"] for row in of]
                differences = [[x - y for x, y in zip(a["kl"], b["kl"])] for a, b in zip(of, base)]
                mean = lambda key: sum(row[key] for row in of) / len(of)
                total = lambda key: [sum(row[key][i] for row in of) for i in (0, 1)]
                count = sum(map(len, kls))
                rows.append(
                    {
                        "length": length,
                        "family": family,
                        "method": method,
                        "texts": len(of),
                        "kl": sum(map(sum, kls)) / count,
                        "kl_interval": interval(resampled(kls)),
                        "difference": sum(map(sum, differences)) / count if method != present[0] else None,
                        "difference_interval": interval(resampled(differences)) if method != present[0] else None,
                        "needle": total("needle"),
                        "recall": total("recall"),
                    }
                    | {key: mean(key) for key in ("bits", "rows", "read_bytes", "scored_bytes", "top1")}
                )
    return rows


def main():
    parser = texts.parser()
    parser.add_argument("--run", action="append", default=[], metavar="LENGTH:DECODE:TRIALS")
    parser.add_argument("--only", default="")
    args = parser.parse_args()

    unseen = texts.chosen(args, ("code",))
    methods = [method for family in FAMILIES.values() for method in family if re.search(args.only, method)]
    path = os.path.join(args.results, "margins.json")
    stored = json.load(open(path))["runs"] if os.path.exists(path) else []
    with tempfile.TemporaryDirectory() as folder:
        bench = texts.Bench(args.kv, "", folder)
        fitted = [method for method in methods if is_fitted(method)]
        if fitted:
            bench.calibrate(args.wikitext, fitted)
        for name, content in unseen.items():
            file = bench.file(content)
            check(bench, file)
            for length, decode, trials in (map(int, run.split(":")) for run in args.run or ["4096:192:8", "16000:192:8"]):
                rows = bench.eval(file, methods, length, decode, trials, profile=bool(fitted), calibration=texts.CALIBRATION)
                key = {"text": name, "length": length, "decode": decode}
                same = [run for run in stored if key.items() <= run.items()]
                before = same[0]["methods"] if same and args.only else {}
                new = {method: {"commit": tables.commit()} | measured(row) for method, row in rows.items()}
                run = key | {"date": tables.today(), "trials": trials, "methods": before | new}
                stored = [run for run in stored if run not in same] + [run]
                data = {"calibration": texts.CALIBRATION, "block": BLOCK, "rows": summarized(stored), "runs": stored}
                tables.write(path, data)


if __name__ == "__main__":
    main()
