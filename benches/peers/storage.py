#!/usr/bin/env python3
"""What stored caches cost: one transform for many heads, and rows without loss; storage.{json,md}.

    cargo build --release -p kv-reference -p kv-benches
    python benches/peers/storage.py target/release benches/results [--contexts 2048,8192] [--extra --model FILE]

`kv compare` over the shipped text: the prompt is stored and decoded, then tokens are decoded over it. `cachegen` has transforms of one head,
of the heads of a layer, and of those of several or all layers, at equal bits; `int4` and `q4_0` are scalar codes. The transforms are fitted to
the text before the prompt. Then `codec_speed` times frames without loss.
"""

import argparse, json, os

import tables
from programs import compared, run

LEVELS = [0.7, 1, 1.5, 2, 3]


def compare(folder, methods, context, decode, extra):
    found = compared(f"{folder}/kv", methods, context, decode, *extra)
    keep = ("name", "setting", "bits_per_value", "shared_bytes", "perplexity", "kl", "top1")
    rows = [{key: row[key] for key in keep} for row in found["methods"]]
    same = {"model": found["model"], "text": found["text"], "calibration": found["calibration"]}
    return same | {"context": context, "decode": decode, "rows": rows}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="with kv and codec_speed")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--contexts", default="2048,8192")
    parser.add_argument("--decode", type=int, default=192)
    parser.add_argument("--spans", default="head,layer,3,model", help="values of `over`")
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)), help="values of `bits`")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further arguments of kv compare")
    parser.add_argument("--commit")
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    spans, levels = args.spans.split(","), args.levels.split(",")
    lists = [["int4:window=0", "q4_0:window=0"]]
    lists += [[f"cachegen:mode=lossless:rows={rows}:window=0" for rows in ("bf16", "f16")]]
    lists += [[f"cachegen:over={span}:bits={bits}:window=0" for bits in levels] for span in spans]
    made = {"cpu": tables.cpu(), "date": tables.today(), "commit": args.commit or tables.commit()}
    made |= {"quality": [], "speed": []}
    path = os.path.join(args.results, "storage.json")
    if not args.no_speed:
        made["speed"] = [json.loads(line) for line in run([f"{args.folder}/codec_speed", "9", "lossless"]).splitlines()]
    for context in map(int, args.contexts.split(",")):
        for i, methods in enumerate(lists):
            part = compare(args.folder, methods, context, args.decode, args.extra)
            if i == 0:
                made["quality"].append(part)
            else:
                made["quality"][-1]["rows"] += part["rows"]
            tables.write(path, made)  # a long run leaves what it has


if __name__ == "__main__":
    main()
