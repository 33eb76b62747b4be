"""Random configurations of every family: logits of `kv` beside those of transformers.

    pip install torch transformers safetensors numpy
    python reference/tests/parity/random_configurations.py target/release/kv [--count 200] [--seed 0] [--keep FOLDER]

Kinds of RoPE in old and new places, head lengths, biases, windows, layers without RoPE, element types, shards, tied
and untied heads, keys left out where the family has a default. Weights are larger than usual, so that each of them
matters to the logits.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
# Keys that a configuration may leave out, where its value is the family's default.
OPTIONAL = [
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "use_sliding_window",
    "max_window_layers", "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "layer_types",
    "hidden_act", "max_position_embeddings",
]  # fmt: skip


def random_rope(pick, length):
    theta = pick([10000.0, 500.0, 1e6])
    kind = pick(["default", "default", "linear", "llama3", "yarn"])
    rope = dict(rope_type=kind, rope_theta=theta)
    if kind != "default":
        rope["factor"] = pick([2.0, 4.0, 8.0])
    if kind == "llama3":
        rope |= dict(low_freq_factor=1.0, high_freq_factor=pick([2.0, 4.0]))
    if kind in ("llama3", "yarn") and pick([True, True, False]):
        rope["original_max_position_embeddings"] = length // 4
    if kind == "yarn":
        for key, values in dict(
            beta_fast=[8.0, 32.0], beta_slow=[1.0, 2.0], truncate=[True, False], attention_factor=[1.2]
        ).items():
            if pick([True, False]):
                rope[key] = pick(values)
        if pick([True, False]):
            rope |= dict(mscale=pick([1.0, 0.7]), mscale_all_dim=pick([1.0, 0.5]))
    return rope


def random_configuration(family, pick):
    heads = pick([1, 2, 3, 4, 6])
    head_dim = pick([4, 8, 10, 16, 24, 32])
    layers = pick([1, 2, 3, 5])
    config = dict(
        model_type=family,
        vocab_size=pick([32, 67]),
        hidden_size=heads * pick([head_dim, head_dim, 4, 10]),  # a multiple: transformers refuses other Llamas
        intermediate_size=pick([8, 33, 64]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pick([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=head_dim,
        max_position_embeddings=pick([64, 128]),
        rms_norm_eps=pick([1e-6, 1e-5]),
        tie_word_embeddings=pick([True, False]),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=pick([None, 2, [2, 3]]),
    )
    config["rope_parameters"] = random_rope(pick, config["max_position_embeddings"])
    if family in ("llama", "qwen3", "smollm3"):
        config["attention_bias"] = pick([True, False])
    if family in ("llama", "smollm3"):
        config["mlp_bias"] = pick([True, False])
    if family == "mistral":
        config["sliding_window"] = pick([None, 1, 3, 64])
    if family in ("qwen2", "qwen3", "smollm3") and pick([True, False]):
        config |= dict(use_sliding_window=True, sliding_window=pick([1, 2, 5, 64]))
        if family != "smollm3":
            config["max_window_layers"] = pick(range(layers + 1))
        if pick([True, False, False]):
            types = ["full_attention", "sliding_attention"]
            config["layer_types"] = [pick(types) for _ in range(layers)]
    if family == "smollm3" and pick([True, False]):
        if pick([True, False]):
            config["no_rope_layers"] = [pick([0, 1]) for _ in range(layers)]
        else:
            config["no_rope_layer_interval"] = pick([1, 2, 3])
    return config


def older(config, pick):
    """Moves RoPE to where older versions of transformers have it."""
    place = pick(["rope_parameters", "rope_scaling", "type", "inside"])
    if place == "rope_parameters":
        return config
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    if place == "type":
        rope["type"] = rope.pop("rope_type")
    if place == "inside":
        rope["rope_theta"] = theta
    else:
        config["rope_theta"] = theta
    if rope.get("rope_type", rope.get("type")) != "default" or place == "inside":
        config["rope_scaling"] = rope
    return config


def make(folder, family, seed):
    pick = random.Random(seed).choice
    torch.manual_seed(seed)
    written = random_configuration(family, pick)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(written)))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if "norm" in name else 0.3 * torch.randn_like(p))
    dtype = pick([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    model.to(dtype).save_pretrained(folder, max_shard_size=pick(["5GB", "5GB", "20KB"]))
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored |= {key: value for key, value in written.items() if key != "model_type"}
    defaults = AutoConfig.for_model(family).to_dict()
    for key in OPTIONAL:  # as hand-written and old files do
        default = defaults.get(key)
        if key == "head_dim" and family != "qwen3":
            default = written["hidden_size"] // written["num_attention_heads"]
        if stored.get(key, default) == default and pick([True, False]):
            stored.pop(key, None)
    for key in ("layer_types", "no_rope_layers"):  # which transformers derives from the others
        if key not in written:
            stored.pop(key, None)
    path.write_text(json.dumps(older(stored, pick), indent=1))
    tokens = [pick(range(written["vocab_size"])) for _ in range(pick([1, 7, 40]))]
    return tokens


def logits_of(kv, model, tokens):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        args = [kv, "logits", "--model", model, "--tokens", ",".join(map(str, tokens)), "--json", out.name]
        done = subprocess.run(args, capture_output=True, text=True)
        if done.returncode:
            return None, done.stderr.strip()
        return np.array(json.loads(Path(out.name).read_text())["logits"]), ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kv")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the checkpoints that differ here")
    args = parser.parse_args()
    worst, failed, skipped = 0.0, 0, 0
    for i in range(args.count):
        family = FAMILIES[i % len(FAMILIES)]
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.keep / f"{family}-{i}" if args.keep else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                tokens = make(folder, family, args.seed + i)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                with torch.no_grad():
                    theirs = model(torch.tensor([tokens])).logits[0].numpy()
            except Exception as error:  # a configuration that transformers itself refuses
                skipped += 1
                print(f"{family:8} {i:4} transformers: {type(error).__name__}: {str(error)[:120]}")
                continue
            ours, message = logits_of(args.kv, folder, tokens)
            error = np.inf if ours is None else np.abs(ours - theirs).max() / np.abs(theirs).max()
            if not error < 1e-5:
                failed += 1
                print(f"{family:8} {i:4} {error:.1e} {message} {(folder / 'config.json').read_text()}")
            else:
                worst = max(worst, error)
    compared = args.count - skipped
    print(f"{compared - failed} of {compared} agree within 1e-5 of the largest logit (worst {worst:.1e}); "
          f"transformers refuses {skipped}")  # fmt: skip
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
