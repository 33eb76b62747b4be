"""How each file of results is printed: the lines of a page from its data. `tables.py` writes them."""

import math


def table(columns, rows):
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    return [line(columns), "|" + " --- |" * len(columns), *map(line, rows), ""]


def printed(data):
    lines = []
    for block in data["blocks"]:
        if "heading" in block:
            lines += ["#" * block["level"] + " " + block["heading"], ""]
        elif "columns" in block:
            lines += table(block["columns"], block["rows"])
        elif "output" in block:
            lines += ["```", *block["output"], "```", ""]
        else:
            lines += [*block["text"], ""]
    return lines


def gpu(data):
    fp8 = f"FlashInfer {data['flashinfer']}" if data["flashinfer"] else "FlashInfer is not installed"
    rows = []
    for row in data["rows"]:
        us, its_us, fp8_us = row["us"], row["peer_us"], row["fp8_us"]
        rows.append(
            [
                row["kernel"],
                row["shape"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['floor_us']:.1f}",
                f"{us:.1f}",
                f"{row['to_floor']:.2f}",
                f"{row['elements'] / us / 1e3:.0f}" if "elements" in row else "",
                row["peer"],
                *((f"{its_us:.1f}", f"{its_us / us:.2f}") if its_us else ("", "")),
                *((f"{fp8_us:.1f}", f"{fp8_us / us:.2f}") if fp8_us else (row["fp8"] or "", "")),
                f"{row['sm_80_us']:.1f}" if "sm_80_us" in row else "",
            ]
        )
    columns = [
        "kernel",
        "shape",
        "MB",
        "floor, us",
        "median, us",
        "over floor",
        "G elements/s",
        "peer",
        "its us",
    ]
    columns += ["peer / this", "fp8, us", "fp8 / this", "code for 8.0, us"]
    return [
        "# Kernels",
        "",
        f"{data['device']}, copy {data['copy_tb_s']:.2f} TB/s; {data['date']}, commit {data['commit']}; PyTorch {data['torch']}, {fp8}.",
        "",
        f"    python benches/peers/gpu.py target/release/gpu_speed benches/results{data.get('options', '')}",
        "",
        *table(columns, rows),
    ]


def cache_name(row):
    """A method's name, and whose memory has its exact rows."""
    name = row["method"].split(":")[0]
    if row["host_bytes"]:
        return f"{name}, rows on the host"
    return f"{name}, rows on the device" if "rows-on=device" in row["method"] else name


def settings(row):
    return row["method"].partition(":")[2].replace(":", " ")


def time_of(data):
    return f"{data['date']}, commit {data['commit']}"


PEERS = ("torch", "flashinfer", "transformers")


def decode(data):
    cases, versions, rows, missing = data["cases"], {}, [], []
    copy = max(case["copy_bytes_per_second"] for case in cases) / 1e12
    for case in cases:
        for said in case["peers"].values():
            versions |= {
                name: version for name, version in said.items() if name not in ("step_ms", "missing")
            }
            if "missing" in said:
                missing.append(
                    f"{case['shape']}, {case['context']:,} x {case['batch']}: {said['missing'].splitlines()[-1]}"
                )
        for row in case["rows"]:
            parts = [row["products_ms"], row["attention_ms"], row["rest_ms"]]
            whole = sum(parts) < 1.1 * row["step_ms"]
            times = [
                f"{row['step_ms']:.2f}",
                f"{row['floor_ms']:.2f}",
                f"{row['step_ms'] / row['floor_ms']:.2f}",
                *(f"{part:.2f}" if whole else "" for part in parts[:2]),
                f"{row['tokens_per_second']:.0f}",
            ]
            for name in PEERS:
                step = case["peers"].get(name, {}).get("step_ms")
                times += [f"{step:.2f}", f"{step / row['mean_ms']:.2f}"] if step else ["", ""]
            rows.append(
                [case["shape"], f"{row['context']:,}", row["batch"], cache_name(row), settings(row), *times]
            )
    device = versions.pop("gpu", "unknown GPU")
    columns = [
        "shape",
        "context",
        "batch",
        "cache",
        "settings",
        "step",
        "floor",
        "over floor",
        "products",
        "attention",
        "tokens/s",
    ]
    columns += [column for name in PEERS for column in (name, f"{name} / this")]
    lines = [
        "# Decode steps on a GPU",
        "",
        f"{device}, copy {copy:.2f} TB/s; {time_of(data)}; {', '.join(f'{name} {v}' for name, v in versions.items())}.",
        "",
        "    python benches/peers/decode.py target/release/kv benches/results",
        "",
        "Milliseconds per step of the whole batch.",
        "",
        *table(columns, rows),
    ]
    checks = {}
    for case in cases:
        for name, check in case["dense_beside"].items():
            checks.setdefault(name, []).append(check)
    names = {"torch beside float32": "torch in bf16 against float32"}
    lines += ["Logits of `dense`, same weights, cache and token:", ""]
    lines += table(
        ["against", "least cosine", "same most likely token"],
        [
            [
                names.get(name, name),
                f"{min(c['cosine'] for c in found):.5f}",
                f"{100 * min(c['top1'] for c in found):.0f} %",
            ]
            for name, found in checks.items()
        ],
    )
    return lines + [line for what in missing for line in (f"Missing at {what}", "")]


