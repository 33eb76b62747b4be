#!/usr/bin/env python3
"""codec-core against other coders and formats, on synthetic symbols and on two models' keys and values; writes a Markdown table.

    cargo build --release
    python benches/peers/codec.py target/release benches/results/codec.md [--smollm2 MODEL.gguf --text WIKITEXT]

Speeds are medians of wall time on one thread, unless said. "Through the codec" runs the model over windows of the text with all
keys and values but the first 4 tokens' replaced by the decoded ones, those of the current token included; positions from 256 on are
scored against the plain model. Bits are bytes of frames, with index, checksums and headers, over the numbers coded; profiles, which
belong to the model, are not counted. Profiles are made from the first 4,096 tokens of the text, which are not scored. LMCache's
bins are those of most layers, the first ten layers' keys and two layers' values have twice as many; what its own format takes is
computed: the entropy of each channel of 256 tokens, with their tables, lengths and scales.
"""
import argparse, datetime, json, math, os, platform, subprocess, tempfile

import record

LEVELS = [1, 1.3, 1.6, 2, 2.6, 3.1, 4.1, 5.1, 6.1, 7.6]


def run(command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def speeds(out, folder):
    rows = [json.loads(line) for line in run([f"{folder}/codec_speed", "9"]).splitlines()]
    entropy = rows[0]["bits"]
    ours = [r for r in rows[1:] if r["coder"].startswith("codec-core") and "Scalar" not in r["coder"]]
    peers = [r for r in rows[1:] if r["coder"].startswith("constriction")]
    best = {what: max(r[what] for r in peers) for what in ("encode", "decode")}
    out += ["## Entropy coders", "", f"11.06 M symbols; each channel's own entropy is {entropy:.4f} bits. Million symbols a second.", "",
            "| coder | bits | over the entropy | encode | decode | decode, 2 threads |", "| --- | --- | --- | --- | --- | --- |"]
    for r in rows[1:]:
        out.append(f"| {r['coder']} | {r['bits']:.4f} | {100 * (r['bits'] / entropy - 1):+.2f} % | {r['encode']:.0f} | {r['decode']:.0f} | {r['decode2']:.0f} |")
    out += ["", "Beside the fastest of constriction, which takes the same models: " + "; ".join(
        f"{r['coder'].split(', ')[1]} encodes {r['encode'] / best['encode']:.1f}x, decodes {r['decode'] / best['decode']:.1f}x, two threads {r['decode2'] / r['decode']:.2f}x one" for r in ours) + ".", ""]


def quality(folder, model, text, windows, length, methods):
    return json.loads(run([f"{folder}/codec_quality", model, text, "4096", str(windows), str(length), ",".join(methods)]))


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


HEAD = ["| setting | bits, blocks of 256 | of 1,024 | perplexity | KL | top-1 |", "| --- | --- | --- | --- | --- | --- |"]


def line(r):
    return f"| {short(r['method'])} | {r['bits256']:.3f} | {r['bits1024']:.3f} | {r['perplexity']:.3f} | {r['kl']:.5f} | {100 * r['top1']:.1f} % |"


def sizes(out, folder, model, text, windows, length):
    default = [f"cachegen:bits={b}" for b in LEVELS]
    ablation = [f"cachegen:mode=channels:k=1:v=1:predictor={p}:models={m}" for p in ("none", "mean", "previous", "anchor") for m in ("tables",)]
    ablation += [f"cachegen:mode=channels:k=1:v=1:predictor=mean:models={m}" for m in ("families", "context")]
    ablation += ["cachegen:mode=channels:k=1:v=1:predictor=mean:models=tables:coder=range"]
    ablation += [f"cachegen:bits=2:predictor={p}:models={m}" for p in ("mean", "previous") for m in ("families", "tables", "context")]
    ablation += ["cachegen:bits=2:predictor=anchor", "cachegen:bits=2:coder=range"]
    channels = [f"cachegen:mode=channels:k={s}:v={s}" for s in (0.125, 0.25, 0.5, 0.7, 1.4, 2)]
    common = [f"cachegen:mode=common:k={s}:v={s}" for s in (0.1, 0.2, 0.4, 0.7, 1, 1.4)]
    paper = [f"cachegen:mode=paper:k={s}:v={s}" for s in (0.05, 0.12, 0.25, 0.5)]
    lmcache = [f"cachegen:mode=lmcache:bins={b}" for b in (16, 32, 64)]
    result = quality(folder, model, text, windows, length, default + ablation + channels + common + paper + lmcache)
    rows = {r["method"]: r for r in result["rows"]}
    pick = lambda specs: [rows[spec] for spec in specs if spec in rows]
    by_prefix = lambda prefix: [r for r in result["rows"] if r["method"].startswith(prefix)]
    levels = by_prefix("cachegen:mode=transform:bits=")[: len(LEVELS)]
    out += [f"### Through the codec: {windows} windows of {length} tokens", ""] + HEAD + [line(r) for r in levels]
    rest = by_prefix("cachegen:mode=channels:k=") + by_prefix("cachegen:mode=common") + by_prefix("cachegen:mode=paper")
    rest = [r for r in rest if "predictor" not in r["method"]]
    out += [line(r) for r in rest] + [line(r) + f" LMCache's own format: {r['lmcache']:.2f} bits |" for r in by_prefix("cachegen:mode=lmcache")] + [""]
    # Sizes against entropies: order 0, of the bins without prediction, in each window itself.
    out += ["### Sizes against the entropy of each channel's bins, counted in the window itself", "",
            "Bins less their mean, order 0 and at the same steps; what prediction gains is ours.", "",
            "| bits | entropy | blocks of 256 | of 1,024 |", "| --- | --- | --- | --- |"]
    means = quality(folder, model, text, windows, length, [f"cachegen:bits={b}:predictor=mean" for b in (2, 3.1, 4.1)])["rows"]
    for b, mean in zip((2, 3.1, 4.1), means):
        r = levels[LEVELS.index(b)]
        out.append(f"| {b} | {mean['entropy']:.3f} | {r['bits256']:.3f} ({100 * (r['bits256'] / mean['entropy'] - 1):+.1f} %) | {r['bits1024']:.3f} ({100 * (r['bits1024'] / mean['entropy'] - 1):+.1f} %) |")
    # Equal error.
    curve = [(math.log(r["nmse"]), r["bits1024"]) for r in by_prefix("cachegen:mode=common")]
    out += ["", "### At equal squared error (one step for all channels of a layer)", "", "| format | its bits | error / variance | ours | times smaller |", "| --- | --- | --- | --- | --- |"]
    for name, bits, nmse in [(f"LMCache, {r['method'].split('=')[-1]} bins" + (" (as released)" if r["method"].endswith("=16") else ""), r["lmcache"], r["nmse"]) for r in by_prefix("cachegen:mode=lmcache")] + \
            [(f"plain {p['bits'] - 0.5:.0f} bits, groups of 64", p["bits"], p["nmse"]) for p in result["plain"]]:
        ours = at(curve, math.log(nmse), log=False)
        out.append(f"| {name} | {bits:.2f} | {nmse:.4f} | {ours:.2f} | {bits / ours:.2f} |")
    out += ["", "### What each idea is worth", "", "In the upper half steps are the same number of deviations of what the predictor leaves, so `none` and `anchor`, which leave more, have larger steps and a larger error; in the lower half (transform) steps are equal. Error / variance is that of squared errors.", "",
            "| setting | bits, blocks of 256 | of 1,024 | error / variance | KL |", "| --- | --- | --- | --- | --- |"]
    for r in by_prefix("cachegen:mode=channels:k=1:v=1") + by_prefix("cachegen:mode=transform:bits=2:") + pick(["cachegen:mode=transform:bits=2"]):
        out.append(f"| {short(r['method'])} | {r['bits256']:.3f} | {r['bits1024']:.3f} | {r['nmse']:.4f} | {r['kl']:.5f} |")
    out.append("")


def budgets(out, folder, model, text, context, decode):
    default = [f"cachegen:bits={b}" for b in LEVELS]
    rivals = [f"{n}:k={b}:v={b}" for n in ("int4", "rotated") for b in (2, 3, 4, 6, 8)]
    rivals += [f"cachegen:mode=channels:k={s}:v={s}" for s in (0.12, 0.25, 0.5, 1, 1.5)]
    rivals += [f"cachegen:mode=paper:k={s}:v={s}" for s in (0.05, 0.12, 0.25, 0.5)]
    rivals += [f"cachegen:mode=lmcache:bins={b}" for b in (16, 32, 64)]
    with tempfile.NamedTemporaryFile() as file:
        command = [f"{folder}/kv", "compare", "--context", str(context), "--decode", str(decode), "--json", file.name]
        command += ["--methods", ",".join(f"{spec}:window=0:batch=64" for spec in default + rivals)]
        command += ["--model", model, "--text", text] if model else []
        run(command)
        rows = json.load(open(file.name))["methods"]
    points = [(r["bits_per_value"], max(r["kl"], 1e-9)) for r in rows[: len(default)]]
    out += [f"### Prompt of {context} tokens through the codec, {decode} decoded (`kv compare`)", "",
            "Bits are all that is kept, first 4 and last 0 to 63 tokens in 16 bits included; LMCache's rows have our models in place of its tables.",
            "The last column is the default's KL at the same bits, between its levels.", "",
            "| method | setting | bits | perplexity | KL | top-1 | needle | default |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    worse = []
    for i, r in enumerate(rows):
        needle = f"{round(r['needle'] * r['needle_trials'])}/{r['needle_trials']}"
        setting = short(r["setting"]).replace(" window=0 batch=64", "")
        own = i < len(default)
        here = "" if own else f"{at(points, r['bits_per_value']):.5f}"
        if not own and at(points, r["bits_per_value"]) >= r["kl"]:
            worse.append(f"{r['name']} {setting}")
        out.append(f"| {r['name']} | {setting} | {r['bits_per_value']:.2f} | {r['perplexity']:.3f} | {r['kl']:.5f} | {100 * r['top1']:.1f} % | {needle} | {here} |")
    eight = next(r for r in rows if r["name"] == "int4" and "k=8" in r["setting"])
    levels = [(eight["bits_per_value"] / r["bits_per_value"], r["perplexity"] / eight["perplexity"] - 1, r) for r in rows[: len(default)]]
    out += ["", "Beside 8-bit codes (the paper: 3.5 to 4.3 times smaller at no more than 2 % loss): " + "; ".join(
        f"{ratio:.1f}x smaller at {100 * loss:+.1f} % perplexity" for ratio, loss, _ in levels if 2.5 < ratio < 5) + "."]
    out += ["", "The default has the lower KL at every row's bits." if not worse else "Rows with a lower KL than the default at their bits: " + "; ".join(worse) + ".", ""]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    args = parser.parse_args()
    commit = record.commit()
    cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.processor())
    doc = __doc__.strip().splitlines()
    out = ["# codec-core against its peers", "", f"{datetime.date.today()}, commit {commit}, {cpu}. Made by", ""] + doc[2:4] + [""] + doc[5:] + [""]
    speeds(out, args.folder)
    assets = os.path.join(os.path.dirname(__file__), "..", "..", "reference", "assets")
    out += ["## tiny-llama-12m, State of the Union addresses", ""]
    tiny = (os.path.join(assets, "tiny-llama-12m"), os.path.join(assets, "sotu-heldout.txt"))
    sizes(out, args.folder, *tiny, 4, 1024)
    budgets(out, args.folder, None, None, 2048, 192)
    record.write(args.out, out, commit)
    if args.smollm2:
        out += ["## SmolLM2-135M-Instruct, WikiText-2", ""]
        sizes(out, args.folder, args.smollm2, args.text, 2, 1024)
        budgets(out, args.folder, args.smollm2, args.text, 1900, 128)
        record.write(args.out, out, commit)


main()
