#!/usr/bin/env python3
"""Caches whose exact rows are in host memory, by `decode_speed` on one GPU: offload.{json,md}.

    cargo build --release -p kv-benches --bin decode_speed
    python benches/peers/offload.py target/release/decode_speed benches/results [--cases INDICES]

Weights and rows are hashes of their index, so nothing is stored. `--hits` sets the part of a step's rows that are resident on the
device, since random queries lack the locality of a model's; the look-up of resident rows is part of the step all the same.
"""

import argparse, json, os, subprocess, tempfile

import tables

PQCACHE = "pqcache:tokens=2048:exact=bf16:codebooks=profile"
HYBRID = "hybrid:keys=rotated:exact=bf16"
MEAN = "hybrid:exact=bf16"
with_int8 = lambda method: [method, f"{method}:offloaded=int8"]
# contexts, hits, methods, further options
CASES = [
    ("131072", "0.5", ["dense:dtype=bf16", *with_int8(PQCACHE), *with_int8(HYBRID), *with_int8(MEAN)], ""),
    ("131072", "0.8", [PQCACHE, HYBRID], ""),
    ("524288", "0.5", ["dense:dtype=bf16"], ""),
    ("524288", "0.5", [*with_int8(PQCACHE), *with_int8(f"{HYBRID}:rows=0.0025")], "--device-memory 24GiB"),
    (
        "1000000",
        "0.5",
        [f"{PQCACHE}:offloaded=int8", f"{HYBRID}:rows=0.0025:offloaded=int8"],
        "--device-memory 32GiB",
    ),
    ("1000000", "0.5", ["million:exact=bf16"], ""),
    (
        "32768,131072",
        "0.5",
        ["dense:dtype=bf16", "pqcache:tokens=2048:exact=bf16", HYBRID],
        "--chunk 8192 --steps 8",
    ),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("decode_speed")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--cases", default="", help="indices of cases, separated by commas")
    parser.add_argument("--commit")
    args = parser.parse_args()
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()[0]
    made = {"device": device, "date": tables.today(), "commit": args.commit or tables.commit()}
    runs = []
    for i in [int(i) for i in args.cases.split(",") if i] or range(len(CASES)):
        contexts, hits, methods, more = CASES[i]
        options = f"--random llama-3.1-8b --contexts {contexts} --hits {hits} {more}".split()
        options += ["--methods", ",".join(methods)]
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run([args.decode_speed, *options, "--json", file.name], check=True)
            runs.append({"command": f"decode_speed {' '.join(options)}", "hits": hits, **json.load(open(file.name))})
        # Written after every case, so that an interrupted run keeps its results.
        tables.write(os.path.join(args.results, "offload.json"), made | {"runs": runs})


main()
