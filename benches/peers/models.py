#!/usr/bin/env python3
"""Methods on a checkpoint that people have, on texts that their profile has not seen, by `kv eval`: models.{json,md}.

    cargo build --release -p kv-reference
    python benches/peers/models.py target/release/kv benches/results NAME=PATH --wikitext WIKITEXT \\
        [--text NAME=FILE]... [--lengths 2048] [--texts N]

Texts and rows are those of `any_text.py`, and most methods. A large model takes hours on a CPU: each text and length is stored when it
is done, and a later call goes on with those that are not, such as `--lengths 8192 --texts 2` after all of 2,048 tokens.
"""

import argparse, json, os, tempfile

import any_text, tables

DECODE = 96
# Codes of keys after RoPE are left to the small model.
METHODS = [method for method in any_text.METHODS if not method.startswith("million")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("results", help="a folder")
    parser.add_argument("model", metavar="NAME=PATH")
    parser.add_argument("--wikitext", required=True)
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--lengths", default="2048", help="joined by +")
    parser.add_argument("--texts", type=int)
    args = parser.parse_args()

    texts = any_text.own_texts()
    for name, path in (given.split("=", 1) for given in args.text):
        texts[name] = open(path, encoding="utf-8").read()
    texts = dict(list(texts.items())[: args.texts])
    name, model = args.model.split("=", 1)
    path = os.path.join(args.results, "models.json")
    data = json.load(open(path)) if os.path.exists(path) else {"calibration": any_text.CALIBRATION, "models": {}}
    made = data["models"].setdefault(name, {"decode": DECODE, "runs": []})
    done = {(run["text"], run["length"]) for run in made["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        bench = any_text.Bench(args.kv, model, folder)
        for length in map(int, args.lengths.split("+")):
            for text, content in texts.items():
                if (text, length) in done:
                    continue
                if not os.path.exists(bench.profile):
                    bench.calibrate(args.wikitext, [method for method in METHODS if any_text.METHODS[method]])
                file = os.path.join(folder, "text")
                with open(file, "w", encoding="utf-8") as out:
                    out.write(content)
                rows = any_text.measure(bench, file, METHODS, length, DECODE, 0)
                made["runs"].append({"text": text, "length": length, "rows": rows})
                made.update(date=tables.today(), commit=tables.commit())
                tables.write(path, data)


if __name__ == "__main__":
    main()
