#!/usr/bin/env python3
"""Makes the parity fixtures: tiny random checkpoints by `transformers`, and the logits it computes for them.

    pip install torch transformers safetensors gguf sentencepiece numpy
    python reference/tests/parity/make_fixtures.py            # writes reference/tests/parity/fixtures/
    python reference/tests/parity/make_fixtures.py --check KV  # compares the binary KV with transformers on them

`cargo test` needs the committed fixtures only. GGUF files are written by the `gguf` package, and their logits are those of
transformers on the weights that the package reads back from its own blocks.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece as spm
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent / "fixtures"
TOKENS = [1, 17, 42, 3, 3, 95, 60, 8, 29, 77, 2, 54]
BASE = dict(
    model_type="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0
)
SMALL = dict(
    hidden_size=32, intermediate_size=32, head_dim=8, dtype="bfloat16", pad_token_id=None, eos_token_id=2
)
CHECKPOINTS = {
    "mha": dict(num_key_value_heads=4, head_dim=16),
    "gqa": dict(),
    "mqa-wide-heads": dict(num_key_value_heads=1, head_dim=32),
    "llama3-rope": dict(rope_parameters=LLAMA3),
    "linear-rope": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    "bias-untied": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "bf16": dict(dtype="bfloat16"),
    "sharded-f16": dict(dtype="float16"),
    # Smaller than the others: what they add is the family. The window is shorter than the tokens.
    "mistral-window": dict(SMALL, model_type="mistral", sliding_window=5),
    "mistral-long-window": dict(SMALL, model_type="mistral", sliding_window=64),
    "qwen2": dict(SMALL, model_type="qwen2"),
    "qwen2-window": dict(
        SMALL, model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": dict(SMALL, model_type="qwen3", tie_word_embeddings=False),
    "qwen3-bias": dict(SMALL, model_type="qwen3", attention_bias=True),
    "smollm3": dict(SMALL, model_type="smollm3", num_hidden_layers=5),
    "smollm3-window": dict(
        SMALL, model_type="smollm3", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=3
    ),
    "qwen2-yarn": dict(SMALL, model_type="qwen2", rope_parameters=YARN),
    "qwen3-yarn": dict(
        SMALL, model_type="qwen3", rope_parameters=dict(YARN, truncate=False, attention_factor=1.4)
    ),
}
GGUF = {
    "gguf-f32": dict(kind="F32"),
    "gguf-f16": dict(kind="F16"),
    "gguf-q8_0": dict(kind="Q8_0"),
    "gguf-q4_0": dict(kind="Q4_0"),
    "gguf-q4_1": dict(kind="Q4_1"),
    "gguf-qwen2": dict(SMALL, kind="F16", model_type="qwen2"),
    "gguf-qwen3": dict(SMALL, kind="F16", model_type="qwen3"),
    "gguf-smollm3": dict(SMALL, kind="F16", model_type="smollm3", num_hidden_layers=5),
    "gguf-yarn": dict(SMALL, kind="F16", model_type="qwen2", rope_parameters=YARN),
}
PERMUTED = {"llama", "smollm3"}  # whose Q and K convert_hf_to_gguf permutes


def random_model(overrides, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**BASE, **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Larger than the usual start, so that attention and biases matter to the logits.
            p.copy_(1 + 0.2 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    return model


def logits(model):
    with torch.no_grad():
        return model.float()(torch.tensor([TOKENS])).logits[0].tolist()


def write_expected(folder, values):
    rows = [[round(x, 6) for x in row] for row in values]
    (folder / "expected.json").write_text(json.dumps({"tokens": TOKENS, "logits": rows}))


def permute(w, heads):
    """Rows of Q and K in GGUF's order, as llama.cpp's convert_hf_to_gguf does."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, model, kind, pieces=None):
    c = model.config
    writer = gguf.GGUFWriter(path, c.model_type)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    if c.model_type == "qwen3":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if pieces:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([pieces.id_to_piece(i) for i in range(c.vocab_size)])
        writer.add_token_scores([pieces.get_score(i) for i in range(c.vocab_size)])
        kinds = [(pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_byte, 6)]
        writer.add_token_types([next((k for test, k in kinds if test(i)), 1) for i in range(c.vocab_size)])
        writer.add_bos_token_id(pieces.bos_id())
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([chr(33 + i) for i in range(c.vocab_size - 2)] + ["ab", "cd"])
        writer.add_token_types([1] * c.vocab_size)
        writer.add_token_merges(["a b", "c d"])
    quant = getattr(gguf.GGMLQuantizationType, kind)
    for name, p in list(model.state_dict().items()):
        if name == "lm_head.weight":
            continue
        w = p.float().numpy()
        if name == "model.embed_tokens.weight":
            stored = "token_embd.weight"
        elif name == "model.norm.weight":
            stored = "output_norm.weight"
        else:
            _, _, layer, *rest, parameter = name.split(".")
            stored = f"blk.{layer}.{NAMES['.'.join(rest)]}.{parameter}"
        this = gguf.GGMLQuantizationType.F32 if w.ndim == 1 else quant
        blocks = gguf.quants.quantize(w, this)
        p.copy_(
            torch.tensor(gguf.quants.dequantize(blocks, this)).reshape(w.shape)
        )  # shares the model's memory
        heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(
            stored.split(".")[2] if "blk" in stored else ""
        )
        if heads and c.model_type in PERMUTED:  # a row's blocks move with the row
            blocks = permute(blocks, heads)
        writer.add_tensor(stored, blocks, raw_dtype=this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make():
    shutil.rmtree(HERE, ignore_errors=True)
    for seed, (name, overrides) in enumerate(CHECKPOINTS.items()):
        overrides = dict(overrides)
        dtype = getattr(torch, overrides.pop("dtype", "float32"))
        model = random_model(overrides, seed).to(dtype)
        folder = HERE / name
        model.save_pretrained(folder, max_shard_size="60KB" if name.startswith("sharded") else "5GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        write_expected(
            folder, logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
        )
    for seed, (name, overrides) in enumerate(GGUF.items()):
        overrides = dict(overrides)
        kind = overrides.pop("kind")
        overrides.pop("dtype", None)
        model = random_model(overrides, 100 + seed)
        folder = HERE / name
        folder.mkdir(parents=True)
        write_gguf(folder / "model.gguf", model, kind)
        write_expected(folder, logits(model))
    make_sentencepiece(HERE / "gguf-sentencepiece")


TEXTS = [
    "The state of the Union is good.",
    " two  spaces, caf\u00e9 \u6f22\u5b57",
    "line\nbreak 12345",
    "a",
    "",
]


def make_sentencepiece(folder):
    """A GGUF file with a sentencepiece tokenizer, and what sentencepiece makes of some texts."""
    folder.mkdir(parents=True)
    text = Path(__file__).parents[2] / "assets" / "sotu-heldout.txt"
    with tempfile.TemporaryDirectory() as scratch:
        spm.SentencePieceTrainer.train(
            input=text,
            model_prefix=f"{scratch}/m",
            model_type="bpe",
            vocab_size=480,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
        pieces = spm.SentencePieceProcessor(model_file=f"{scratch}/m.model")
    model = random_model(dict(vocab_size=480), 200)
    write_gguf(folder / "model.gguf", model, "Q8_0", pieces)
    write_expected(folder, logits(model))
    texts = [dict(text=t, tokens=[pieces.bos_id()] + pieces.encode(t)) for t in TEXTS]
    (folder / "texts.json").write_text(json.dumps(texts))


def check(kv):
    worst = 0.0
    for folder in sorted(HERE.iterdir()):
        expected = json.loads((folder / "expected.json").read_text())
        if (folder / "config.json").exists():  # recomputed, not taken from the file
            expected["logits"] = logits(
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            )
        path = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            tokens = ",".join(map(str, expected["tokens"]))
            subprocess.run(
                [kv, "logits", "--model", path, "--tokens", tokens, "--json", out.name],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            ours = np.array(json.loads(Path(out.name).read_text())["logits"])
        theirs = np.array(expected["logits"])
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        worst = max(worst, error)
        print(f"{folder.name:16} largest difference / largest logit {error:.1e}")
    assert worst < 1e-3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", metavar="KV")
    args = parser.parse_args()
    check(args.check) if args.check else make()