def prefill(data):
    rows = []
    for case in data["cases"]:
        torch, check = case["torch"], case["dense_beside_torch"]
        # A run that also makes cuDNN plan is no peer.
        warm = torch["first_token_ms"] if torch["warmed"] else None
        for row in case["rows"]:
            prompt = row["prompt"]
            rows.append(
                [
                    case["shape"],
                    f"{row['context']:,}",
                    row["batch"],
                    f"{prompt['chunk']:,}",
                    cache_name(row),
                    settings(row),
                    f"{prompt['first_token_ms']:.0f}",
                    f"{prompt['second_token_ms']:.0f}",
                    f"{warm:.0f}" if warm else "",
                    f"{prompt['first_token_ms'] / warm:.2f}" if warm else "",
                    f"{check['cosine']:.5f}" if row["method"].startswith("dense") else "",
                ]
            )
    columns = [
        "shape",
        "tokens",
        "batch",
        "chunk",
        "cache",
        "settings",
        "first token",
        "second",
        "torch, bf16",
        "this / torch",
        "cosine of the logits",
    ]
    torch = data["cases"][0]["torch"]
    return [
        "# Prompts on a GPU",
        "",
        f"{torch['gpu']}; {time_of(data)}; PyTorch {torch['torch']}.",
        "",
        "    python benches/peers/decode.py target/release/decode_speed benches/results --prefill",
        "",
        "Milliseconds from the prompts of a batch to their first and second tokens.",
        "",
        *table(columns, rows),
    ]


def offload(data):
    rows = []
    for run in data["runs"]:
        for row in run["rows"]:
            rows.append(
                [
                    f"{row['context']:,}",
                    cache_name(row),
                    settings(row),
                    run["hits"] if row["host_bytes"] else "",
                    f"{row['prompt']['second_token_ms']:.0f}" if row["prompt"] else "",
                    f"{row['step_ms']:.2f}",
                    f"{row['floor_ms']:.2f}",
                    f"{row['fetched_bytes'] / 1e6:.0f}",
                    f"{row['device_bytes'] / 1e9:.2f}",
                    f"{row['host_bytes'] / 1e9:.1f}" if row["host_bytes"] else "",
                ]
            )
    commands = [f"    {run['command']}" for run in data["runs"]]
    columns = [
        "tokens",
        "cache",
        "settings",
        "resident",
        "second token, ms",
        "step, ms",
        "floor, ms",
        "MB over the link",
        "GB on the device",
        "GB on the host",
    ]
    return [
        "# Exact rows in host memory",
        "",
        f"{data['device']}; {time_of(data)}; {data['runs'][0]['model']}, bf16, one sequence.",
        "",
        *commands,
        "",
        *table(columns, rows),
    ]


def pqcache(data):
    lines = [
        "# PQCache on the CPU",
        "",
        f"{time_of(data)}.",
        "",
        "    python benches/peers/pqcache.py target/release/kv benches/results [--context 4096] \\",
        "        [--smollm2 MODEL.gguf --text WIKITEXT]",
        "",
    ]
    percent = lambda part: f"{100 * part:.1f} %"
    for study in data["studies"]:
        lines += [f"## {study['name']}", ""]
        for text in study["quality"]:
            rows = []
            for row in text["rows"]:
                code = next((part[5:] for part in row["setting"].split(":") if part.startswith("code=")), "")
                cells = [row["share"], f"{row['name']} {code}".strip(), f"{row['fetched_rows_per_step']:.1f}"]
                cells += [
                    f"{row['bits_per_value']:.2f}",
                    f"{row['kl']:.5f}",
                    f"{row['over_oracle']:.2f}",
                    percent(row["top1"]),
                ]
                rows.append(cells)
            lines += [f"Quality, {text['name']}, {text['context']} tokens:", ""]
            columns = [
                "tokens",
                "method",
                "rows per step and head",
                "bits per value",
                "KL",
                "KL over oracle's",
                "top-1",
            ]
            lines += table(columns, rows)
        lines += [f"Iterations, {study['code']}, {study['context']} tokens:", ""]
        lines += table(
            ["iterations", "KL", "top-1"],
            [[row["iterations"], f"{row['kl']:.5f}", percent(row["top1"])] for row in study["iterations"]],
        )
        lines += [f"Hits, {study['code']}, {study['context']} tokens:", ""]
        lines += table(
            ["cache", "block", "k-cache", "LRU hits", "LFU hits", "LFU: KiB of misses per step", "of blocks"],
            [
                [
                    lru["cache"],
                    lru["block"],
                    lru["k_cache"],
                    *(f"{100 * row['block_hit_rate']:.0f} %" for row in (lru, lfu)),
                    *(
                        f"{lfu[key] / 1024:.0f}"
                        for key in ("fetched_bytes_per_step", "loaded_bytes_per_step")
                    ),
                ]
                for lru, lfu in zip(study["hits"][::2], study["hits"][1::2])
            ],
        )
    return lines


