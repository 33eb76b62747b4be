#!/usr/bin/env python3
"""Decode steps and prompts of `decode_speed` against other loops on one GPU: decode.{json,md}, prefill.{json,md}.

    cargo build --release -p kv-benches --bin decode_speed
    pip install torch flashinfer-python transformers
    python benches/peers/decode.py target/release/decode_speed benches/results
    python benches/peers/decode.py target/release/decode_speed benches/results --prefill

All have the same weights and the same cache: hashes of their index (gpu/src/kernels/random.cuh), so nothing is stored.
Their logits after token 1 check those of `decode_speed`. All run in one call, one after the other; a peer that cannot run, because it is not
installed or out of memory, is reported as missing.

torch         a plain loop with a static cache in bf16, one CUDA graph a step, compiled norms, RoPE and SwiGLU, and cuDNN's attention;
              a step's time is the median of 15 replays
flashinfer    the same loop over FlashInfer's attention, with keys and values in fp8 (e4m3) in pages of 64 tokens
transformers  `generate` with a static cache, which it compiles: the time of 65 tokens less that of one, of which it makes 64 steps; it
              fills its own cache, from tokens 7919 i mod vocabulary, so its logits are not compared
float32       the torch loop with activations, keys and values in single precision, which is not timed: its logits show which of the
              two bf16 loops rounds less

The prompt of sequence s is token 7919 i + s mod vocabulary for each i; torch runs all prompts of a batch at once, with cuDNN's causal
attention, and keeps their keys and values.
"""

import argparse, json, math, os, subprocess, sys, tempfile, time

import pages, tables

# hidden, intermediate, layers, query heads, key/value heads, vocabulary, RoPE base, Llama 3's scaling
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 10000.0, False),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, 500000.0, True),
}
# shape, context, batch
CASES = [
    ("llama-3.1-8b", 8192, 1),
    ("llama-2-7b", 32768, 1),
    ("llama-2-7b", 32768, 6),
    ("llama-3.1-8b", 131072, 1),
    ("llama-3.1-8b", 131072, 6),
    ("llama-3.1-8b", 2048, 64),
    ("llama-3.1-8b", 2048, 128),
    ("llama-3.1-8b", 2048, 256),
]
# shape, tokens of a prompt, tokens of a chunk, batch
PREFILL_CASES = [
    ("llama-3.1-8b", 8192, 8192, 1),
    ("llama-3.1-8b", 32768, 8192, 1),
    ("llama-3.1-8b", 131072, 8192, 1),
    ("llama-3.1-8b", 32, 8192, 8),
    ("llama-3.1-8b", 128, 8192, 8),
    ("llama-3.1-8b", 512, 8192, 8),
    ("llama-3.1-8b", 1000, 8192, 8),
]
METHODS = "dense:dtype=bf16,million:exact=bf16,sq:exact=bf16,hybrid:exact=bf16:rows-on=device"
# Prompts also fill caches that keep exact rows of all tokens on the host.
PREFILL_METHODS = METHODS + ",hybrid:exact=bf16,pqcache:tokens=2048:exact=bf16"
# Of many sequences, exact rows next to codes leave no room.
SMALL_METHODS = "dense:dtype=bf16,million:exact=bf16,sq:exact=bf16"
PEERS = pages.PEERS
# transformers is another engine's loop, not another cache, and float32 is not a competitor: one case is enough for them.
ONE_CASE = ("transformers", "float32")
PAGE = 64
AMPLITUDE, ROWS = 0.034641016, 1 << 16


