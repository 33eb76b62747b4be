#!/usr/bin/env python3
"""One transform for many heads in stored caches: size and KL on texts that its profile has not seen; joint.{json,md}.

    cargo build --release -p kv-reference
    python benches/peers/joint.py target/release/kv benches/results --wikitext WIKITEXT [--text NAME=FILE]... \\
        [--model NAME=PATH:LENGTH:DECODE:SPANS]... [--only NAME] [--texts N] [--shares offset]

`cachegen` has a transform of one head, of the heads of a layer, of those of several layers, or of the whole model (`over`), and steps
that share the bits by a fixed offset between keys and values or by the measured sensitivity of each layer and side. Each has one
profile of WIKITEXT, of its first 4,096 tokens, and codes the prompts of other texts at several rates, from the first token after the
sinks to the last; `kv compare` decodes tokens over what comes back. `kl_error` is the standard error of their mean KL; `at` has KL at
equal sizes, interpolated between the logarithms of the rates next to it. A model is `--model NAME=PATH:2048:132:head+layer+model`; without any it is the shipped one. `--only` runs one
model and keeps the stored results of the others.
"""

import json, math, os, statistics, tempfile

import tables, texts

# Other texts take up to 1.4 times as many.
BITS = (0.4, 0.7, 1.1, 1.8)
RATIOS = (8, 12, 16, 24)
SHARES = ("offset", "sensitivity")


def method(span, share, bits):
    return f"cachegen:over={span}:bits={bits}" + (":sensitivity=1" if share == "sensitivity" else "") + ":window=0"


def at(points, ratio):
    """The KL of a curve (bits, KL) at a size, in 16-bit rows over it; None beyond the curve."""
    bits = 16 / ratio
    for (low, kl), (high, kl_high) in zip(points, points[1:]):
        if low <= bits <= high:
            part = (math.log(bits) - math.log(low)) / (math.log(high) - math.log(low))
            return math.exp((1 - part) * math.log(kl) + part * math.log(kl_high))
    return None


def run(bench, file, spans, shares, length, decode):
    kinds = [(span, share) for span in spans for share in shares]
    methods = [method(*kind, bits) for kind in kinds for bits in BITS]
    arguments = ["--text", file, "--methods", ",".join(methods), "--context", length, "--decode", decode]
    rows = iter(bench.run("compare", *arguments, "--profile", bench.profile, "--device", "cpu")["methods"])
    curves = []
    for span, share in kinds:
        rates = [
            {
                "bits": row["bits_per_value"],
                "kl": row["kl"],
                "kl_error": statistics.stdev(row["kl_by_position"]) / math.sqrt(decode),
                "top1": row["top1"],
                "perplexity": row["perplexity"],
                "profile_bytes": row["shared_bytes"],
            }
            for _, row in zip(BITS, rows)
        ]
        points = sorted((rate["bits"], rate["kl"]) for rate in rates)
        curves.append({"over": span, "share": share, "at": {ratio: at(points, ratio) for ratio in RATIOS}, "rates": rates})
    return curves


def main():
    parser = texts.parser()
    parser.add_argument("--model", action="append", default=[], metavar="NAME=PATH:LENGTH:DECODE:SPANS")
    parser.add_argument("--only")
    parser.add_argument("--profile", help="the one of an earlier run, of the same model and methods")
    parser.add_argument("--commit")
    parser.add_argument("--shares", default="+".join(SHARES), help="a large model takes hours to measure its sensitivity on a CPU")
    args = parser.parse_args()

    unseen = texts.chosen(args, ("prose in lines", "code"))
    # All tokens but the sinks are coded: they fill batches of 64.
    models = texts.models(("", 2048, 132, "head+layer+3+model"), args.model)
    path = os.path.join(args.results, "joint.json")
    stored = json.load(open(path))["models"] if os.path.exists(path) and args.only else {}
    done = {name: stored[name] for name in stored if name != args.only}
    for name, (model, length, decode, spans) in models.items():
        if args.only not in (None, name):
            continue
        spans, shares = spans.split("+"), args.shares.split("+")
        made = {"cpu": tables.cpu(), "date": tables.today(), "commit": args.commit or tables.commit()}
        made |= {"length": length, "decode": decode, "runs": []}
        with tempfile.TemporaryDirectory() as folder:
            bench = texts.Bench(args.kv, model, folder)
            bench.profile = args.profile or bench.profile
            methods = [method(*of) for of in ((s, h, b) for s in spans for h in shares for b in BITS)]
            if not args.profile:
                bench.calibrate(args.wikitext, methods)
            for text, content in unseen.items():
                curves = run(bench, bench.file(content), spans, shares, length, decode)
                made["runs"].append({"text": text, "curves": curves})
                done[name] = made
                tables.write(path, {"calibration": texts.CALIBRATION, "models": done})


if __name__ == "__main__":
    main()
