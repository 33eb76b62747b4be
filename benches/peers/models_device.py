#!/usr/bin/env python3
"""Time and quality of one configuration: methods on a checkpoint on a GPU, each with one setting, by `kv eval` and
`decode_speed`: models-device.{json,md}.

    cargo build --release -p kv-reference -p kv-benches --bin kv --bin decode_speed
    target/release/kv calibrate PROFILE --model PATH --text WIKITEXT --methods sq,pqklt,million,hybrid,zack,cachegen
    python benches/peers/models_device.py target/release/kv target/release/decode_speed benches/results NAME=PATH \\
        --profile PROFILE --text NAME=FILE [--lengths 2048+8192] [--cpu] [--only METHOD]

96 tokens of the text are decoded, teacher-forced; 8 pass keys and 8 lines are at half the depth of a prompt. Steps and prompts are timed
on the same weights, with random rows or codes: without hits, and with the hit rate that was measured on the text. With `--cpu` the
methods also run on the CPU, on the same text: both sides must have about the same divergence. Each length is stored when it is done;
`--only` runs one method beside the dense cache, and replaces its row.
"""

import argparse, json, os, subprocess, tempfile

import tables

METHODS = ["dense", "int4", "sq", "sq:k=4:v=4", "pqklt", "million", "hybrid", "pqcache", "zack", "cachegen"]
DECODE, TRIALS, DEPTH = 96, 8, 0.5


class Bench:
    def __init__(self, args, model, text, folder):
        self.args, self.model, self.text = args, model, text
        self.file = os.path.join(folder, "json")

    def run(self, program, *arguments):
        """What the program writes as JSON."""
        line = [program, *map(str, arguments), "--model", self.model, "--json", self.file]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        with open(self.file) as file:
            return json.load(file)

    def eval(self, methods, length, device, trials):
        """A row for each method."""
        options = ["--methods", ",".join(methods), "--lengths", length, "--decode", DECODE, "--windows", 0, "--device", device]
        options += ["--trials", trials, "--depths", DEPTH, "--text", self.text, "--profile", self.args.profile]
        return self.run(self.args.kv, "eval", *options)["rows"]

    def times(self, specs, length, hits):
        """The copy rate of the device, and times of each method."""
        options = ["--methods", ",".join(specs), "--contexts", length, "--chunk", length, "--hits", hits]
        times = self.run(self.args.decode_speed, *options)
        return times["copy_bytes_per_second"], dict(zip(specs, times["rows"]))

    def measure(self, length):
        """Quality and times of all methods at one length."""
        only = ["dense", self.args.only] if self.args.only else METHODS
        rows = self.eval(only, length, "cuda", TRIALS)
        assert rows[0]["kl"] < 1e-4 and all(row["device"] == "cuda" for row in rows), rows
        specs = [f"{row['name']}:{row['setting']}" for row in rows]
        copy_rate, times = self.times(specs, length, 0)
        for row, spec in zip(rows, specs):
            row["times"] = times[spec]
            if row["fetched_bytes_per_step"]:
                row["hits"] = 1 - row["fetched_bytes_per_step"] / times[spec]["fetched_bytes"]
                row["times"] = self.times([spec], length, row["hits"])[1][spec]
                row["step_ms_without_hits"] = times[spec]["step_ms"]
        on_cpu = self.eval(specs, length, "cpu", 0) if self.args.cpu else []
        for row, other in zip(rows, on_cpu):
            row["cpu_kl"] = other["kl"]
        return {"length": length, "copy_bytes_per_second": copy_rate, "rows": rows}


def gpu():
    line = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("decode_speed")
    parser.add_argument("results", help="a folder")
    parser.add_argument("model", metavar="NAME=PATH")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--text", required=True, metavar="NAME=FILE")
    parser.add_argument("--lengths", default="2048+8192", help="joined by +")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", choices=METHODS[1:])
    parser.add_argument("--commit", help="of the programs, where there is no repository")
    args = parser.parse_args()

    name, model = args.model.split("=", 1)
    text, file = args.text.split("=", 1)
    path = os.path.join(args.results, "models-device.json")
    data = json.load(open(path)) if os.path.exists(path) else {"models": {}}
    made = data["models"].setdefault(name, {"runs": []})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, model, file, folder)
        for length in map(int, args.lengths.split("+")):
            run = bench.measure(length) | {"text": text, "decode": DECODE}
            same = lambda other: (other["text"], other["length"]) == (text, length)
            for stored in filter(same, made["runs"] if args.only else []):
                new = run["rows"][1] | {"commit": args.commit or tables.commit()}
                run = stored | {"rows": [new if spec == args.only else row for spec, row in zip(METHODS, stored["rows"])]}
            kept = [run for run in made["runs"] if not same(run)]
            made["runs"] = [*kept, run]
            if not args.only:
                made.update(gpu=gpu(), date=tables.today(), commit=args.commit or tables.commit())
            tables.write(path, data)


if __name__ == "__main__":
    main()