def peer(shape, context, batch, capacity, logits_file, kind="torch"):
    """Times a loop, or a prompt, and writes the logits of its first step. Prints one line of JSON."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from torch_loop import act, graph_of, milliseconds, norm, rope

    hidden, inner, layers, heads, kv_heads, vocab, base, scaled = SHAPES[shape]
    device, mask = "cuda", 0xFFFFFFFF
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    prefill, paged = kind == "prefill", kind == "flashinfer"
    versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}

    def mix(x):
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D & mask
        x = x ^ (x >> 15)
        x = x * 0x846CA68B & mask
        return x ^ (x >> 16)

    def hashed(tensor, *sizes, amplitude=AMPLITUDE):
        n, seed = math.prod(sizes), int(mix(torch.tensor(tensor)))
        out = torch.empty(n, device=device, dtype=dtype)
        for at in range(0, n, 1 << 25):
            i = torch.arange(at, min(n, at + (1 << 25)), device=device)
            # Both steps in single precision, as on the other side.
            unit = (mix((i & mask) ^ seed) >> 8).to(torch.float32) * 2.0**-23 - 1
            out[at : at + len(i)] = (unit * torch.tensor(amplitude, dtype=torch.float32)).bfloat16()
        return out.view(*sizes)

    rows = (heads + 2 * kv_heads) * 128
    weights = [
        (
            hashed(2 + 4 * l, rows, hidden),
            hashed(3 + 4 * l, hidden, heads * 128),
            hashed(4 + 4 * l, 2 * inner, hidden),
            hashed(5 + 4 * l, hidden, inner),
        )
        for l in range(layers)
    ]
    embedding, output = hashed(0, vocab, hidden), hashed(1, vocab, hidden)
    if kind == "transformers":
        return print(json.dumps(generate(shape, context, weights, embedding, output) | versions))
    cached = 0 if prefill else context
    side = lambda tensor: hashed(ROWS + tensor, batch, kv_heads, capacity, 128, amplitude=math.sqrt(3))[
        :, :, :cached
    ].contiguous()
    if paged:
        import flashinfer

        pages = context // PAGE
        counts = dict(dtype=torch.int32, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=device),
            "HND",
            use_tensor_cores=True,
            backend="fa2",
        )
        wrapper.plan(
            torch.arange(0, batch + 1, **counts) * pages,
            torch.arange(0, batch * pages, **counts),
            torch.full((batch,), PAGE, **counts),
            heads,
            kv_heads,
            128,
            PAGE,
            q_data_type=dtype,
            kv_data_type=torch.float8_e4m3fn,
        )
        in_pages = lambda rows: (
            rows.view(batch, kv_heads, pages, PAGE, 128).transpose(1, 2).to(torch.float8_e4m3fn)
        )
        cache = [torch.stack((in_pages(side(2 * l)), in_pages(side(2 * l + 1))), 2) for l in range(layers)]
        versions["flashinfer"] = flashinfer.__version__
    else:
        cache = [(side(2 * l), side(2 * l + 1)) for l in range(layers)]

    def attend(queries, keys, values, own):
        """Attention of a layer after a step's keys and values have been appended."""
        if paged:
            own[:, -1, 0, :, -1], own[:, -1, 1, :, -1] = keys.to(own.dtype), values.to(own.dtype)
            return wrapper.run(queries.contiguous(), own.flatten(0, 1))
        k, v = own
        k[:, :, -1], v[:, :, -1] = keys, values
        return F.scaled_dot_product_attention(queries.unsqueeze(2), k, v, enable_gqa=heads != kv_heads)

    frequency = base ** (-torch.arange(64, dtype=torch.float64) / 64)
    if scaled:  # factor 8, low 1, high 4, 8,192 positions before
        turns = 8192 * frequency / (2 * math.pi)
        kept = ((turns - 1) / 3).clamp(0, 1)
        frequency = frequency * kept + frequency / 8 * (1 - kept)
    position = torch.arange(context, dtype=torch.float64)[:, None, None] if prefill else context - 1
    angle = position * frequency
    cos, sin = angle.cos().float().to(device), angle.sin().float().to(device)
    token = torch.ones(batch, dtype=torch.long, device=device)
    logits = torch.empty(batch, vocab, device=device, dtype=dtype)

    def step():
        x = embedding[token]
        for (qkv_weight, o, gate_up, down), own in zip(weights, cache):
            qkv = F.linear(norm(x), qkv_weight).view(batch, heads + 2 * kv_heads, 128)
            qk = rope(qkv[:, : heads + kv_heads], cos, sin)
            a = attend(qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :], own)
            x = x + F.linear(a.reshape(batch, heads * 128), o)
            x = x + F.linear(act(F.linear(norm(x), gate_up)), down)
        logits.copy_(F.linear(norm(x), output))
        token.copy_(logits.argmax(-1))

    def prompt(tokens):
        x, kept, n = embedding[tokens], [], tokens.shape[1]
        for qkv_weight, o, gate_up, down in weights:
            qkv = F.linear(norm(x), qkv_weight).view(batch, n, heads + 2 * kv_heads, 128)
            qk = rope(qkv[:, :, : heads + kv_heads], cos[:n], sin[:n])
            q, k, v = (
                t.transpose(1, 2) for t in (qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, heads + kv_heads :])
            )
            kept.append((k.contiguous(), v.contiguous()))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            x = x + F.linear(a.transpose(1, 2).reshape(batch, n, heads * 128), o)
            x = x + F.linear(act(F.linear(norm(x), gate_up)), down)
        return F.linear(norm(x[:, -1]), output)

    if prefill:
        firsts = torch.arange(batch, device=device)[:, None]
        tokens = (torch.arange(context, device=device) * 7919 + firsts) % vocab
        with torch.no_grad(), sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            # The second length makes torch compile for all lengths; the last one makes cuDNN plan.
            for n in (min(1024, context // 2), min(2048, context - 1), context):
                prompt(tokens[:, :n])
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                out = prompt(tokens)
                out.argmax(-1).tolist()
                times.append(1e3 * (time.perf_counter() - begin))
        out.float().cpu().numpy().tofile(logits_file)
        return print(
            json.dumps({"first_token_ms": sorted(times)[len(times) // 2], "warmed": True} | versions)
        )

    if kind == "float32":
        with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]):
            step()
        logits.cpu().numpy().tofile(logits_file)
        return print(json.dumps(versions))

    with torch.no_grad(), sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        graph = graph_of(step, lambda: logits.float().cpu().numpy().tofile(logits_file))
        graph.replay()
        torch.cuda.synchronize()
        times = [milliseconds(graph.replay) for _ in range(15)]
    print(json.dumps({"step_ms": sorted(times)[7]} | versions))


def generate(shape, context, weights, embedding, output):
    """Milliseconds of a step of transformers' own loop over the same weights."""
    import torch, transformers

    hidden, inner, layers, heads, kv_heads, vocab, base, scaled = SHAPES[shape]
    rope = {"rope_type": "default", "rope_theta": base}
    if scaled:
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=1 << 17,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    named = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(hidden),
    }
    for l, (qkv, o, gate_up, down) in enumerate(weights):
        q, k, v = qkv.split([heads * 128, kv_heads * 128, kv_heads * 128])
        gate, up = gate_up.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": o,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": down,
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        named |= {f"model.layers.{l}.{name}.weight": tensor for name, tensor in parts.items()}
    model.load_state_dict(
        {name: tensor.to("cuda", torch.bfloat16) for name, tensor in named.items()}, assign=True
    )
    model.model.rotary_emb = type(model.model.rotary_emb)(
        config, device="cuda"
    )  # its frequencies are no weights
    model.eval()
    tokens = (torch.arange(context - 1, device="cuda") * 7919 % vocab)[None]
    mask = torch.ones_like(tokens)

    def timed(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
        )
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    with torch.no_grad():
        timed(65)  # compiles, for a cache of this length
        times = [timed(65) for _ in range(3)]
        timed(1)
        firsts = [timed(1) for _ in range(3)]
    return {"step_ms": (min(times) - min(firsts)) / 64, "transformers": transformers.__version__}


def agreement(ours, theirs, vocab):
    """The worst cosine of a sequence's logits, and the fraction with the same most likely token."""
    import numpy as np

    ours, theirs = (
        np.fromfile(path, np.float32).astype(np.float64).reshape(-1, vocab) for path in (ours, theirs)
    )
    cosine = (ours * theirs).sum(1) / np.sqrt((ours**2).sum(1) * (theirs**2).sum(1))
    return {"cosine": float(cosine.min()), "top1": float((ours.argmax(1) == theirs.argmax(1)).mean())}


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {result.stderr[-2000:]}")
    return result.stdout


def peers(shape, context, batch, capacity, path):
    """What every peer says, by name: times, or why there are none."""
    results = {}
    for name in PEERS + ("float32",):
        if name in ONE_CASE and (shape, context, batch) != CASES[0]:
            continue
        arguments = [shape, context, batch, capacity, path(name), name]
        result = subprocess.run(
            [sys.executable, __file__, "--peer", *map(str, arguments)], capture_output=True, text=True
        )
        results[name] = (
            json.loads(result.stdout.splitlines()[-1])
            if result.returncode == 0
            else {"missing": result.stderr.strip()[-300:]}
        )
    return results


def case(decode_speed, shape, context, batch):
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        common = [decode_speed, "--random", shape, "--contexts", str(context), "--batches", str(batch)]
        rows = []
        for method in (METHODS if batch <= 32 else SMALL_METHODS).split(","):
            run(common + ["--methods", method, "--json", path("kv.json"), "--logits", path(method)])
            with open(path("kv.json")) as file:
                output = json.load(file)
            rows += output["rows"]
        capacity = rows[0]["capacity"]
        results = peers(shape, context, batch, capacity, path)
        agreed = lambda a, b: agreement(path(a), path(b), SHAPES[shape][5])
        made = [name for name in PEERS + ("float32",) if os.path.exists(path(name))]
        checks = {name: agreed(METHODS.split(",")[0], name) for name in made}
        if {"torch", "float32"} <= set(made):
            checks["torch beside float32"] = agreed("torch", "float32")
    return {
        "shape": shape,
        "context": context,
        "batch": batch,
        "copy_bytes_per_second": output["copy_bytes_per_second"],
        "peers": results,
        "dense_beside": checks,
        "rows": rows,
    }


def prefill_case(decode_speed, shape, context, chunk, batch):
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)
        rows = []
        for method in (PREFILL_METHODS if batch == 1 else SMALL_METHODS).split(","):
            run(
                [
                    decode_speed,
                    "--random",
                    shape,
                    "--contexts",
                    str(context),
                    "--chunk",
                    str(chunk),
                    "--batches",
                    str(batch),
                    "--steps",
                    "8",
                    "--methods",
                    method,
                    "--json",
                    path("kv.json"),
                    "--logits",
                    path(method),
                ]
            )
            with open(path("kv.json")) as file:
                rows += json.load(file)["rows"]
        arguments = [shape, context, batch, 0, path("torch"), "prefill"]
        torch = json.loads(run([sys.executable, __file__, "--peer", *map(str, arguments)]).splitlines()[-1])
        # The logits of a step come before those of the prompt.
        vocab = SHAPES[shape][5]
        with open(path(METHODS.split(",")[0]), "rb") as file, open(path("prompt"), "wb") as prompt:
            prompt.write(file.read()[4 * vocab * batch :])
        check = agreement(path("prompt"), path("torch"), vocab)
    return {"shape": shape, "context": context, "torch": torch, "dense_beside_torch": check, "rows": rows}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("decode_speed")
    parser.add_argument("results")
    parser.add_argument("--cases", default="", help="indices of cases, separated by commas")
    parser.add_argument("--prefill", action="store_true", help="time prompts instead of steps")
    parser.add_argument("--name", help="of the results, instead of decode or prefill")
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    commit = arguments.commit or tables.commit()
    name, cases, run_case = ("decode", CASES, case)
    if arguments.prefill:
        name, cases, run_case = ("prefill", PREFILL_CASES, prefill_case)
    name = arguments.name or name
    chosen = [int(i) for i in arguments.cases.split(",") if i] or range(len(cases))
    results = []
    for i in chosen:
        results.append(run_case(os.path.abspath(arguments.decode_speed), *cases[i]))
        # Written after every case, so that an interrupted run keeps its results.
        result = {"date": tables.today(), "commit": commit, "cases": results}
        tables.write(os.path.join(arguments.results, f"{name}.json"), result)
        print(tables.page(name, result), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        shape, *sizes = sys.argv[2:]
        peer(shape, *map(int, sizes[:3]), *sizes[3:])
    else:
        main()
