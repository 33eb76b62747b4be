#!/usr/bin/env python3
"""What rows fetched ahead of a layer's queries would hit: a study in NumPy of real decodes.

    pip install numpy ml_dtypes safetensors gguf tokenizers
    python benches/peers/speculation.py MODEL TEXT [--context 4096] [--decode 64] [--rows 410]

MODEL is a folder with safetensors or a GGUF file. A step attends to sinks, window and the `rows` tokens of
highest weight, summed over the queries of a head (exact scores; PQCache's codes choose nearly the same), and
twice as many rows stay on the device by their last use. Of the rows that then miss, `covered` are among those
that a prediction would have fetched, and `waste` are those fetched for nothing, as a share of `rows`.
Predictions: the next tokens in the ranking of the last step's query in the layer; the first tokens in the
ranking of a query that the layer's own weights make of the residual stream before the last feed-forward
block, or before the whole last layer. Next to them is what a cache of four times the rows would cover.
"""

import argparse, glob, os

import numpy as np

SINKS, WINDOW, BLOCK = 4, 64, 256


class Llama:
    """Weights by layer, (out, in), and the sizes of a model."""

    def __init__(self, path):
        self.load_gguf(path) if path.endswith(".gguf") else self.load_folder(path)
        self.head_dim = len(self.layers[0]["q"]) // self.heads
        self.scale = self.head_dim**-0.5

    def load_folder(self, path):
        import json

        import ml_dtypes  # for bfloat16
        import tokenizers
        from safetensors import safe_open

        config = json.load(open(os.path.join(path, "config.json")))
        tensors = {}
        for file in glob.glob(os.path.join(path, "*.safetensors")):
            with safe_open(file, "np") as opened:
                tensors.update({name: opened.get_tensor(name).astype(np.float32) for name in opened.keys()})
        names = {
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
            "norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        }
        self.layers = [
            {key: tensors[f"model.layers.{l}.{name}.weight"] for key, name in names.items()}
            for l in range(config["num_hidden_layers"])
        ]
        self.embedding = tensors["model.embed_tokens.weight"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.theta, self.eps, self.interleaved = config["rope_theta"], config["rms_norm_eps"], False
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(path, "tokenizer.json"))

    def load_gguf(self, path):
        import gguf
        from tokenizers import Tokenizer, models, pre_tokenizers

        reader = gguf.GGUFReader(path)
        field = lambda name: reader.fields[name].contents()
        tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
        names = {
            "q": "attn_q",
            "k": "attn_k",
            "v": "attn_v",
            "o": "attn_output",
            "gate": "ffn_gate",
            "up": "ffn_up",
            "down": "ffn_down",
            "norm": "attn_norm",
            "ffn_norm": "ffn_norm",
        }
        self.layers = [
            {key: tensors[f"blk.{l}.{name}.weight"] for key, name in names.items()}
            for l in range(field("llama.block_count"))
        ]
        self.embedding = tensors["token_embd.weight"]
        self.heads, self.kv_heads = field("llama.attention.head_count"), field(
            "llama.attention.head_count_kv"
        )
        self.theta, self.eps = field("llama.rope.freq_base"), field("llama.attention.layer_norm_rms_epsilon")
        self.interleaved = True
        tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
        vocabulary = {token: i for i, token in enumerate(tokens)}
        self.tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
        )
        split = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)

    def normalized(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def rotated(self, x, positions):
        """RoPE of (tokens, heads, head_dim)."""
        angle = positions[:, None] * self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        half = self.head_dim // 2
        first, second = (
            (np.s_[..., 0::2], np.s_[..., 1::2])
            if self.interleaved
            else (np.s_[..., :half], np.s_[..., half:])
        )
        y = np.empty_like(x)
        y[first], y[second] = x[first] * cos - x[second] * sin, x[first] * sin + x[second] * cos
        return y

    def heads_of(self, l, name, x, positions):
        """Rotated queries or keys of a residual stream: (tokens, heads, head_dim)."""
        rows = self.normalized(x, self.layers[l]["norm"]) @ self.layers[l][name].T
        return self.rotated(rows.reshape(len(x), -1, self.head_dim), positions)

    def run(self, tokens, keys, values, watch=None):
        """Appends tokens to keys and values (layer: head, tokens, head_dim), and calls
        `watch(l, before, queries, positions, after attention)`."""
        x, start, group = self.embedding[tokens], keys[0].shape[1], self.heads // self.kv_heads
        positions = np.arange(start, start + len(tokens))
        for l, layer in enumerate(self.layers):
            before, queries = x, self.heads_of(l, "q", x, positions)
            value = (self.normalized(x, layer["norm"]) @ layer["v"].T).reshape(len(tokens), self.kv_heads, -1)
            keys[l] = np.concatenate([keys[l], self.heads_of(l, "k", x, positions).transpose(1, 0, 2)], 1)
            values[l] = np.concatenate([values[l], value.transpose(1, 0, 2)], 1)
            out = np.empty_like(queries)
            for first in range(0, len(tokens), BLOCK):
                end = min(first + BLOCK, len(tokens))
                seen = start + end
                hidden = np.arange(seen)[None] > positions[first:end, None]
                for head in range(self.heads):
                    scores = queries[first:end, head] @ keys[l][head // group, :seen].T * self.scale
                    scores[hidden] = -np.inf
                    weights = np.exp(scores - scores.max(-1, keepdims=True))
                    out[first:end, head] = (
                        weights @ values[l][head // group, :seen] / weights.sum(-1, keepdims=True)
                    )
            x = x + out.reshape(len(tokens), -1) @ layer["o"].T
            if watch:
                watch(l, before, queries, positions, x)
            h = self.normalized(x, layer["ffn_norm"])
            gate = h @ layer["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"].T)) @ layer["down"].T


class Study:
    def __init__(self, model, keys, rows):
        self.model, self.keys, self.rows, self.steps = model, keys, rows, 0
        self.used, self.last, self.streams = {}, {}, {}  # by layer and head, the last used first; by layer
        self.missed, self.counted, self.predicted = 0, 0, {}

    def ranking(self, l, queries):
        """Tokens between sinks and window of each head, the best ones first."""
        rankings = []
        for head, grouped in enumerate(queries[0].reshape(self.model.kv_heads, -1, self.model.head_dim)):
            scores = grouped @ self.keys[l][head].T * self.model.scale
            scores = scores[:, SINKS : scores.shape[1] - WINDOW]
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            total = (weights / weights.sum(-1, keepdims=True)).sum(0)
            best = np.argpartition(-total, 3 * self.rows)[: 3 * self.rows]
            rankings.append(best[np.argsort(-total[best], kind="stable")] + SINKS)
        return rankings

    def watch(self, l, before, queries, positions, after):
        rankings, k = self.ranking(l, queries), self.rows
        self.streams[l] = (before, after)
        predictions = {}
        if l in self.last:
            predictions["last step, next k/2"] = [ranking[k : k + k // 2] for ranking in self.last[l]]
            predictions["last step, next k"] = [ranking[k : 2 * k] for ranking in self.last[l]]
        if l > 0:
            for name, stream in (("before the last layer", 0), ("before the last feed-forward", 1)):
                guess = self.ranking(l, self.model.heads_of(l, "q", self.streams[l - 1][stream], positions))
                predictions[f"{name}, k"] = [ranking[:k] for ranking in guess]
        for head, ranking in enumerate(rankings):
            used, chosen = self.used.setdefault((l, head), {}), set(ranking[:k].tolist())
            held, more = set(list(used)[: 2 * k]), set(list(used)[2 * k :])
            missing = chosen - held
            if self.steps > 8:  # with a full cache
                self.missed, self.counted = self.missed + len(missing), self.counted + k
                fetched_by = {name: set(lists[head].tolist()) - held for name, lists in predictions.items()}
                for name, fetched in [*fetched_by.items(), ("four times as many rows stay", more & chosen)]:
                    sums = self.predicted.setdefault(name, [0, 0, 0, 0])
                    for i, n in enumerate([len(missing & fetched), len(missing), len(fetched - missing), k]):
                        sums[i] += n
            used.update(dict.fromkeys(chosen, self.steps))
            self.used[l, head] = dict(sorted(used.items(), key=lambda item: -item[1])[: 4 * k])
        self.last[l] = rankings
        self.steps += l + 1 == len(self.model.layers)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rows", type=int, default=410)
    options = parser.parse_args()
    model = Llama(options.model)
    tokens = model.tokenizer.encode(open(options.text).read()).ids[: options.context + options.decode]
    empty = lambda: [np.zeros((model.kv_heads, 0, model.head_dim), np.float32) for _ in model.layers]
    keys, values = empty(), empty()
    model.run(tokens[: options.context], keys, values)
    study = Study(model, keys, options.rows)
    for token in tokens[options.context :]:
        model.run([token], keys, values, study.watch)
    print(f"{len(tokens)} tokens, {options.rows} rows: {study.missed / study.counted:.1%} miss")
    for name, (covered, missing, wasted, rows) in study.predicted.items():
        print(f"{name}: {covered / missing:.1%} of the misses covered, waste {wasted / rows:.1%}")


if __name__ == "__main__":
    main()