def duration(seconds):
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def bandwidths(rows):
    """Time to first token by bandwidth: a table per shape and number of requests."""
    columns = list(rows[0]["seconds"])
    groups = {}
    for row in rows:
        groups.setdefault((row["shape"], row["requests"]), []).append(row)
    lines = []
    for (shape, requests), group in groups.items():
        lines += [f"### {shape}, {requests} requests" if requests > 1 else f"### {shape}", ""]
        cells = []
        for row in group:
            seconds = row["seconds"]
            best = min(value for column, value in seconds.items() if column not in ("adaptive", "uniform"))
            cells.append(
                [row["tokens"], row["gbps"], *(duration(seconds[column]) for column in columns)]
                + [f"{seconds['adaptive'] / best:.3f}", f"{seconds['8 bits'] / seconds['adaptive']:.1f}x"]
            )
        lines += table(["tokens", "Gbit/s", *columns, "adaptive over the best", "under 8 bits"], cells)
    return lines


def deadlines(rows):
    columns = ["8 bits", "level 0", "level 1", "level 2", "text", "uniform", "adaptive", "oracle"]
    name = lambda row: f"{row['requests']} x {row['tokens']}" if row["requests"] > 1 else row["tokens"]
    runs = [
        [name(row), f"{row['slo']} s", *(f"{100 * row['late'][c]:.1f} %" for c in columns)]
        + [f"{100 * share:.0f} %" for share in row["share"]]
        for row in rows
    ]
    requests = [
        [name(row), f"{row['slo']} s", *(f"{100 * row['requests_late'][c]:.1f} %" for c in columns)]
        for row in rows
        if row["requests"] > 1
    ]
    shares = ["as text", "at level 0", "1", "2"]
    return (
        ["Runs in which a request is late; the last columns are the encodings that `adaptive` chose:", ""]
        + table(["context", "objective", *columns, *shares], runs)
        + ["Late requests of those runs that have several:", ""]
        + table(["context", "objective", *columns], requests)
    )


def loads(run):
    yes = lambda is_so: "yes" if is_so else "no"
    stages, links = [], []
    for row in run["rows"]:
        values = 8 * row["bytes"] / row["bits_per_value"]
        key = [row["tokens"], yes(row["transform"]), f"{row['bits_per_value']:.2f}"]
        stages.append(
            key
            + [
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['copy_ms']:.2f}",
                f"{row['bytes'] / row['copy_ms'] / 1e6:.1f}",
            ]
            + [f"{row['decode_ms']:.2f}", f"{values / row['decode_ms'] / 1e6:.0f}", f"{row['check_ms']:.2f}"]
            + [f"{row['load_ms']:.2f}", f"{row['load_ms'] / row['copy_ms']:.2f}"]
        )
        for link in row["links"]:
            transfer, after, rest = link["transfer_ms"], link["decode_after_ms"], link["rest_ms"]
            times = [f"{time:.2f}" for time in (transfer, after, rest, transfer + after + rest)]
            links.append(key + [f"{link['gbps']:g}", *times, f"{100 * after / transfer:.1f} %"])
    key = ["tokens", "transform", "bits a value"]
    return (
        [
            "## Loading on a GPU",
            "",
            f"{run['on']}, `stream_speed time`: {run['model']}, dense bf16, chunks of {run['chunk']} tokens, ms.",
            "",
        ]
        + table(
            key + ["MB", "copy", "GB/s", "decode", "G values/s", "checksums", "load", "load over the copy"],
            stages,
        )
        + ["Over a link that is shaped in the process, ms:", ""]
        + table(
            key
            + [
                "Gbit/s",
                "transfer",
                "decoding after it",
                "rest",
                "first token",
                "decoding over the transfer",
            ],
            links,
        )
    )


