#!/usr/bin/env python3
"""Quality per byte: PQ against scalar codes at equal total bytes, and PQCache's sweeps, by `kv compare`.

    cargo build --release
    python benches/peers/pq_quality.py target/release/kv benches/results/pq-quality.md [--smollm2 MODEL.gguf --text WIKITEXT]

All methods code 64 tokens at a time, as groups of 64 need, so all have the same tokens exact.

Bits are all that a sequence of this length keeps (codes, norms, scales, minima, sinks, window) and the codebooks and means,
though offline ones serve all sequences, spread over this one context in 16 bits. Not counted: the two maps of a head
(`pqklt`), which belong to the model as its weights do.
"""

import argparse, re

import programs, tables
from programs import compared, given

SCALAR = [f"{name}:k={b}:v={b}" for b in (2, 3, 4) for name in ("int4", "rotated", "lloydmax")]


def codes(dim):
    """Codes by their bits a value: pairs of components, or single ones where the codebook of pairs would be too large."""
    return {
        "2": (f"{dim // 2}x4",) * 2,
        "2.5": (f"{dim // 2}x4", f"{dim // 2}x6"),
        "3": (f"{dim // 2}x6",) * 2,
        "3.5": (f"{dim // 2}x6", f"{dim}x4"),
        "4": (f"{dim}x4",) * 2,
    }


def methods(dim):
    pq = codes(dim)
    spec = lambda name, pair, more="": f"{name}:k={pair[0]}:v={pair[1]}{more}"
    million = [spec("million", pq[b]) for b in ("2", "3", "4")] + [f"million:k={dim // 2}x8:v={dim // 2}x8"]
    ours = [
        spec("pqklt", pair, f":keys={keys}")
        for bits, pair in pq.items()
        for keys in ("mean", "rope")
        if keys == "rope" or "." not in bits
    ]
    ours += [spec("pqklt", pq[b], ":keys=rope:refine=4") for b in ("2", "4")]
    outliers = [spec("million", pq[b], ":outliers=1") for b in ("3", "4")]  # MILLION's table III
    return SCALAR + million + outliers + ours


def pqcache():
    rows = [
        f"{name}:ratio={r}"
        for r in (0.2, 0.1)
        for name in ("oracle", "pqcache:code=2x6", "pqcache:code=16x8")
    ]
    sweep = [
        f"pqcache:ratio=0.1:code={code}"
        for code in ("1x12", "2x6", "4x3", "1x8", "2x8", "4x4", "8x2", "4x8", "16x4")
    ]
    steps = [f"pqcache:ratio=0.1:code=2x6:iterations={i}" for i in (1, 2, 3, 5, 10, 25)]
    return rows + ["streaming:window={recent}"], sweep, steps


def run(kv, model, text, context, decode, specs):
    return compared(kv, specs, context, decode, *given(model=model, text=text))["methods"]


def codebook_bits(row, dim, context):
    """Codebooks and means of a head in 16 bits over the values of one context; those trained for it are counted already."""
    found = dict(re.findall(r"\b([kv])=(\d+x\d+)", row["setting"]))
    if row["name"] not in ("million", "pqklt") or not found:
        return 0.0
    centroids = sum(1 << int(code.split("x")[1]) for code in found.values())
    refined = re.search(r"refine=[1-9]", row["setting"])
    means = 2 if row["name"] == "pqklt" else 0
    return 16 * ((0 if refined else centroids) + means) / (2 * context)


def line(row, dim, context):
    bits = row["bits_per_value"] + codebook_bits(row, dim, context)
    needle = f"{round(row['needle'] * row['needle_trials'])}/{row['needle_trials']}"
    return (
        bits,
        f"| {row['name']} | {row['setting'].replace(':', ' ')} | {bits:.2f} | {row['perplexity']:.3f} | {row['kl']:.4f} | {100 * row['top1']:.1f} % | {needle} |",
    )


HEAD = [
    "| method | setting | bits a value | perplexity | KL | top-1 | needle |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]


def section(out, kv, name, model, text, dim, context, decode):
    dense = run(kv, model, text, context, decode, ["dense"])[0]
    out += [
        f"## {name}",
        "",
        f"{context} tokens of prompt, {decode} decoded; dense perplexity {dense['perplexity']:.3f}.",
        "",
    ]
    for window in (64, 0):
        specs = [f"{spec}:window={window}:batch=64" for spec in methods(dim)]
        rows = sorted(line(row, dim, context) for row in run(kv, model, text, context, decode, specs))
        out += (
            [f"### {'Last 64 to 127 tokens exact' if window else 'No window: last 0 to 63 tokens exact'}", ""]
            + HEAD
            + [text for _, text in rows]
            + [""]
        )
    rows, sweep, steps = pqcache()
    rows = [row.format(recent=context // 10) for row in rows]
    for title, specs in (
        ("PQCache: attended tokens, 1/5 and 1/10", rows),
        ("PQCache: subspaces x bits at 1/10 (its fig. 9c)", sweep),
        ("PQCache: iterations at 1/10 (its fig. 10c)", steps),
    ):
        out += (
            [f"### {title}", ""]
            + HEAD
            + [line(row, dim, context)[1] for row in run(kv, model, text, context, decode, specs)]
            + [""]
        )


def retrieval(out, kv, model, text, dim, lengths):
    """Pass keys and lines to be recalled, as `kv eval` prints them."""
    pq = codes(dim)
    specs = [
        "dense",
        "int4",
        "int4:k=3:v=3",
        "pqcache:ratio=0.2",
        "pqcache:ratio=0.1:code=2x6",
        f"million:k={dim // 2}x8:v={dim // 2}x8",
    ]
    specs += [f"{name}:k={pq[b][0]}:v={pq[b][1]}" for b in ("3", "2") for name in ("million", "pqklt")]
    out += programs.retrieval(kv, specs, lengths, *(["--model", model, "--text", text] if model else []))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("out")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    args = parser.parse_args()
    commit = tables.commit()
    doc = __doc__.strip().splitlines()
    out = (
        ["# Quality per byte", "", f"{tables.today()}, commit {commit}. Made by", ""]
        + doc[2:5]
        + [""]
        + doc[5:]
        + [""]
    )
    section(out, args.kv, "tiny-llama-12m, State of the Union addresses", None, None, 128, 2048, 192)
    retrieval(out, args.kv, None, None, 128, [512, 2048])
    tables.write_printed(args.out, out)
    if args.smollm2:
        section(out, args.kv, "SmolLM2-135M-Instruct, WikiText-2", args.smollm2, args.text, 64, 1900, 128)
        retrieval(out, args.kv, args.smollm2, args.text, 64, [1024])
        tables.write_printed(args.out, out)


main()
