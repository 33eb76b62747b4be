#!/usr/bin/env python3
"""Methods on texts that their profile has not seen, by `kv eval`: any-text.{json,md}.

    cargo build --release -p kv-reference
    python benches/peers/any_text.py target/release/kv benches/results --wikitext WIKITEXT [--text NAME=FILE]... \\
        [--model NAME=PATH:LENGTHS:DECODE:TRIALS]... [--only NAME] [--methods A,B] [--own LENGTHS] [--texts N] [--device auto]

Every method has a profile of WIKITEXT alone, of its first 4,096 tokens, and runs over texts of other kinds; methods of which
something is fitted run again with a profile of the text itself, from the 4,096 tokens before the prompt, over the same tokens.
Texts of the repository: speeches in lines of 72 characters, code (its Rust sources), JSON and tables (its results). `--text`
adds others, such as plays or another script. A model is `--model NAME=PATH:2048+8192:128:8`: prompts of 2,048 and 8,192 tokens, 128
tokens decoded, 8 facts to find at half the depth of a prompt, pass keys and lines; without any it is the shipped model. `--only`
runs one model and keeps the stored results of the others; `--texts N` takes the first N texts. `--methods A,B` runs methods of the
list alone, at lengths that are new or after a change of them: the stored rows of the others stay, and the new ones name their
commit. Profiles of the texts themselves are made for the lengths of `--own`, by default all.

Before a text is run the script asserts, on 1,024 tokens of it, that the exact cache has no divergence, that bytes are those of each
format, and that of one family more bits have less divergence.
"""

import json, os, tempfile

import tables, texts

# Method, and whether something of it is fitted to the calibration text. Codes by rate fit heads of any size.
METHODS = {
    "dense:dtype=f16": False,
    "q8_0": False,
    "q4_0": False,
    "int4": False,
    "int4:k=3:v=3": False,
    "int2:group=32": False,
    "sq:k=4:v=4": True,
    "sq:k=3:v=3": True,
    "sq:k=2:v=2": True,
    "auto:bits=4.1": True,
    "auto:bits=3.1": True,
    "auto:bits=2.2": True,
    "pqklt:k=8/2:v=8/2": True,
    "million:k=8/2:v=8/2": True,
    "hybrid": True,
    "hybrid:k=8/8:v=8/8:norms=off:mean-error=off": True,
    "pqcache": False,
}
# Bits of an element in the store: codes, and scales of a block of 32.
FORMATS = {"q8_0": 8 * 34 / 32, "q4_0": 8 * 18 / 32}
# More bits, less divergence.
ORDERS = [("q8_0", "q4_0"), ("int4", "int4:k=3:v=3", "int2:group=32"), ("sq:k=4:v=4", "sq:k=3:v=3", "sq:k=2:v=2")]
EXACT = 68  # sinks and window, in 16 bits


def check(bench, text, methods):
    """What must hold of any text."""
    length, decode = 1024, 32
    rows = bench.eval(text, ["dense", *methods], length, decode, 0)
    assert rows["dense"]["kl"] < 1e-9 and rows["dense"]["top1"] == 1.0
    tokens = length + decode
    for method, bits in FORMATS.items() if FORMATS.keys() <= rows.keys() else []:
        expected = (bits * (tokens - EXACT) + 16 * EXACT) / tokens
        assert abs(rows[method]["bits_per_value"] - expected) < 1e-6, (method, expected, rows[method])
    for order in (order for order in ORDERS if set(order) <= rows.keys()):
        kls = [rows[method]["kl"] for method in order]
        assert kls == sorted(kls), (order, kls)


def measure(bench, text, methods, length, decode, trials, with_own):
    """The rows of one text at one length."""
    rows = bench.eval(text, methods, length, decode, trials)
    fitted = [method for method in methods if METHODS[method]] if with_own else []
    own = bench.eval(text, fitted, length, decode, 0, profile=False) if fitted else {}
    return [
        {
            "method": method,
            "bits": row["bits_per_value"],
            "bytes_per_token": row["kv_bytes_per_token"],
            "kl": row["kl"],
            "own_kl": own[method]["kl"] if method in own else None,
            "top1": row["top1"],
            "perplexity": row["perplexity"],
            "needle": texts.found(row["needle"]),
            "recall": texts.found(row["recall"]),
        }
        for method, row in rows.items()
    ]


def merged(stored, rows):
    """The stored rows of a run, also of methods that have left the list, with new ones in their places."""
    by_method = {row["method"]: row for row in [*stored, *({**row, "commit": tables.commit()} for row in rows)]}
    order = list(METHODS)
    return sorted(by_method.values(), key=lambda row: order.index(row["method"]) if row["method"] in order else len(order))


def main():
    parser = texts.parser()
    parser.add_argument("--model", action="append", default=[], metavar="NAME=PATH:LENGTHS:DECODE:TRIALS")
    parser.add_argument("--only")
    parser.add_argument("--methods")
    parser.add_argument("--own", help="lengths, such as 2048+8192")
    args = parser.parse_args()

    unseen, models = texts.chosen(args), texts.models(("", "2048+8192", 128, 8), args.model)
    methods = args.methods.split(",") if args.methods else list(METHODS)
    path = os.path.join(args.results, "any-text.json")
    stored = json.load(open(path))["models"] if os.path.exists(path) and (args.only or args.methods) else {}
    done = {name: stored[name] for name in models if name in stored and (args.methods or name != args.only)}
    for name, (model, lengths, decode, trials) in models.items():
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench = texts.Bench(args.kv, model, folder, args.device)
            bench.calibrate(args.wikitext, [method for method in methods if METHODS[method]])
            made = {"date": tables.today(), "commit": tables.commit(), "decode": decode, "device": args.device, "runs": []}
            if args.methods:
                made = done.get(name, made)
            for text, content in unseen.items():
                file = bench.file(content)
                check(bench, file, methods)
                for length in map(int, lengths.split("+")):
                    with_own = args.own is None or str(length) in args.own.split("+")
                    rows = measure(bench, file, methods, length, decode, trials, with_own)
                    run = next((run for run in made["runs"] if (run["text"], run["length"]) == (text, length)), None)
                    if run:
                        run["rows"] = merged(run["rows"], rows)
                    else:
                        made["runs"].append({"text": text, "length": length, "rows": rows})
                    done[name] = made
                    tables.write(path, {"calibration": texts.CALIBRATION, "models": done})


if __name__ == "__main__":
    main()