def streaming(data):
    simulated = data["simulated"]
    prefill = ", ".join(
        f"{seconds} s for {tokens}" for tokens, seconds in simulated["prefill_seconds"].items()
    )
    lines = [
        "# Streaming stored contexts",
        "",
        "    python benches/peers/streaming.py target/release/kv benches/results [--smollm2 MODEL.gguf --text WIKITEXT]",
        "",
        "## Simulated: time to first token by bandwidth",
        "",
        f"{time_of(simulated)}. Levels have {', '.join(f'{b:.2f}' for b in data['bits'])} bits a value; {simulated['decode_rate']:.0f} G values are",
        f"decoded per second, a prompt is assumed to take {prefill} tokens of the 8B shape, and a step",
        f"{1000 * simulated['step_seconds']:.0f} ms.",
        "",
        *bandwidths(data["bandwidths"]),
        "## Simulated: missed deadlines, 1,000 random bandwidths of 0.1 to 10 Gbit/s",
        "",
        *deadlines(data["deadlines"]),
        "## Simulated: parts of the time to first token, level 2 of the 8B shape",
        "",
    ]
    parts = []
    for row in data["parts"]:
        after = row["first_token"] - simulated["step_seconds"] - row["transferred"]
        parts.append(
            [sum(row["tokens"]), row["gbps"], duration(row["transferred"]), f"{1000 * after:.1f} ms"]
            + [duration(row["computing"]), f"{100 * after / row['transferred']:.1f} %"]
        )
    lines += table(
        ["tokens", "Gbit/s", "transfer", "decoding after it", "all decoding", "over the transfer"], parts
    )
    lines += [
        "## Prompts out of a store",
        "",
        f"{time_of(data)}; {data['stored'][0]['device']}, 2 cores, tiny-llama-12m.",
        "",
    ]
    columns = list(data["stored"][0]["seconds"])
    lines += table(
        ["tokens", *columns, "recomputed over S3, level 0"],
        [
            [row["tokens"], *(duration(row["seconds"][c]) for c in columns)]
            + [f"{row['seconds']['recomputed'] / row['seconds']['S3, level 0']:.1f}x"]
            for row in data["stored"]
        ],
    )
    places = ("folder", "file", "S3", "object")
    lines += [
        "MB/s of `kv store get` at level 0, which verifies every byte, and of one plain file or object:",
        "",
    ]
    lines += table(
        ["tokens", "bytes", *places],
        [
            [row["stored"], row["bytes"], *(f"{row['megabytes_per_second'][p]:.0f}" for p in places)]
            for row in data["stored"]
        ],
    )
    lines += ["The test `many_clients`:", "", *(f"* {line}" for line in data["load"]), ""]
    lines += ["## Quality of loaded caches", "", f"{time_of(data)}.", ""]
    lines += table(
        ["model", "encodings of the chunks in turn", "KL", "top-1", "perplexity"],
        [
            [
                row["model"],
                row["encoding"],
                f"{row['kl']:.5f}",
                f"{100 * row['top1']:.1f} %",
                f"{row['perplexity']:.3f}",
            ]
            for row in data["quality"]
        ],
    )
    return lines + (loads(data["gpu"]) if data.get("gpu") else [])


def any_text(data):
    lines = [
        "# Texts that the profile has not seen",
        "",
        "    python benches/peers/any_text.py target/release/kv benches/results --wikitext WIKITEXT [--text NAME=FILE]... \\",
        "        [--model NAME=PATH:LENGTHS:DECODE:TRIALS]...",
        "",
        f"Profiles are of the first {data['calibration']:,} tokens of WikiText-2. KL by text; `over own` is the KL over that with a "
        "profile of the text itself, geometric mean and largest of the texts. Bits, top-1 and perplexity over that of the dense "
        "cache are means of the texts, facts found are sums.",
        "",
    ]
    return lines + by_model(data["models"])


def margins(data):
    lines = [
        "# Rivals as published",
        "",
        "    python benches/peers/margins.py target/release/kv benches/results --wikitext WIKITEXT [--text NAME=FILE]... \\",
        "        [--run LENGTH:DECODE:TRIALS]... [--texts N] [--only REGEX]",
        "",
        f"tiny-llama-12m; profiles are of the first {data['calibration']:,} tokens of WikiText-2. Intervals (95 %) are bootstraps over blocks of "
        f"{data['block']} decoded tokens. `over the first` is the paired difference of KL from the first method of the table. `rows` counts the "
        "exact rows that a step reads for one head, without sinks and window, as the mean of all layers. `KiB` and `to choose` are of a step over "
        "all heads and layers: the bytes of these rows, and the bytes that are read to choose them.",
        "",
    ]
    runs, columns = data["runs"], ["method", "bits", "rows", "KiB", "to choose", "KL", "95 %", "over the first", "95 %", "top-1"]
    for length in sorted({row["length"] for row in data["rows"]}):
        of = [run for run in runs if run["length"] == length]
        commits = sorted({row["commit"] for run in of for row in run["methods"].values()})
        texts = ", ".join(f"{run['text']} ({run['decode']} decoded)" for run in of)
        lines += [f"## {length:,} tokens", "", f"{texts}; {of[-1]['date']}, commit {', '.join(commits)}.", ""]
        rows = [row for row in data["rows"] if row["length"] == length]
        for family in dict.fromkeys(row["family"] for row in rows):
            lines += [f"### {family}", ""]
            lines += table([*columns, "pass keys", "lines"], [margin(row) for row in rows if row["family"] == family])
    return lines


def margin(row):
    span = lambda of, sign: f"{of[0]:{sign}.4f} to {of[1]:{sign}.4f}"
    kib = lambda key: f"{row[key] / 1024:.0f}" if row[key] else ""
    difference = ["", ""]
    if row["difference"] is not None:
        difference = [f"{row['difference']:+.4f}", span(row["difference_interval"], "+")]
    return [
        f"`{row['method']}`",
        f"{row['bits']:.2f}",
        f"{row['rows']:.0f}" if row["rows"] else "",
        kib("read_bytes"),
        kib("scored_bytes"),
        f"{row['kl']:.4f}",
        span(row["kl_interval"], ""),
        *difference,
        f"{100 * row['top1']:.1f} %",
        *("{}/{}".format(*row[key]) if row[key][1] else "" for key in ("needle", "recall")),
    ]


