#!/usr/bin/env python3
"""Methods on a checkpoint that people have, on texts that their profile has not seen, by `kv eval`: models.{json,md}.

    cargo build --release -p kv-reference
    python benches/peers/models.py target/release/kv benches/results NAME=PATH --wikitext WIKITEXT \\
        [--text NAME=FILE]... [--lengths 2048] [--texts N]

Texts and rows are those of `any_text.py`, and most methods. A large model takes hours on a CPU: each text and length is stored when it
is done, and a later call goes on with those that are not, such as `--lengths 8192 --texts 2` after all of 2,048 tokens.
"""

import json, os, tempfile

import any_text, tables, texts

DECODE = 96
# Codes of keys after RoPE are left to the small model.
METHODS = [method for method in any_text.METHODS if not method.startswith("million")]


def main():
    parser = texts.parser()
    parser.add_argument("model", metavar="NAME=PATH")
    parser.add_argument("--lengths", default="2048", help="joined by +")
    args = parser.parse_args()

    unseen = texts.chosen(args)
    name, model = args.model.split("=", 1)
    path = os.path.join(args.results, "models.json")
    data = json.load(open(path)) if os.path.exists(path) else {"calibration": texts.CALIBRATION, "models": {}}
    made = data["models"].setdefault(name, {"decode": DECODE, "runs": []})
    done = {(run["text"], run["length"]) for run in made["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        bench = texts.Bench(args.kv, model, folder)
        for length in map(int, args.lengths.split("+")):
            for text, content in unseen.items():
                if (text, length) in done:
                    continue
                if not os.path.exists(bench.profile):
                    bench.calibrate(args.wikitext, [method for method in METHODS if any_text.METHODS[method]])
                rows = any_text.measure(bench, bench.file(content), METHODS, length, DECODE, 0)
                made["runs"].append({"text": text, "length": length, "rows": rows})
                made.update(date=tables.today(), commit=tables.commit())
                tables.write(path, data)


if __name__ == "__main__":
    main()
