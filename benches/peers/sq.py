#!/usr/bin/env python3
"""Attention on scalar codes beside attention on PQ codes, one thread: sq.{json,md}.

    cargo build --release -p kv-benches --bin sq_speed
    python benches/peers/sq.py target/release/sq_speed benches/results

Medians over rounds of `sq_speed`, which compares every case with f64 before it times it. PQ codes are (dim / 2, 8): 4 bits a
component.
"""

import argparse, json, os, statistics, subprocess

import tables


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sq_speed")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit")
    args = parser.parse_args()
    seconds = {}
    for _ in range(args.rounds):
        printed = subprocess.run([args.sq_speed], check=True, capture_output=True, text=True).stdout
        for row in map(json.loads, printed.splitlines()):
            time = row.pop("seconds")
            seconds.setdefault(json.dumps(row), []).append(time)
    rows = [
        json.loads(row) | {"ns_per_token": round(1e9 * statistics.median(times) / json.loads(row)["tokens"], 2)}
        for row, times in seconds.items()
    ]
    made = {"cpu": tables.cpu(), "date": tables.today(), "commit": args.commit or tables.commit()}
    tables.write(os.path.join(args.results, "sq.json"), made | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
