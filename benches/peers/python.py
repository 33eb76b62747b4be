#!/usr/bin/env python3
"""Caches of transformers on a CPU, one thread: python.{json,md}.

    PROFILE=release .ci/adapters transformers    # installs kvcodes, torch and transformers into target/adapters-venv
    target/adapters-venv/bin/pip install --no-deps optimum-quanto hqq ninja accelerate einops termcolor psutil
    target/adapters-venv/bin/python benches/peers/python.py benches/results [--model NAME=PATH:PROMPT:STEPS]...

Each cache gets a prompt of the held-out speeches (2,048 tokens for the shipped model), then further tokens
(192) one by one, teacher-forced. KL and top-1 compare each step with `DynamicCache`. Bits are those of all
tensors that the cache holds in the end, exact ones included, per element. A step is timed in turn with the
same step of the other caches, as CPU time of the process; the ratio to `DynamicCache` is the median over
steps. Codes are calibrated on other texts (reference/assets/calibration, 4,096 tokens).

Before it measures, the script asserts that codes with a window that holds all tokens give the logits of
`DynamicCache`.
"""

import argparse, os, statistics, time

os.environ["RAYON_NUM_THREADS"] = "1"  # before kvcodes starts its threads

import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

import tables
from kvcodes.transformers import CodesCache, calibrate

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
ASSETS = os.path.join(ROOT, "reference/assets")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def load(path):
    folder, file = os.path.split(path) if path.endswith(".gguf") else (path, None)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def caches(model, calibration):
    """Functions that make an empty cache, by name and setting."""
    codes = lambda *args, **settings: lambda: CodesCache(model, calibration, *args, **settings)
    peer = lambda backend, **settings: lambda: QuantizedCache(backend, model.config, **settings)
    return {
        ("DynamicCache", "f32"): lambda: DynamicCache(config=model.config),
        ("QuantizedCache", "quanto, 4 bits"): peer("quanto", nbits=4),
        ("QuantizedCache", "hqq, 4 bits"): peer("hqq", nbits=4, axis_key=1, axis_value=1),
        ("QuantizedCache", "fp8"): peer("fp8"),
        ("CodesCache", "sq, 4 bits"): codes("sq", key_bits=4.0, value_bits=4),
        ("CodesCache", "sq, 3 bits"): codes("sq"),
        ("CodesCache", "sq, 2 bits"): codes("sq", key_bits=2.0, value_bits=2),
        ("CodesCache", "million, 8 bits for two"): codes("million"),
    }


def nbytes(item, seen):
    """Bytes of the tensors that an object holds, each once."""
    if id(item) in seen:
        return 0
    seen.add(id(item))
    if isinstance(item, torch.Tensor):
        if type(item) is not torch.Tensor and hasattr(item, "__tensor_flatten__"):
            return sum(nbytes(getattr(item, name), seen) for name in item.__tensor_flatten__()[0])
        return item.untyped_storage().nbytes()
    if isinstance(item, dict):
        return sum(nbytes(value, seen) for value in item.values())
    if isinstance(item, (list, tuple)):
        return sum(nbytes(value, seen) for value in item)
    return 0


def bits(cache, model, tokens):
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * tokens
    seen = set()
    held = (
        cache.nbytes
        if isinstance(cache, CodesCache)
        else sum(nbytes(vars(layer), seen) for layer in cache.layers)
    )
    return 8 * held / elements


def check(model, calibration, ids):
    exact, codes = DynamicCache(config=model.config), CodesCache(model, calibration, recent=1024)
    for cache in (exact, codes):
        model(ids[:, :256], cache=cache)
    a, b = (model(ids[:, 256:257], cache=cache).logits for cache in (exact, codes))
    assert (a - b).abs().max() < 1e-3 * a.abs().max(), "codes with a window of all tokens"


def measure(name, path, prompt, steps, text):
    model, tokenizer = load(path)
    calibration_texts = sorted(os.listdir(os.path.join(ASSETS, "calibration")))
    calibration_texts = [
        read(os.path.join(ASSETS, "calibration", file)) for file in calibration_texts if file.endswith(".txt")
    ]
    start = time.process_time()
    calibration = calibrate(model, tokenizer(calibration_texts).input_ids, methods=("sq", "million"))
    seconds = time.process_time() - start
    ids = torch.tensor([tokenizer(read(text)).input_ids[: prompt + steps]])
    assert ids.shape[1] == prompt + steps
    check(model, calibration, ids)
    made = caches(model, calibration)
    held = {key: make() for key, make in made.items()}
    for cache in held.values():
        model(ids[:, :prompt], cache=cache)
    times, logits = {key: [] for key in held}, {key: [] for key in held}
    for t in range(prompt, prompt + steps):
        for key, cache in held.items():
            start = time.process_time()
            step = model(ids[:, t : t + 1], cache=cache).logits[0, 0]
            times[key].append(time.process_time() - start)
            logits[key].append(step.double().log_softmax(-1))
    first, rows = next(iter(held)), []
    exact = torch.stack(logits[first])
    for key, cache in held.items():
        got = torch.stack(logits[key])
        kl = (exact.exp() * (exact - got)).sum(-1).mean().item()
        top1 = (exact.argmax(-1) == got.argmax(-1)).double().mean().item()
        ratio = statistics.median(a / b for a, b in zip(times[key], times[first]))
        milliseconds = 1e3 * statistics.median(times[key])
        rows.append((*key, bits(cache, model, prompt + steps), max(kl, 0.0), top1, milliseconds, ratio))
    lines = [f"## {name}", "", f"A prompt of {prompt:,} tokens, {steps} decoded.", ""]
    lines += [f"Calibration on 4,096 tokens, both methods: {seconds:.0f} s of CPU time.", ""]
    lines += [
        "| cache | setting | bits/element | KL | top-1 | ms/token | of DynamicCache |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {a} | {b} | {c:.2f} | {d:.5f} | {e:.3f} | {f:.2f} | {g:.2f} |" for a, b, c, d, e, f, g in rows
    ]
    return lines + [""]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", help="a folder")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=PATH:PROMPT:STEPS")
    parser.add_argument("--text", default=os.path.join(ASSETS, "sotu-heldout.txt"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    lines = [
        "# Caches of transformers on a CPU",
        "",
        f"Commit {tables.commit()}, {tables.today()}, {tables.cpu()}, one thread, f32, {versions}, "
        f"`{os.path.basename(args.text)}`. `benches/peers/python.py`.",
        "",
    ]
    lines += measure("tiny-llama-12m", os.path.join(ASSETS, "tiny-llama-12m"), 2048, 192, args.text)
    for name, given in (model.split("=", 1) for model in args.model):
        path, prompt, steps = given.rsplit(":", 2)
        lines += measure(name, path, int(prompt), int(steps), args.text)
    tables.write_printed(os.path.join(args.results, "python.json"), lines)


if __name__ == "__main__":
    main()
