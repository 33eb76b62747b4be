#!/usr/bin/env python3
"""Caches of `kv` and of llama.cpp on the same windows of text, by its `llama-perplexity`: llama-perplexity.{json,md}.

    cargo build --release -p kv-reference
    cmake -B build llama.cpp -DLLAMA_CURL=OFF && cmake --build build --target llama-perplexity    # llama.cpp's sources
    python benches/peers/llama_perplexity.py target/release/kv build/bin/llama-perplexity benches/results NAME=MODEL.gguf \\
        --profile PROFILE --text NAME=FILE... [--windows 2] [--device cuda] [--threads N] [--commit ID]

A window is the first 2,048 tokens of a piece of a text. KL is that of the second half of its predictions from those of the same
engine's cache in half precision, as `llama-perplexity --kl-divergence` counts it. llama.cpp reads all tokens of a window from its cache;
`kv` decodes a window token by token after its first 8, so that the codes of a token are made of rows that codes have led to, as in
llama.cpp. PROFILE is that of `kv calibrate` for `sq`, of another text. Before rows are written the script asserts that perplexities
in half precision of both engines differ by at most 1 %: they read the same tokens.
"""

import argparse, json, math, os, re, subprocess, tempfile

import tables

WINDOW, PROMPT = 2048, 8
HALF = WINDOW // 2 - 1  # predictions that count
LLAMA = {"q8_0": ("q8_0", "q8_0"), "q8_0 keys, q4_0 values": ("q8_0", "q4_0"), "q4_0": ("q4_0", "q4_0")}
BITS = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5}
METHODS = ["sq:k=4:v=4", "sq:k=3:v=3", "sq:k=2:v=2", "int4"]
PIECE = 24000  # characters; llama-perplexity asks for two windows


def pieces(text, count):
    """Disjoint pieces of a text, each from the start of a line on."""
    starts = [text.rfind("\n", 0, len(text) * i // count) + 1 for i in range(count)]
    return [text[start : start + PIECE] for start in starts]


def llama(args, model, file, folder):
    """Perplexity in half precision, and KL by cache."""
    base = os.path.join(folder, "logits")
    common = [args.llama, "-m", model, "-f", file, "-c", str(WINDOW), "--chunks", "1", "-t", str(args.threads), "-fa", "on"]

    def run(*options):
        done = subprocess.run([*common, *options, "--kl-divergence-base", base], check=True, capture_output=True, text=True)
        return done.stdout + done.stderr

    def number(pattern, printed):
        found = re.search(pattern + r"\s*[:=]\s*([-\d.]+)", printed)
        assert found, (pattern, printed[-2000:])
        return float(found.group(1))

    exact = number(r"Final estimate: PPL", run())
    kl = {}
    for name, (keys, values) in LLAMA.items():
        kl[name] = number(r"Mean\s+KLD", run("--kl-divergence", "-ctk", keys, "-ctv", values))
    os.remove(base)
    return exact, kl


def ours(args, model, file, folder):
    """Perplexity in half precision, and a row for each method."""
    out = os.path.join(folder, "json")

    def run(context, methods, *options):
        command = [args.kv, "eval", "--model", model, "--text", file, "--calibration", "0", "--device", args.device, *options]
        command += ["--trials", "0", "--windows", "0", "--methods", ",".join(methods), "--json", out]
        subprocess.run([*command, "--lengths", str(context), "--decode", str(WINDOW - context)], check=True, stdout=subprocess.DEVNULL)
        return json.load(open(out))["rows"]

    exact = run(WINDOW // 2, ["dense:dtype=f16"])[0]["perplexity"]
    rows = run(PROMPT, ["dense:dtype=f16", *METHODS], "--profile", args.profile)[1:]
    return exact, {method: (row["bits_per_value"], row["kl_by_position"][-HALF:]) for method, row in zip(METHODS, rows)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("llama")
    parser.add_argument("results", help="a folder")
    parser.add_argument("model", metavar="NAME=PATH")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=2, help="of a text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--commit")
    args = parser.parse_args()
    name, model = args.model.split("=", 1)
    made = {"date": tables.today(), "commit": args.commit or tables.commit(), "window": WINDOW, "device": args.device, "windows": []}
    path = os.path.join(args.results, "llama-perplexity.json")
    stored = json.load(open(path))["models"] if os.path.exists(path) else {}
    for text, source in (given.split("=", 1) for given in args.text):
        for piece in pieces(open(source, encoding="utf-8").read(), args.windows):
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "text")
                with open(file, "w", encoding="utf-8") as out:
                    out.write(piece)
                theirs, kl = llama(args, model, file, folder)
                own, rows = ours(args, model, file, folder)
            assert abs(math.log(own / theirs)) < 0.01, (own, theirs)
            caches = [{"engine": "llama.cpp", "cache": cache, "bits": sum(map(BITS.get, LLAMA[cache])) / 2, "kl": kl[cache]} for cache in LLAMA]
            caches += [
                {"engine": "kv", "cache": method, "bits": bits, "kl": sum(by_position) / HALF} for method, (bits, by_position) in rows.items()
            ]
            made["windows"].append({"text": text, "perplexity": own, "perplexity_llama": theirs, "caches": caches})
            tables.write(path, {"models": {**stored, name: made}})


if __name__ == "__main__":
    main()
