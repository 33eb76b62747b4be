#!/usr/bin/env python3
"""Quality of the methods at the settings that the README names, by `kv compare`: compare.{json,md}.

    cargo build --release -p kv-reference
    python benches/peers/compare.py target/release/kv benches/results [--smollm2 MODEL.gguf --text WIKITEXT]

The methods are the defaults, scalar codes, and the settings that `decode.py` and `offload.py` time.
"""

import argparse, os, subprocess

import tables

SCALAR = "sq:k=4:v=4,sq,sq:k=2:v=2,q8_0,q4_0"
TIMED = "dense:dtype=f16,million:k=64x8:v=64x8,hybrid:keys=rotated,pqcache:tokens=256:codebooks=profile"
SMALL = (
    "dense:dtype=f16,int4:k=4:v=4:group=64,q4_0,sq:k=4:v=4,sq,million:k=32x8:v=32x8,cachegen:mode=transform:bits=3,pqklt:k=32x6:v=32x6,"
    "zack:k=0.75:v=0.75:bits=4,pqcache:ratio=0.2:code=8x8,hybrid:k=8x8:v=4x8:rows=0.02:keys=rope"
)


def section(title, command):
    shown = " ".join(["kv"] + command[1:])
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip("\n")
    return [f"## {title}", "", f"By `{shown}`.", "", "```", found, "```", ""]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    args = parser.parse_args()
    compare = [args.kv, "compare", "--device", "cpu"]
    lines = ["# Methods by `kv compare`", "", f"{tables.today()}, commit {tables.commit()}.", ""]
    lines += section("tiny-llama-12m, State of the Union addresses", compare)
    lines += section("Scalar codes, and llama.cpp's cache types", compare + ["--methods", SCALAR])
    lines += section("At the settings that are timed on a GPU", compare + ["--methods", TIMED])
    if args.smollm2:
        model = ["--model", args.smollm2, "--text", args.text, "--methods", SMALL]
        lines += section("SmolLM2-135M-Instruct, WikiText-2", compare + model)
    tables.write_printed(os.path.join(args.results, "compare.md"), lines)


main()
