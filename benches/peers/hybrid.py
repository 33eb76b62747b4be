#!/usr/bin/env python3
"""Exact rows over coarse codes: hybrid attention against top-k methods at the same rows, and codes alone, by `kv compare`.

    cargo build --release
    python benches/peers/hybrid.py target/release/kv benches/results/hybrid.md --picture pq-core/hybrid.svg \\
        [--smollm2 MODEL.gguf --text WIKITEXT]

`rows` is the share of the tokens between sinks and window whose exact keys and values a step reads; methods that count sinks and
window towards their share get as many rows. Bits are those that a sequence keeps on the device (codes, norms, exact sinks and
window); top-k methods, retroinfer and hybrid hold all exact rows elsewhere, except oracle and sparq, which score by them. retroinfer
reads whole clusters, so some rows more than its share; `estimate=1` estimates every cluster that it does not read. KiB are of those
rows: what a method reads to choose them (codes; of sparq r components of every key) is not counted. KL is to the dense cache,
teacher-forced.
"""

import argparse, math

import tables
from programs import compared, given

SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
EXACT = 68  # sinks and window


def codes(dim, keys, values):
    """Codes by components a subspace, or (bits, components)."""
    spec = lambda code: (8, code) if isinstance(code, int) else code
    (kb, kd), (vb, vd) = spec(keys), spec(values)
    return f"k={dim // kd}x{kb}:v={dim // vd}x{vb}"


PLAIN = ":norms=off:mean-error=off"  # codes alone
# (keys, values, further settings), from coarse to fine; all shares, or two of them.
GRID = [
    (8, 8, PLAIN),
    (8, 16, PLAIN),
]
VARIANTS = [
    (4, 4, PLAIN),
    (4, 8, PLAIN),
    (16, 16, PLAIN),
    (8, 32, PLAIN),
    ((4, 4), (4, 4), PLAIN),
    ((4, 4), (4, 8), PLAIN),
    (8, 8, ":mean-error=off"),
    (8, 8, f"{PLAIN}:keys=rope"),
    (8, 8, ":mean-error=off:keys=rope"),
    (8, 8, f"{PLAIN}:offloaded=int8"),
    (8, 8, f"{PLAIN}:refine=4"),
    ((6, 4), 16, ""),  # the default at 128 components
]
FEW = (0, 0.005, 0.02)
BOUNDS = (0.125, 0.05, 0.025)


def specs(dim, context):
    """Every method of one section; the order is that of the table."""
    hybrid = [
        f"hybrid:{codes(dim, k, v)}{more}:rows={share}" for k, v, more in GRID for share in (0,) + SHARES
    ]
    hybrid += [f"hybrid:{codes(dim, k, v)}{more}:rows={share}" for k, v, more in VARIANTS for share in FEW]
    auto = [f"hybrid:{codes(dim, 8, 16)}{PLAIN}:rows=auto:bound={bound}" for bound in BOUNDS]
    ratios = [(share * (context - EXACT) + EXACT) / context for share in SHARES]
    topk = [
        f"{name}:ratio={ratio:.5f}"
        for name in ("oracle", f"pqcache:code={dim // 8}x8", "sparq")
        for ratio in ratios
    ]
    topk += [f"retroinfer:rows={share}{more}" for more in ("", ":estimate=1") for share in SHARES]
    alone = [f"pqklt:{codes(dim, c, c)}" for c in (8, 4, (6, 4))] + ["int4:k=2:v=2", "int4:k=4:v=4"]
    return hybrid + auto + topk + alone


def run(kv, model, text, context, decode, methods):
    return compared(kv, methods, context, decode, *given(model=model, text=text))["methods"]