def llama_perplexity(data):
    lines = [
        "# Beside llama.cpp on the same windows",
        "",
        "    python benches/peers/llama_perplexity.py target/release/kv build/bin/llama-perplexity benches/results NAME=MODEL.gguf \\",
        "        --profile PROFILE --text NAME=FILE... [--windows 2] [--device cuda]",
        "",
        "Windows of 2,048 tokens, all of which come from the cache; profiles of `kv` are of the first 4,096 tokens of WikiText-2. KL from the",
        "same engine's cache in half precision over the second half of each window, by text, as the mean of its windows. Bits of `kv` are all that",
        "it keeps of a window, exact first and last tokens included; those of llama.cpp are of its formats.",
        "",
    ]
    for name, model in data["models"].items():
        windows = model["windows"]
        of_text = {text: [w for w in windows if w["text"] == text] for text in dict.fromkeys(w["text"] for w in windows)}
        mean = lambda among, i, what: sum(w["caches"][i][what] for w in among) / len(among)
        lines += [f"## {name}", "", f"{time_of(model)}; `kv` on {model['device']}; {', '.join(f'{text} ({len(of)})' for text, of in of_text.items())}.", ""]
        cells = [
            [cache["engine"], f"`{cache['cache']}`", f"{mean(windows, i, 'bits'):.2f}"]
            + [f"{mean(of, i, 'kl'):.5f}" for of in of_text.values()]
            + [f"{mean(windows, i, 'kl'):.5f}"]
            for i, cache in enumerate(windows[0]["caches"])
        ]
        lines += [*table(["engine", "cache", "bits", *of_text, "all"], cells), ""]
    return lines


def models_device(data):
    lines = [
        "# Time and quality of one configuration",
        "",
        "    python benches/peers/models_device.py target/release/kv target/release/decode_speed benches/results NAME=PATH \\",
        "        --profile PROFILE --text NAME=FILE [--lengths 2048+8192] [--cpu]",
        "",
        "One sequence on a GPU. Milliseconds per step and to the first token of a prompt. `hits` is the measured share of selected",
        "rows that the device has already; the time in brackets is that of a step without any. `KL, CPU` is that of the same",
        "method on a CPU.",
        "",
    ]
    for name, model in data["models"].items():
        for run in sorted(model["runs"], key=lambda run: run["length"]):
            lines += [f"## {name}, {run['text']}, {run['length']:,} tokens, {run['decode']} decoded", ""]
            lines += [f"{model['gpu']}, copy {run['copy_bytes_per_second'] / 1e12:.2f} TB/s; {time_of(model)}.", ""]
            lines += time_and_quality(run["rows"])
    return lines


def time_and_quality(rows):
    found = lambda at: f"{sum(part['hits'] for part in at)}/{sum(part['trials'] for part in at)}" if at else ""
    dense, cells = rows[0], []
    for row in rows:
        times, without = row["times"], row.get("step_ms_without_hits")
        cells.append(
            [
                f"`{row['name']}`",
                row["setting"].replace(":", " "),
                f"{row['bits_per_value']:.2f}",
                f"{row['kl']:.5f}",
                f"{row['cpu_kl']:.5f}" if "cpu_kl" in row else "",
                f"{100 * row['top1']:.1f} %",
                f"{row['perplexity'] / dense['perplexity']:.3f}",
                found(row["needle"]),
                found(row["recall"]),
                f"{100 * row['hits']:.0f} %" if "hits" in row else "",
                f"{times['step_ms']:.2f}" + (f" ({without:.2f})" if without else ""),
                f"{times['step_ms'] / times['floor_ms']:.2f}",
                f"{times['step_ms'] / dense['times']['step_ms']:.2f}",
                f"{times['prompt']['first_token_ms']:.0f}",
                f"{times['device_bytes'] / 1e6:.0f}",
                f"{times['host_bytes'] / 1e6:.0f}",
            ]
        )
    columns = ["method", "setting", "bits", "KL", "KL, CPU", "top-1", "perplexity", "pass keys", "lines", "hits"]
    columns += ["step", "over floor", "over dense", "first token", "MB device", "MB host"]
    return table(columns, cells)


def by_model(models):
    """The tables of each model and length."""
    lines = []
    for name, model in models.items():
        for length in sorted({run["length"] for run in model["runs"]}):
            runs = [run for run in model["runs"] if run["length"] == length]
            title = f"{name}, {length:,} tokens, {model['decode']} decoded"
            later = {row["method"]: row["commit"] for row in runs[0]["rows"] if "commit" in row}
            changed = "".join(f"; `{method}`: {commit}" for method, commit in later.items())
            lines += [f"## {title}", "", f"{time_of(model)}{changed}.", "", *texts_of(runs)]
    return lines


