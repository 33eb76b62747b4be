#!/usr/bin/env python3
"""Requests that arrive at random, by `serve_speed`: latency against requests a second for each method: serving.{json,md}.

    cargo build --release -p kv-benches --bin serve_speed
    python benches/peers/serving.py target/release/serve_speed benches/results [--traces imdb,cocktail] [--methods LIST] [--seconds 10]

The 8B shape has hashed weights, and every method the same memory for its cache. First the answers are checked on the shipped model: those of
requests that come at once are those of each alone, with the exact cache, as far as near ties allow. A rate whose mean latency per token is
beyond three times that of requests one by one ends a method's run. Requests a second at twice the unloaded latency are those at which the
mean latency per token is twice that of the first method's requests one by one, between two measured rates by a straight line. Traces of
the file that were measured with the same program and options stay, unless they are measured again.
"""

import argparse, json, os, subprocess, sys, tempfile

import tables

MODEL = "llama-3.1-8b"
METHODS = [
    "dense:dtype=bf16:pages=64",
    "million:exact=bf16:pages=64",
    "sq:exact=bf16",
    "hybrid:exact=bf16:rows-on=device",
    "zack:exact=bf16",
]
# Requests a second of each trace.
RATES = {
    "imdb": [4, 8, 16, 24, 32, 48],
    "arxiv": [0.5, 1, 2, 3, 4, 6],
    "cocktail": [1, 2, 3, 4, 6],
    "humaneval": [4, 8, 16, 24, 32, 48],
}
# A run of methods on the shipped model: all of its requests come at once, more than have room.
CHECK = ["--trace", "imdb", "--requests", "24", "--alone", "24", "--rates", "0,1000", "--seconds", "60", "--memory", "16MiB", "--sequences", "16"]
# Latency beyond which higher rates are not run, and that of the capacity, over that of requests one by one.
UNTIL, LIMIT = 3, 2


def speed(program, options):
    """The result of `serve_speed`, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "json")
        said = subprocess.run([program, *map(str, options), "--json", path], capture_output=True, text=True)
        if said.returncode:
            return None, (said.stderr.strip().splitlines() or ["no message"])[-1][-300:]
        with open(path) as file:
            return json.load(file), None


def check(program, methods):
    """How far answers in a batch are those of each request alone. Those of `dense` must begin with the same tokens, but for a near tie."""
    rows = []
    for method in methods:
        found, missing = speed(program, [*CHECK, "--methods", method])
        if missing:
            rows.append({"method": method, "missing": missing})
            continue
        loaded = next(row for row in found["rows"] if row["rate"])
        agreement = loaded["agreement"]
        assert not loaded["failed"] and loaded["whole"] == loaded["came"], f"{method}: {loaded}"
        if method.startswith("dense"):
            assert agreement["early"] <= 1, f"{method}: {agreement['early']} answers begin otherwise in a batch"
        rows.append({"method": method, **agreement, "put_back": loaded["put_back"], "largest_batch": loaded["largest_batch"]})
    return rows


def latency(row):
    """Mean seconds per token; none where requests were left without an answer."""
    return row["normalized"]["mean"] if row["normalized"] and row["whole"] == row["came"] else None


def capacity(rows, limit):
    """The requests a second at which the latency is `limit`, and whether there may be more: no rate was beyond it."""
    below = (0.0, next(latency(row) for row in rows if row["rate"] is None))
    for row in (row for row in rows if row["rate"]):
        seconds = latency(row)
        if seconds is None:
            return below[0], False
        if seconds > limit:
            return below[0] + (row["rate"] - below[0]) * max(limit - below[1], 0) / (seconds - below[1]), False
        below = (row["rate"], seconds)
    return below[0], True


def trace(program, name, args):
    """The rows of all methods on a trace."""
    rates = ",".join(map(str, [0, *RATES[name]]))
    methods, limit = [], None
    for method in args.methods:
        options = ["--random", MODEL, "--trace", name, "--methods", method, "--rates", rates, "--until", UNTIL]
        options += ["--seconds", args.seconds, "--memory", args.memory, "--requests", args.requests, "--chunk", args.chunk]
        found, missing = speed(program, options)
        if missing:
            methods.append({"method": method, "missing": missing})
            continue
        rows = found["rows"]
        unloaded = next(latency(row) for row in rows if row["rate"] is None)
        limit = limit or LIMIT * unloaded
        rate, is_least = capacity(rows, limit)
        methods.append({"method": method, "unloaded": unloaded, "capacity": rate, "is_least": is_least, "rows": rows})
    return {"trace": name, "limit": limit, "methods": methods}


def gpu():
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve_speed")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--traces", type=lambda text: text.split(","), default=list(RATES))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS)
    parser.add_argument("--seconds", type=float, default=10, help="in which the requests of a rate come")
    parser.add_argument("--requests", type=int, default=400, help="of a rate, at most")
    parser.add_argument("--memory", default="40GiB", help="of a cache")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--commit", help="of the program, where there is no repository")
    args = parser.parse_args()
    program, path = os.path.abspath(args.serve_speed), os.path.join(args.results, "serving.json")
    stored = json.load(open(path)) if os.path.exists(path) else {}
    data = {"date": tables.today(), "commit": args.commit or tables.commit(), "device": gpu(), "model": MODEL}
    data |= {"memory": args.memory, "chunk": args.chunk, "seconds": args.seconds, "checks": check(program, args.methods)}
    same = all(stored.get(name) == data[name] for name in ("commit", "device", "memory", "chunk", "seconds"))
    before = stored["traces"] if same else []
    for name in args.traces:
        measured = {found["trace"]: found for found in [*before, trace(program, name, args)]}
        before = [measured[name] for name in RATES if name in measured]
        tables.write(path, data | {"traces": before})  # so that an interrupted run keeps its results
        print(tables.page("serving", data | {"traces": before}), flush=True)


if __name__ == "__main__":
    main()