def line(row):
    needle = (
        ""
        if row["needle"] is None
        else f"{round(row['needle'] * row['needle_trials'])}/{row['needle_trials']}"
    )
    cells = [
        row["name"],
        row["setting"].replace(":", " "),
        f"{row['bits_per_value']:.2f}",
        f"{row['fetched_rows_per_step']:.1f}",
        f"{row['fetched_bytes_per_step'] / 1024:.0f}",
        f"{row['perplexity']:.3f}",
        f"{row['kl']:.5f}",
        f"{100 * row['top1']:.1f} %",
        needle,
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = [
    "| method | setting | bits a value | rows a step and head | KiB of rows a step | perplexity | KL | top-1 | needle |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def section(out, kv, name, model, text, dim, context, decode):
    rows = run(kv, model, text, context, decode, specs(dim, context))
    out += (
        [f"## {name}, {context} tokens", "", f"{decode} decoded.", ""]
        + HEAD
        + [line(row) for row in rows]
        + [""]
    )
    return rows


WIDTH, HEIGHT, LEFT, BOTTOM = 760, 430, 70, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#7f7f7f", "#9467bd", "#8c564b")


def picture(path, title, rows, dim):
    """KL against fetched rows, both logarithmic, as SVG."""
    series = {
        f"hybrid, {codes(dim, k, v).replace(':', ' ')}": [
            row
            for row in rows
            if row["name"] == "hybrid"
            and row["setting"].startswith(codes(dim, k, v) + ":rows=0")
            and "keys=mean" in row["setting"]
            and "norms=off" in row["setting"]
            and not any(word in row["setting"] for word in ("offloaded", "refine"))
        ]
        for k, v, _ in GRID
    }
    series |= {
        label: [row for row in rows if row["name"] == name]
        for name, label in (("oracle", "exact top-k, no others"), ("pqcache", "PQCache"), ("sparq", "SparQ"))
    }
    series["RetroInfer"] = [
        row for row in rows if row["name"] == "retroinfer" and "estimate=1:" not in row["setting"]
    ]
    points = {
        label: sorted((r["fetched_rows_per_step"], r["kl"]) for r in found if r["fetched_rows_per_step"] > 0)
        for label, found in series.items()
    }
    everything = [point for found in points.values() for point in found]
    xs, ys = [[math.log10(point[i]) for point in everything] for i in (0, 1)]
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (math.floor(min(ys)), math.ceil(max(ys)))
    place = lambda x, y: (
        LEFT + (math.log10(x) - x0) / (x1 - x0) * (WIDTH - LEFT - 200),
        20 + (y1 - math.log10(y)) / (y1 - y0) * (HEIGHT - BOTTOM - 40),
    )
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{LEFT}" y="14">{title}</text>',
    ]
    for exponent in range(y0, y1 + 1):
        _, y = place(10**x0, 10.0**exponent)
        svg.append(
            f'<path d="M{LEFT} {y:.0f}H{WIDTH - 190}" stroke="#ddd"/><text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">1e{exponent}</text>'
        )
    for share in SHARES:
        found = [point for label, found in points.items() if label.startswith("hybrid") for point in found]
        at = sorted({point[0] for point in found})[SHARES.index(share)]
        x, y = place(at, 10.0**y0)
        svg.append(
            f'<path d="M{x:.0f} 20V{y:.0f}" stroke="#eee"/><text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{at:.0f}</text>'
        )
    svg.append(
        f'<text x="{(LEFT + WIDTH - 190) // 2}" y="{HEIGHT - 8}" text-anchor="middle">exact rows read a step and head</text>'
    )
    svg.append(
        f'<text x="14" y="{HEIGHT // 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT // 2})">KL to dense, nats</text>'
    )
    for (label, found), colour in zip(points.items(), COLOURS):
        spots = [place(*point) for point in found]
        svg.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        svg += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        svg.append(
            f'<text x="{spots[-1][0] + 8:.1f}" y="{spots[-1][1] + 4:.1f}" fill="{colour}">{label}</text>'
        )
    with open(path, "w") as file:
        file.write("\n".join(svg + ["</svg>", ""]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("out")
    parser.add_argument("--picture")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument("--lengths", default="2048,4096,8192", help="of the shipped model's prompts")
    args = parser.parse_args()
    commit = tables.commit()
    doc = __doc__.strip().splitlines()
    out = (
        ["# Exact rows over coarse codes", "", f"{tables.today()}, commit {commit}. Made by", ""]
        + doc[2:6]
        + doc[6:]
        + [""]
    )
    for length in map(int, args.lengths.split(",")):
        rows = section(
            out, args.kv, "tiny-llama-12m, State of the Union addresses", None, None, 128, length, 192
        )
        tables.write_printed(args.out, out)
        if args.picture and length == 4096:
            picture(args.picture, f"tiny-llama-12m, {length} tokens", rows, 128)
    if args.smollm2:
        section(out, args.kv, "SmolLM2-135M-Instruct, WikiText-2", args.smollm2, args.text, 64, 3072, 128)
        tables.write_printed(args.out, out)


if __name__ == "__main__":
    main()