def texts_of(runs):
    """The table of one model at one length."""
    geometric = lambda ratios: math.exp(sum(map(math.log, ratios)) / len(ratios))
    share = lambda facts: f"{sum(hits for hits, _ in facts)}/{sum(n for _, n in facts)}" if any(n for _, n in facts) else ""
    rows = []
    for group in zip(*(run["rows"] for run in runs)):
        mean = lambda key: sum(row[key] for row in group) / len(group)
        over = [row["kl"] / row["own_kl"] for row in group if row["own_kl"]]
        perplexities = [row["perplexity"] / run["rows"][0]["perplexity"] for run, row in zip(runs, group)]
        rows.append(
            [
                f"`{group[0]['method']}`",
                f"{mean('bits'):.2f}",
                f"{mean('bytes_per_token'):.0f}",
                *(f"{row['kl']:.4f}" for row in group),
                f"{geometric(over):.2f}, {max(over):.2f}" if over else "",
                f"{100 * mean('top1'):.1f} %",
                f"{geometric(perplexities):.3f}",
                share([row["needle"] for row in group]),
                share([row["recall"] for row in group]),
            ]
        )
    columns = ["method", "bits", "bytes/token", *(run["text"] for run in runs), "over own", "top-1", "perplexity", "pass keys", "lines"]
    return table(columns, rows)


def sq(data):
    lines = [
        "# Attention on scalar codes, on a CPU",
        "",
        f"{data['cpu']}, one thread; {data['date']}, commit {data['commit']}; medians of {data['rounds']} rounds. Made by",
        "",
        "    cargo build --release -p kv-benches --bin sq_speed && python benches/peers/sq.py target/release/sq_speed benches/results",
        "",
        "Nanoseconds a token of one KV head, for all query heads of its group, by bits a component. PQ codes are (dim / 2, 8):",
        "4 bits; `pqklt` adds the scores of the keys' mean and norms to them, as the method does. Scalar codes have their",
        "transforms of queries and the same mean in these times, in blocks of 64 and 256 tokens. In brackets: the time of",
        "`pqklt` over it, and at the end the time in which the same thread reads the bytes of 2 bits.",
        "",
    ]
    key = lambda row: (row["path"], row["dim"], row["tokens"], row["group"])
    times = {(key(row), row["codes"], row["bits"], row["block"]): row["ns_per_token"] for row in data["rows"]}
    codes = [(bits, block) for bits in (4, 3, 2) for block in (64, 256)]
    for path in dict.fromkeys(row["path"] for row in data["rows"] if row["codes"] == "pq"):
        columns = ["head", "tokens", "group", "PQ", "`pqklt`"]
        columns += [f"{bits} bits, {block}" for bits, block in codes] + ["reading"]
        rows = []
        for case in dict.fromkeys(key(row) for row in data["rows"] if row["path"] == path):
            pqklt = times[case, "pq, mean", 4, 0]
            cells = [times[case, "sq", *code] for code in codes]
            read = times[("read", *case[1:3], 1), "sq", 2, 256]
            rows.append(
                [
                    *case[1:],
                    f"{times[case, 'pq', 4, 0]:.1f}",
                    f"{pqklt:.1f}",
                    *(f"{ns:.1f} ({pqklt / ns:.1f})" for ns in cells),
                    f"{read:.1f}",
                ]
            )
        lines += [f"## {path}", "", *table(columns, rows)]
    return lines


def storage(data):
    lines = [
        "# Stored caches",
        "",
        f"{data['cpu']}; {data['date']}, commit {data['commit']}. `kv compare`: a prompt through the store, then",
        "tokens decoded over it.",
        "",
    ]
    for part in data["quality"]:
        rows = [
            [
                row["name"],
                row["setting"].replace(":window=0", "").replace(":", " "),
                f"{row['bits_per_value']:.3f}",
                f"{16 / row['bits_per_value']:.1f}",
                f"{row['kl']:.5f}",
                f"{100 * row['top1']:.1f} %",
                f"{row['perplexity']:.3f}",
                f"{row['shared_bytes'] / 2**20:.1f}" if row["shared_bytes"] else "",
            ]
            for row in part["rows"]
        ]
        lines += [f"## {part['model']}, {part['text']}: {part['context']} tokens, {part['decode']} decoded", ""]
        columns = ["method", "setting", "bits", "times smaller", "KL", "top-1", "perplexity", "profile, MiB"]
        lines += table(columns, rows)
    if data["speed"]:
        rows = [
            [row["element"], row["coder"], f"{row['bits']:.2f}", f"{row['encode']:.0f}", f"{row['decode']:.0f}"]
            for row in data["speed"]
        ]
        lines += ["## Without loss: one thread, million elements a second", ""]
        lines += table(["elements", "coder", "bits", "encode", "decode"], rows)
    return lines


