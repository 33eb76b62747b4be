#!/usr/bin/env python3
"""codec-core against other coders and formats, on synthetic symbols and on two models' keys and values; writes a Markdown table.

    cargo build --release
    python benches/peers/codec.py target/release benches/results/codec.md [--smollm2 MODEL.gguf --text WIKITEXT] [--only SECTIONS]

Speeds are medians of wall time on one thread unless stated otherwise. "Through the codec" runs the model over windows of the text with all
keys and values but those of the first 4 tokens replaced by the decoded ones, those of the current token included; positions from 256 on are
scored against the plain model. Bits are the size of frames, with index, checksums and headers, per coded element; profiles, which belong to
the model, are not counted. Profiles are made from the first 4,096 tokens of the text, which are not scored. LMCache's bins are those of most
layers; the keys of the first ten layers and the values of two layers have twice as many. The size of its own format is computed: the entropy
of each channel of 256 tokens, plus tables, lengths and scales.
"""

import argparse, json, math, os

import pages, tables
from programs import compared, run

LEVELS = [1, 1.3, 1.6, 2, 2.6, 3.1, 4.1, 5.1, 6.1, 7.6]


def speeds(out, folder):
    rows = [json.loads(line) for line in run([f"{folder}/codec_speed", "9"]).splitlines()]
    entropy = rows[0]["bits"]
    ours = [r for r in rows[1:] if r["coder"].startswith("codec-core") and "Scalar" not in r["coder"]]
    peers = [r for r in rows[1:] if r["coder"].startswith("constriction")]
    best = {what: max(r[what] for r in peers) for what in ("encode", "decode")}
    out += [
        f"11.06 M symbols; each channel's own entropy is {entropy:.4f} bits. Rates in million symbols per second.",
        "",
        "| coder | bits | over the entropy | encode | decode | decode, 2 threads |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows[1:]:
        out.append(
            f"| {r['coder']} | {r['bits']:.4f} | {100 * (r['bits'] / entropy - 1):+.2f} % | {r['encode']:.0f} | {r['decode']:.0f} | {r['decode2']:.0f} |"
        )
    out += [
        "",
        "Against the fastest coder of constriction, with the same models:\n"
        + "; ".join(
            f"{r['coder'].split(', ')[1]} encodes {r['encode'] / best['encode']:.1f}x, decodes {r['decode'] / best['decode']:.1f}x, two threads {r['decode2'] / r['decode']:.2f}x one"
            for r in ours
        )
        + ".",
        "",
    ]


def quality(folder, model, text, windows, length, methods):
    return json.loads(
        run([f"{folder}/codec_quality", model, text, "4096", str(windows), str(length), ",".join(methods)])
    )


def short(spec):
    return spec.removeprefix("cachegen:").replace("mode=", "").replace(":", " ")


def at(points, x, log=True):
    """Linear between the two nearest of (x, y) points, in the logarithm of y; beyond the ends, the end's slope."""
    points = sorted(points)
    i = next((i for i, p in enumerate(points) if p[0] >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(i - 1, 0)], points[max(i, 1)]
    f = math.log if log else (lambda y: y)
    y = f(y0) + (f(y1) - f(y0)) * (x - x0) / (x1 - x0)
    return math.exp(y) if log else y


HEAD = [
    "| setting | bits, blocks of 256 | of 1,024 | perplexity | KL | top-1 |",
    "| --- | --- | --- | --- | --- | --- |",
]


def line(r):
    return f"| {short(r['method'])} | {r['bits256']:.3f} | {r['bits1024']:.3f} | {r['perplexity']:.3f} | {r['kl']:.5f} | {100 * r['top1']:.1f} % |"


def sizes(out, folder, model, text, windows, length):
    default = [f"cachegen:bits={b}" for b in LEVELS]
    ablation = [
        f"cachegen:mode=common:k=0.7:v=0.7:predictor={p}:models=tables"
        for p in ("none", "mean", "previous", "anchor")
    ]
    ablation += [
        f"cachegen:mode=common:k=0.7:v=0.7:predictor=mean:models={m}" for m in ("families", "context")
    ]
    ablation += ["cachegen:mode=common:k=0.7:v=0.7:predictor=mean:models=tables:coder=range"]
    ablation += [
        f"cachegen:bits=2:predictor={p}:models={m}"
        for p in ("mean", "previous")
        for m in ("families", "tables", "context")
    ]
    ablation += ["cachegen:bits=2:predictor=anchor", "cachegen:bits=2:coder=range"]
    channels = [f"cachegen:mode=channels:k={s}:v={s}" for s in (0.125, 0.25, 0.5, 0.7, 1.4, 2)]
    common = [f"cachegen:mode=common:k={s}:v={s}" for s in (0.1, 0.2, 0.4, 0.7, 1, 1.4)]
    paper = [f"cachegen:mode=paper:k={s}:v={s}" for s in (0.05, 0.12, 0.25, 0.5)]
    lmcache = [f"cachegen:mode=lmcache:bins={b}" for b in (16, 32, 64)]
    result = quality(
        folder, model, text, windows, length, default + ablation + channels + common + paper + lmcache
    )
    rows = {r["method"]: r for r in result["rows"]}
    pick = lambda specs: [rows[spec] for spec in specs if spec in rows]
    by_prefix = lambda prefix: [r for r in result["rows"] if r["method"].startswith(prefix)]
    levels = by_prefix("cachegen:mode=transform:bits=")[: len(LEVELS)]
    out += (
        [f"### Through the codec: {windows} windows of {length} tokens", ""]
        + HEAD
        + [line(r) for r in levels]
    )
    rest = (
        by_prefix("cachegen:mode=channels:k=")
        + by_prefix("cachegen:mode=common")
        + by_prefix("cachegen:mode=paper")
    )
    rest = [r for r in rest if "predictor" not in r["method"]]
    out += (
        [line(r) for r in rest]
        + [
            line(r) + f" LMCache's own format: {r['lmcache']:.2f} bits |"
            for r in by_prefix("cachegen:mode=lmcache")
        ]
        + [""]
    )
    # Sizes against entropies: order 0, of the bins without prediction, in each window itself.
    out += [
        "### Sizes against the entropy of each channel's bins, counted in the window itself",
        "",
        "Order-0 entropy of the bins less their mean, at the same steps; the gain of prediction is ours.",
        "",
        "| bits | entropy | blocks of 256 | of 1,024 |",
        "| --- | --- | --- | --- |",
    ]
    means = quality(
        folder, model, text, windows, length, [f"cachegen:bits={b}:predictor=mean" for b in (2, 3.1, 4.1)]
    )["rows"]
    for b, mean in zip((2, 3.1, 4.1), means):
        r = levels[LEVELS.index(b)]
        out.append(
            f"| {b} | {mean['entropy']:.3f} | {r['bits256']:.3f} ({100 * (r['bits256'] / mean['entropy'] - 1):+.1f} %) | {r['bits1024']:.3f} ({100 * (r['bits1024'] / mean['entropy'] - 1):+.1f} %) |"
        )
    # Equal error.
    curve = [
        (math.log(r["nmse"]), r["bits1024"])
        for r in by_prefix("cachegen:mode=common")
        if "predictor" not in r["method"]
    ]
    out += [
        "",
        "### At equal squared error (one step for all channels of a layer)",
        "",
        "| format | its bits | error / variance | ours | times smaller |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, bits, nmse in [
        (
            f"LMCache, {r['method'].split('=')[-1]} bins"
            + (" (as released)" if r["method"].endswith("=16") else ""),
            r["lmcache"],
            r["nmse"],
        )
        for r in by_prefix("cachegen:mode=lmcache")
    ] + [(f"plain {p['bits'] - 0.5:.0f} bits, groups of 64", p["bits"], p["nmse"]) for p in result["plain"]]:
        ours = at(curve, math.log(nmse), log=False)
        out.append(f"| {name} | {bits:.2f} | {nmse:.4f} | {ours:.2f} | {bits / ours:.2f} |")
    out += [
        "",
        "### What each idea is worth",
        "",
        "Steps are equal within each half of the table. Error / variance is of squared errors.",
        "",
        "| setting | bits, blocks of 256 | of 1,024 | error / variance | KL |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in (
        [r for r in by_prefix("cachegen:mode=common:k=0.7") if "predictor" in r["method"]]
        + by_prefix("cachegen:mode=transform:bits=2:")
        + pick(["cachegen:mode=transform:bits=2"])
    ):
        out.append(
            f"| {short(r['method'])} | {r['bits256']:.3f} | {r['bits1024']:.3f} | {r['nmse']:.4f} | {r['kl']:.5f} |"
        )
    out.append("")


def budgets(out, folder, model, text, context, decode):
    default = [f"cachegen:bits={b}" for b in LEVELS]
    rivals = [f"{n}:k={b}:v={b}" for n in ("int4", "rotated") for b in (2, 3, 4, 6, 8)]
    rivals += [f"cachegen:mode=channels:k={s}:v={s}" for s in (0.12, 0.25, 0.5, 1, 1.5)]
    rivals += [f"cachegen:mode=paper:k={s}:v={s}" for s in (0.05, 0.12, 0.25, 0.5)]
    rivals += [f"cachegen:mode=lmcache:bins={b}" for b in (16, 32, 64)]
    methods = [f"{spec}:window=0:batch=64" for spec in default + rivals]
    options = ["--model", model, "--text", text] if model else []
    rows = compared(f"{folder}/kv", methods, context, decode, *options)["methods"]
    points = [(r["bits_per_value"], max(r["kl"], 1e-9)) for r in rows[: len(default)]]
    out += [
        f"### Prompt of {context} tokens through the codec, {decode} decoded (`kv compare`)",
        "",
        "Bits count all that is kept, including the first 4 and last 0 to 63 tokens in 16 bits; LMCache's rows use our models instead of its tables.",
        "The last column is the default's KL at the same bits, interpolated between its levels.",
        "",
        "| method | setting | bits | perplexity | KL | top-1 | needle | default |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    worse = []
    for i, r in enumerate(rows):
        needle = f"{round(r['needle'] * r['needle_trials'])}/{r['needle_trials']}"
        setting = short(r["setting"]).replace(" window=0 batch=64", "")
        own = i < len(default)
        here = "" if own else f"{at(points, r['bits_per_value']):.5f}"
        if not own and at(points, r["bits_per_value"]) >= r["kl"]:
            worse.append(f"{r['name']} {setting}")
        out.append(
            f"| {r['name']} | {setting} | {r['bits_per_value']:.2f} | {r['perplexity']:.3f} | {r['kl']:.5f} | {100 * r['top1']:.1f} % | {needle} | {here} |"
        )
    out += [
        "",
        (
            "The default has the lower KL at every row's bits."
            if not worse
            else "Rows with a lower KL than the default at their bits: " + "; ".join(worse) + "."
        ),
        "",
    ]


# The parts of CacheGen's codec, after its figure 15: the name, the setting of `published`, and which of its rates counts.
STEPS = [
    ("vector-wise quantization, fixed width", "delta=none:bins=uniform", "fixed"),
    ("+ arithmetic coding, one distribution for all", "delta=none:bins=uniform", "global"),
    ("+ a distribution per layer, keys and values apart", "delta=none:bins=uniform", "layer"),
    ("+ a distribution per channel and layer", "delta=none:bins=uniform", "channel"),
    ("+ differences to anchors", "bins=uniform", "channel"),
    ("+ bins by layer third: **CacheGen as published**", "", "channel"),
    ("published, one distribution for all", "", "global"),
    ("published, a distribution per layer", "", "layer"),
    ("published, anchors as raw bytes", "", "raw_anchors"),
    ("published, no differences", "delta=none", "channel"),
    ("published, differences to the channel's mean", "delta=mean", "channel"),
    ("published, keys before RoPE", "keys=plain", "channel"),
]
FINENESS = [4, 8, 16, 32, 64, 127]
TARGETS = [0.002, 0.01, 0.05]


def published(out, folder, model, text, windows, length):
    spec = lambda n, setting: f"published:levels={n}" + (":" + setting if setting else "")
    settings = sorted({setting for _, setting, _ in STEPS})
    specs = [spec(n, setting) for setting in settings for n in FINENESS]
    specs += [f"cachegen:bits={b}" for b in LEVELS[2:8]]
    result = quality(folder, model, text, windows, length, specs)
    rows = {r["method"]: r for r in result["rows"]}
    ours = [r for r in result["rows"] if r["method"].startswith("cachegen:mode=transform")]
    out += [
        f"{windows} windows of {length} tokens, scored as above; tables are counted on {4096 // length} other windows of {length} tokens. The lossless perplexity",
        f"is {result['dense']:.3f}. Rates are sizes of range-coded streams that decode, with every row's scale (16 bits). `levels` are bins on each side",
        "of zero in the first third of the layers; the paper gives its bin widths, .5, 1 and 1.5, without a unit, so the whole curve is run.",
        "",
        "| levels | fixed width | one distribution | per layer | **per channel** | anchors raw | error / variance | perplexity | KL | top-1 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for n in FINENESS:
        r = rows[spec(n, "")]
        bits = " | ".join(
            f"{r['bits'][m]:.3f}" for m in ("fixed", "global", "layer", "channel", "raw_anchors")
        )
        out.append(
            f"| {n} | {bits} | {r['bits']['nmse']:.4f} | {r['perplexity']:.3f} | {r['kl']:.5f} | {100 * r['top1']:.1f} % |"
        )
    eight = rows[spec(127, "delta=none:bins=uniform")]
    bits8 = eight["bits"]["fixed"]
    out += [
        "",
        f"Plain vector-wise 8-bit codes: {bits8:.2f} bits, perplexity {eight['perplexity']:.3f}, KL {eight['kl']:.5f}.",
        "",
        "#### Its ideas one by one (figure 15), at equal KL",
        "",
        f"Bits are interpolated linearly in the logarithm of KL; in brackets, {bits8:.2f} bits over them.",
        "",
        "| codec | " + " | ".join(f"KL {t}" for t in TARGETS) + " |",
        "| --- |" + " --- |" * len(TARGETS),
    ]
    curves = [
        (
            name,
            [
                (math.log(rows[spec(n, setting)]["kl"]), rows[spec(n, setting)]["bits"][rate])
                for n in FINENESS
            ],
        )
        for name, setting, rate in STEPS
    ]
    curves += [("**ours** (transform)", [(math.log(r["kl"]), r["bits1024"]) for r in ours if r["kl"] > 1e-6])]
    for name, curve in curves:
        inside = lambda t: min(x for x, _ in curve) <= math.log(t) <= max(x for x, _ in curve)
        cells = [
            f"{(b := at(curve, math.log(t), log=False)):.2f} ({bits8 / b:.2f}x)" if inside(t) else "-"
            for t in TARGETS
        ]
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    # The claim of 3.5 to 4.3 times: the smallest setting whose loss, and that of all finer ones, stays below the limit.
    within = lambda rows, limit: [
        r for i, r in enumerate(rows) if all(x["perplexity"] <= limit for x in rows[: i + 1])
    ][-1]
    theirs = [rows[spec(n, "")] for n in reversed(FINENESS)]
    mine = sorted(ours, key=lambda r: -r["bits1024"])
    out += [
        "",
        '#### The claim "3.5 to 4.3 times smaller than quantization"',
        "",
        "The smallest setting whose perplexity, and that of every finer one, stays within the paper's limits.",
        "",
        "| loss of perplexity | codec | bits | smaller than 8 bits | smaller than fp16 | perplexity | KL |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for what, limit in (("at most .1", result["dense"] + 0.1), ("at most 2 %", 1.02 * result["dense"])):
        for name, r, bits in (
            ("published", within(theirs, limit), lambda r: r["bits"]["channel"]),
            ("ours", within(mine, limit), lambda r: r["bits1024"]),
        ):
            out.append(
                f"| {what} | {name} | {bits(r):.2f} | {bits8 / bits(r):.2f}x | {16 / bits(r):.2f}x | {r['perplexity']:.3f} | {r['kl']:.5f} |"
            )
    # The same in words, at the middle target.
    target = TARGETS[1]
    bits = {name: at(curve, math.log(target), log=False) for name, curve in curves}
    names = [name for name, _, _ in STEPS]
    change = lambda a, b: f"{100 * (bits[b] / bits[a] - 1):+.0f} %"
    out += [
        "",
        f"At a KL of {target} CacheGen as published is {bits8 / bits[names[5]]:.1f} times smaller than 8-bit codes on this model, and ours {bits8 / bits['**ours** (transform)']:.1f} times.",
        f"The arithmetic coder with one distribution changes the bits of plain quantization by {change(names[0], names[1])}, distributions per channel and layer by",
        f"{change(names[1], names[3])} more; anchors by {change(names[3], names[4])} and bins by layer third by {change(names[4], names[5])}. In the published codec one distribution for all",
        f"costs {change(names[5], names[6])} (the paper: up to 53 % saved), raw anchors {change(names[5], names[8])}; without differences it would change by {change(names[5], names[9])}, with differences to",
        f"the channel's mean, which needs no anchor, {change(names[5], names[10])}.",
    ]
    out.append("")


FAR = [8, 12, 16, 20]
# Tokens decoded after the prompt: half a batch of 64 tokens is left over, the average.
FAR_DECODED = 228
FAR_EXACT = 4 + 32


def far_end(out, folder, contexts, *options):
    """Settings of the default that make a prompt 8 to 20 times smaller than fp16, KVTC's range."""

    def compare(context, methods):
        methods = [f"{m}:window=0:batch=64" if m != "dense:dtype=f16" else m for m in methods]
        return compared(f"{folder}/kv", methods, context, FAR_DECODED, *options)["methods"]

    out += [
        f"Sizes count all that a sequence keeps: the first 4 tokens and the last, incomplete batch (32 of 64, the average) are in 16 bits. {FAR_DECODED} tokens",
        "are decoded after the prompt. `setting` is the one that gives the size, found by interpolation; `coded` is the rate of the coded tokens alone.",
        "",
        "| prompt | smaller than fp16 | setting | bits | coded | bytes per token | perplexity | KL | top-1 | needle |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    coded = lambda bits, tokens: (bits * tokens - 16 * FAR_EXACT) / (tokens - FAR_EXACT)
    grid = [0.2, 0.5, 1, 2]
    measured = compare(contexts[0], [f"cachegen:bits={b}" for b in grid])
    curve = [(coded(r["bits_per_value"], contexts[0] + FAR_DECODED), b) for r, b in zip(measured, grid)]
    for context in contexts:
        tokens = context + FAR_DECODED
        settings = [round(max(at(curve, coded(16 / target, tokens), log=False), 0.05), 3) for target in FAR]
        for r in compare(context, ["dense:dtype=f16"] + [f"cachegen:bits={b}" for b in settings]):
            bits = r["bits_per_value"]
            setting = short(r["setting"]).replace(" window=0 batch=64", "")
            rest = f"{coded(bits, tokens):.2f}" if r["name"] == "cachegen" else ""
            out.append(
                f"| {context} | {16 / bits:.1f}x | {setting} | {bits:.2f} | {rest} | {r['kv_bytes_per_token']:.0f} | {r['perplexity']:.3f} | {r['kl']:.5f} | {100 * r['top1']:.1f} % | {round(r['needle'] * r['needle_trials'])}/{r['needle_trials']} |"
            )
    out.append("")


def pq_codes(out, folder, model, text):
    """The entropy of `pqklt`'s codes."""
    shapes = ["64x6", "32x6"]
    rows = json.loads(run([f"{folder}/pq_entropy", model, text, "4096", "4096", ",".join(shapes)]))["rows"]
    columns = [
        ("static", "table per subspace"),
        ("adaptive", "adaptive"),
        ("class", "given previous token's class"),
        ("previous", "given previous token's code"),
        ("neighbour", "given previous subspace's code"),
        ("window", "own entropy"),
    ]
    out += [
        "Bits per code and the savings, on 4,096 tokens with tables counted on 4,096 others, per layer, head and subspace; a class is one of four.",
        "The last column is the entropy of the test text's own counts, a lower bound for coders without context.",
        "",
        "| codes | | " + " | ".join(name for _, name in columns) + " |",
        "| --- | --- |" + " --- |" * len(columns),
    ]
    for r in rows:
        nbits = int(r["code"].split("x")[1])
        for group in r["groups"]:
            cells = [f"{group[key]:.3f} ({100 * (1 - group[key] / nbits):+.1f} %)" for key, _ in columns]
            out.append(f"| {r['code']} | {group['name']} | " + " | ".join(cells) + " |")
    saved = lambda r, key: 100 * (1 - r["groups"][0][key] / int(r["code"].split("x")[1]))
    best = {
        key: max((saved(r, key), r["code"]) for r in rows)
        for key in ("adaptive", "class", "previous", "neighbour")
    }
    out += [
        "",
        "Largest savings over all codes of a shape:\n"
        + "; ".join(f"{dict(columns)[key]}, {gain:.1f} % ({code})" for key, (gain, code) in best.items())
        + ".",
        "The values of the first layer depend only on the token, so their subspaces predict one another.",
    ]
    if max(gain for gain, _ in best.values()) < 5:
        out += [
            "Less than 5 % over all codes: an entropy coder for these codes does not pay, and there is none."
        ]
    out.append("")


def replaced(path, section):
    """The lines of a page with a section in place of the one with the same heading, or appended."""
    with open(os.path.splitext(path)[0] + ".json") as file:
        parts = "\n".join(pages.printed(json.load(file))).split("\n## ")
    text = "\n".join(section).removeprefix("## ")
    same = [i for i, part in enumerate(parts) if i > 0 and part.split("\n")[0] == text.split("\n")[0]]
    if same:
        parts[same[0]] = text
    else:
        parts.append(text)
    return "\n## ".join(part.rstrip() + "\n" for part in parts).splitlines()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument(
        "--only",
        help="sections to replace in the file that is there: coders, tiny, published, far, far-text, far-smollm2, pq, smollm2",
    )
    args = parser.parse_args()
    commit = tables.commit()
    made = f"{tables.today()}, commit {commit}, {tables.cpu()}."
    assets = os.path.join(os.path.dirname(__file__), "..", "..", "reference", "assets")
    tiny = (os.path.join(assets, "tiny-llama-12m"), os.path.join(assets, "sotu-heldout.txt"))

    def both(out, model, text, windows, context, decode):
        sizes(out, args.folder, model, text, windows, 1024)
        budgets(out, args.folder, *((None, None) if model == tiny[0] else (model, text)), context, decode)

    makers = {
        "coders": ("Entropy coders", lambda out: speeds(out, args.folder)),
        "tiny": ("tiny-llama-12m, State of the Union addresses", lambda out: both(out, *tiny, 4, 2048, 192)),
        "published": (
            "CacheGen as published, tiny-llama-12m",
            lambda out: published(out, args.folder, *tiny, 2, 1024),
        ),
        "far": (
            "8 to 20 times smaller, tiny-llama-12m",
            lambda out: far_end(out, args.folder, [2048, 4096, 8192]),
        ),
        "pq": ("Entropy of PQ codes, tiny-llama-12m", lambda out: pq_codes(out, args.folder, *tiny)),
    }
    if args.text:
        makers["far-text"] = (
            "8 to 20 times smaller, tiny-llama-12m, WikiText-2",
            lambda out: far_end(out, args.folder, [4096, 16_000], "--text", args.text),
        )
    if args.smollm2:
        makers["far-smollm2"] = (
            "8 to 20 times smaller, SmolLM2-135M-Instruct, WikiText-2",
            lambda out: far_end(
                out, args.folder, [2048, 4096, 7900], "--model", args.smollm2, "--text", args.text
            ),
        )
        makers["smollm2"] = (
            "SmolLM2-135M-Instruct, WikiText-2",
            lambda out: both(out, args.smollm2, args.text, 2, 1900, 128),
        )
    doc = __doc__.strip().splitlines()
    lines = ["# codec-core against its peers", "", made + " Made by", ""] + doc[2:4] + [""] + doc[5:] + [""]
    for name in args.only.split(",") if args.only else makers:
        title, make = makers[name]
        out = [f"## {title}", ""] + ([made, ""] if args.only else [])
        make(out)
        lines = replaced(args.out, out) if args.only else lines + out
        tables.write_printed(args.out, lines)


main()