def joint(data):
    lines = ["# One transform for many heads", ""]
    for name, model in data["models"].items():
        lines += [
            f"{model['cpu']}; {model['date']}, commit {model['commit']}. A profile of {data['calibration']} tokens of WikiText-2; prompts",
            f"of {model['length']} tokens, {model['decode']} decoded over what comes back.",
            "",
        ]
        for run in model["runs"]:
            ratios = list(run["curves"][0]["at"])
            rows = [
                [curve["over"], curve["share"], *(f"{kl:.4f}" if kl else "" for kl in curve["at"].values())]
                for curve in run["curves"]
            ]
            lines += [f"## {name}, {run['text']}: KL at equal sizes", ""]
            lines += table(["over", "bits shared by", *(f"{ratio}x" for ratio in ratios)], rows)
            rows = [
                [
                    curve["over"],
                    curve["share"],
                    f"{rate['bits']:.3f}",
                    f"{16 / rate['bits']:.1f}",
                    f"{rate['kl']:.5f}",
                    f"{rate['kl_error']:.5f}",
                    f"{100 * rate['top1']:.1f} %",
                    f"{rate['profile_bytes'] / 2**20:.1f}",
                ]
                for curve in run["curves"]
                for rate in curve["rates"]
            ]
            columns = ["over", "bits shared by", "bits", "times smaller", "KL", "its error", "top-1", "profile, MiB"]
            lines += table(columns, rows)
    return lines


def storage_doors(data):
    rows = [
        [
            row["adapter"],
            row["setting"],
            str(row["threads"] or ""),
            f"{row['share']:.3f}",
            f"{row['key_error']:.4f}" if row["key_error"] else "0",
            f"{row['value_error']:.4f}" if row["value_error"] else "0",
            f"{row['store_gb_s']:.2f}",
            f"{row['load_gb_s']:.2f}",
        ]
        for row in data["rows"]
    ]
    columns = ["adapter", "setting", "threads", "bytes of raw", "keys' error", "values' error", "store, GB/s", "load, GB/s"]
    return [
        "# Tiers below LMCache",
        "",
        f"{data['cpu']}; {data['date']}, commit {data['commit']}. {data['chunks']} chunks of {data['chunk_bytes']} B through",
        "LMCache's storage manager, in a folder in memory. Errors are relative to the norm of the rows.",
        "",
        *table(columns, rows),
    ]


def gpus(data):
    """Steps of ranks over those of one GPU and of the torch loop, and rows that they read over their links."""
    ranks, versions = data["ranks"], data["versions"]
    lines = [
        "# Decode steps on several GPUs",
        "",
        ", ".join([f"{ranks} x {versions.get('gpu', 'GPU')}; {time_of(data)}", f"torch {versions.get('torch', 'none')}."]),
        "",
        f"    python benches/peers/gpus.py target/release/decode_speed benches/results --ranks {ranks}",
        "",
        "Milliseconds per step of the whole batch. `products` are those with weights and the exchanges between ranks.",
        "",
    ]
    rows, fetched, missing = [], [], []
    for case in data["cases"]:
        one = {row["method"]: row for row in case["rows"] if row["ranks"] == 1 and "step_ms" in row}
        where = f"{case['shape']}, {case['context']:,} x {case['batch']}"
        missing += [f"{where}, torch: {case['torch']['missing']}"] if "missing" in case["torch"] else []
        for row in case["rows"]:
            if "missing" in row:
                missing.append(f"{where}, {row['method']}, {row['ranks']} ranks: {row['missing']}")
                continue
            step, torch = row["step_ms"], case["torch"].get("step_ms") if row["ranks"] > 1 else None
            before = one.get(row["method"]) if row["ranks"] > 1 else None
            cells = [case["shape"], f"{case['context']:,}", case["batch"], f"`{row['method'].split(':')[0]}`", row["ranks"]]
            if row["fetched_rows"]:
                fetched.append(cells + rows_of_links(row, before))
            cells += [f"{step:.2f}", f"{step / row['floor_ms']:.2f}", f"{row['products_ms']:.2f}", f"{row['attention_ms']:.2f}"]
            cells += [f"{before['step_ms'] / step:.2f}" if before else ""]
            cells += [f"{torch:.2f}" if torch else "", f"{torch / step:.2f}" if torch else ""]
            rows.append(cells)
    columns = ["shape", "context", "batch", "cache", "ranks"]
    timed = ["step", "over floor", "products", "attention", "one rank / this", "torch", "torch / this"]
    lines += table([*columns, *timed], rows)
    if fetched:
        lines += ["Rows (a token's key and value of one head) that steps read from memory of the host, over all links.", ""]
        lines += table([*columns, "rows a step", "million rows a second", "GB a second", "this / one rank", "GiB of a rank's caches"], fetched)
    return lines + [f"* {what}" for what in missing]


def rows_of_links(row, one):
    """The rows that all ranks read, of which a row of results has those of one."""
    rate = lambda row: row["ranks"] * row["fetched_rows"] / row["step_ms"]
    gigabytes = row["ranks"] * row["fetched_bytes"] / row["step_ms"] / 1e6
    cells = [f"{row['ranks'] * row['fetched_rows']:,.0f}", f"{rate(row) / 1e3:.1f}", f"{gigabytes:.1f}"]
    return cells + [f"{rate(row) / rate(one):.2f}" if one else "", f"{row['device_bytes'] / 2**30:.1f}"]


# ZACK's requests a second over those of its baseline at the same latency, over all models (figure 15).
PAPER = {"imdb": "1.69 to 2.17", "arxiv": "1.59 to 2.08", "cocktail": "1.52 to 1.98", "humaneval": "1.65 to 2.24"}


def serving(data):
    """Latency against requests a second, and the requests a second at the same latency."""
    ms = lambda summary, part="mean": f"{1e3 * summary[part]:.1f}" if summary else ""
    lines = [
        "# Requests that arrive at random",
        "",
        f"{data['device']}; {time_of(data)}; shape of {data['model']}, {data['memory']} for the cache of each method, {data['chunk']:,} prompt tokens between two steps.",
        "",
        "    python benches/peers/serving.py target/release/serve_speed benches/results",
        "",
        "Answers of the shipped model, 24 requests at once, next to those of each request alone:",
        "",
    ]
    rows, missing = [], []
    for row in data["checks"]:
        name = f"`{row['method']}`"
        if "missing" in row:
            missing.append(f"shipped model, {name}: {row['missing']}")
            continue
        rows.append([name, row["answers"], f"{100 * row['share']:.0f} %", row["early"], row["largest_batch"], row["put_back"]])
    lines += table(["cache", "answers", "tokens alike", "differ within 8", "batch", "put back"], rows)
    rows = []
    for trace in data["traces"]:
        base = trace["methods"][0].get("capacity")
        for method in trace["methods"]:
            name = f"`{method['method']}`"
            if "missing" in method:
                missing.append(f"{trace['trace']}, {name}: {method['missing']}")
                continue
            first, over = method["rows"][0], method["capacity"] / base if base else None
            cells = [trace["trace"], name, first["places"], f"{first['pool']:,}" if first["pool"] else ""]
            cells += [max(row["largest_batch"] for row in method["rows"]), f"{1e3 * method['unloaded']:.1f}"]
            cells += [("at least " if method["is_least"] else "") + f"{method['capacity']:.2f}", f"{over:.2f}" if over else ""]
            rows.append(cells + [PAPER[trace["trace"]] if method["method"].startswith("zack") else ""])
    columns = ["trace", "cache", "places", "tokens of the pool", "largest batch", "unloaded, ms/token", "requests/s"]
    lines += ["Requests a second at twice the first cache's unloaded latency. A cache without pages has memory for the longest"]
    lines += ["request in every place.", ""]
    lines += table([*columns, "over the first", "the paper's"], rows)
    for trace in data["traces"]:
        rows = []
        for row in (row for method in trace["methods"] for row in method.get("rows", [])):
            cells = [cache_name(row), "alone" if row["rate"] is None else row["rate"], f"{row['whole']} / {row['came']}"]
            cells += [ms(row["normalized"], part) for part in ("mean", "p50", "p99")]
            cells += [ms(row["first_token"]), ms(row["first_token"], "p99"), ms(row["between_tokens"])]
            cells += [f"{row['tokens_per_second']:.0f}", row["largest_batch"], row["put_back"]]
            rows.append(cells)
        columns = ["cache", "requests/s", "answers", "ms/token", "p50", "p99", "first token, ms", "p99", "between tokens"]
        lines += [f"## {trace['trace']}", "", *table([*columns, "tokens/s", "batch", "put back"], rows)]
    return lines + [f"* {what}" for what in missing]


def serve_load(data):
    """What the clients of a server have found."""
    ms = lambda summary, part: f"{1e3 * summary[part]:.1f}" if summary else ""
    before, after = data["resident_bytes"]
    rows = [
        ["requests", ", ".join(f"{what} {count:,}" for what, count in sorted(data["requests"].items()))],
        ["put back", data["put_back"]],
        ["ms per token: mean, p50, p99", ", ".join(ms(data["normalized"], part) for part in ("mean", "p50", "p99"))],
        ["ms to the first token: mean, p50, p99", ", ".join(ms(data["first_token"], part) for part in ("mean", "p50", "p99"))],
        ["resident memory, MiB: after the warm-up, at the end", f"{before / 2**20:.1f}, {after / 2**20:.1f}"],
        ["failures", "; ".join(data["failures"]) or "none"],
    ]
    return [
        "# Clients that leave",
        "",
        f"{data['device']}; {time_of(data)}; {data['clients']} clients, {data['rate']:g} requests/s, {data['seconds']:g} s.",
        "",
        f"    python benches/peers/serve_load.py target/release/kv benches/results -- {' '.join(data['options'])}",
        "",
        *table(["what", "found"], rows),
    ]


PAGES = {
    "gpus": gpus,
    "gpus-4": gpus,
    "gpus-8": gpus,
    "serving": serving,
    "serve-load": serve_load,
    "gpu": gpu,
    "gpu-scalar": gpu,
    "gpu-mean-errors": gpu,
    "decode": decode,
    "decode-batches": decode,
    "prefill": prefill,
    "prefill-batches": prefill,
    "offload": offload,
    "pqcache": pqcache,
    "any-text": any_text,
    "margins": margins,
    "llama-perplexity": llama_perplexity,
    "models-device": models_device,
    "streaming": streaming,
    "sq": sq,
    "joint": joint,
    "storage": storage,
    "storage_doors": storage_doors,
}
