"""Random GGUF vocabularies: tokens of `kv` beside those of llama.cpp or `tokenizers`.

    pip install gguf numpy tokenizers sentencepiece llama-cpp-python
    python reference/tests/parity/random_vocabularies.py target/release/kv [--count 60] [--seed 0]

With `llama-cpp-python` every file is also read by llama.cpp. Without it the rules of llama.cpp are those below, on
top of `tokenizers` and sentencepiece, which train the vocabularies.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece as spm
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

try:
    from llama_cpp import Llama
except ImportError:
    Llama = None

TEXT = Path(__file__).parents[2] / "assets" / "sotu-heldout.txt"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
CASED = f"{WORD}{UPPER}*{LOWER}+SUFFIX|{WORD}{UPPER}+{LOWER}*SUFFIX|NUMBER"
CASED += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = CASED.replace("SUFFIX", "").replace("NUMBER", r"\p{N}")
GPT4O = CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("NUMBER", r"\p{N}{1,3}")
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Names, cuts, BOS by default, whole words first.
PRE = [
    (["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"], [LLAMA3], True, True),
    (["smaug-bpe", "dbrx"], [LLAMA3], False, False),
    (["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"], [QWEN2], False, False),
    (["smollm", "starcoder", "command-r"], [r"\p{N}", GPT2], False, False),
    (["gpt-2", "olmo", "phi-2"], [GPT2], False, False),
    (["tekken"], [TEKKEN], True, True),
    (["gpt-4o", "llama4"], [GPT4O], False, False),
    (["deepseek-v3"], [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3], False, False),
    (["deepseek-coder"], [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"],
     False, False),
    (["bloom", "poro-chat"], [BLOOM], False, False),
    (["viking"], [BLOOM, r"\p{N}"], False, False),
    (["default", None], [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], False, False),
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = ["<think>", "</think>", "<|x|>", "<|xy|>", "[INST]", "the<", "<|im_end|>"]
PIECES = [
    "the state of", " The Union", " is", "  two", "\n", "\n\n", "\t", " it's", "WE'LL", "caf\u00e9", "\u6f22\u5b57",
    "\U0001f600", "12345", " 7", "...", " !?", "a", " ", "x=1;", "<", "<s>", "</s>", "<unk>", "\r\n", "\u00a0",
] + SPECIAL  # fmt: skip


def cut(text, special):
    """llama.cpp's partition: longer special tokens first."""
    parts = [text] if text else []
    for token, number in sorted(special.items(), key=lambda item: -len(item[0].encode())):
        cut = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for i, piece in enumerate(part.split(token)):
                cut += [number] * (i > 0) + [piece] * bool(piece)
        parts = cut
    return parts


def write(path, model, tokens, kinds, fields, scores=None, merges=None):
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in [
        (writer.add_context_length, 512), (writer.add_embedding_length, 2), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 1), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
    ]:  # fmt: skip
        add(value)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    layer = dict(
        attn_norm=(2,), ffn_norm=(2,), attn_q=(2, 2), attn_k=(2, 2), attn_v=(2, 2), attn_output=(2, 2),
        ffn_gate=(1, 2), ffn_up=(1, 2), ffn_down=(2, 1),
    )  # fmt: skip
    shapes = {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (len(tokens), 2), "output_norm.weight": (2,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def special_kinds(pick):
    return {token: pick([CONTROL, USER_DEFINED, CONTROL, USER_DEFINED, NORMAL, UNUSED]) for token in SPECIAL}


def found(kinds):
    """The special tokens that a text is cut at."""
    return [t for t, kind in kinds.items() if kind in (CONTROL, USER_DEFINED, UNKNOWN) or t in ("<|im_end|>", "</s>")]


def byte_level(path, pick):
    names, cuts, adds_bos, whole_words = pick(PRE)
    name = pick(names)
    split = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    pre = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=pick([300, 400, 700]), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train([str(TEXT)], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    whole = [word for word in ["\u0120xylophone", "qqq", "Zz"] if word not in tokens]  # that no merge makes
    kinds = {"<s>": CONTROL, "</s>": CONTROL} | special_kinds(pick)
    kinds = {token: kind for token, kind in kinds.items() if token not in tokens}
    all_tokens = tokens + whole + list(kinds)
    fields = {}
    if name is not None:
        fields["pre"] = name
    if pick([True, True, False]):
        fields["bos_token_id"] = all_tokens.index("<s>")
    if pick([True, True, False]):
        fields["eos_token_id"] = all_tokens.index("</s>")
    bos, eos = fields.get("bos_token_id", 11), fields.get("eos_token_id", 11)
    adds_eos = False
    if pick([True, False]):
        adds_bos = fields["add_bos_token"] = pick([True, False])
    if pick([True, False]):
        adds_eos = fields["add_eos_token"] = pick([True, False])
    write(path, "gpt2", all_tokens, [NORMAL] * len(tokens + whole) + list(kinds.values()), fields, merges=merges)

    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: i for i, token in enumerate(all_tokens)}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    plain.pre_tokenizer = pre
    plain.decoder = decoders.ByteLevel()
    special = {token: vocab[token] for token in found(kinds)}

    def encode(text):
        out = [bos] if adds_bos else []
        for part in cut(text, special):
            out += [part] if isinstance(part, int) else plain.encode(part).ids
        return out + ([eos] if adds_eos else [])

    return f"gpt2 {name}", encode


def sentencepiece(path, pick):
    size = pick([380, 480, 600])
    with tempfile.TemporaryDirectory() as scratch:
        spm.SentencePieceTrainer.train(
            input=TEXT, model_prefix=f"{scratch}/m", model_type="bpe", vocab_size=size, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
            add_dummy_prefix=False,
        )  # fmt: skip
        pieces = spm.SentencePieceProcessor(model_file=f"{scratch}/m.model")
    of_piece = [(pieces.is_unknown, UNKNOWN), (pieces.is_control, CONTROL), (pieces.is_byte, BYTE)]
    tokens = [pieces.id_to_piece(i) for i in range(size)]
    types = [next((kind for test, kind in of_piece if test(i)), NORMAL) for i in range(size)]
    scores = [pieces.get_score(i) for i in range(size)]
    added = {token: kind for token, kind in special_kinds(pick).items() if token not in tokens and kind != UNUSED}
    added = {token: CONTROL if kind == NORMAL else kind for token, kind in added.items()}
    tokens, types, scores = tokens + list(added), types + list(added.values()), scores + [-1000.0] * len(added)
    fields = {}
    if pick([True, False]):
        fields["bos_token_id"] = pieces.bos_id()
    if pick([True, False]):
        fields["eos_token_id"] = pieces.eos_id()
    adds_bos, adds_eos, prefix = True, False, True
    if pick([True, False]):
        adds_bos = fields["add_bos_token"] = pick([True, False])
    if pick([True, False]):
        adds_eos = fields["add_eos_token"] = pick([True, False])
    if pick([True, False]):
        prefix = fields["add_space_prefix"] = pick([True, False])
    if pick([True, False]):
        fields["remove_extra_whitespaces"] = pick([True, False])
    write(path, "llama", tokens, types, fields, scores=scores)
    special = {token: tokens.index(token) for token in [*found(added), "<unk>", "<s>", "</s>"]}

    def encode(text):
        out, after_special = [1] if adds_bos else [], True
        for part in cut(text, special):
            if isinstance(part, int):
                out.append(part)
            else:
                out += pieces.encode(" " * (prefix and after_special) + part)
            after_special = isinstance(part, int)
        return out + ([2] if adds_eos else [])

    return "llama", encode


def tokens_of(kv, path, text):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        args = [kv, "logits", "--model", path, f"--text={text}", "--json", out.name]
        done = subprocess.run(args, capture_output=True, text=True)
        return json.loads(Path(out.name).read_text())["tokens"] if done.returncode == 0 else done.stderr.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kv")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = texts = 0
    for i in range(args.count):
        pick = random.Random(args.seed + i).choice
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.gguf"
            kind, rules = (byte_level if i % 3 else sentencepiece)(path, pick)
            llama = Llama(str(path), vocab_only=True, verbose=False) if Llama else None
            wrong = []
            for _ in range(8):
                text = "".join(pick(PIECES) for _ in range(pick([1, 3, 9, 20]))) or "a"
                texts += 1
                ours, right = tokens_of(args.kv, path, text), rules(text)
                if ours != right:
                    wrong.append(f"rules: {text!r}: {ours} instead of {right}")
                if llama and ours != llama.tokenize(text.encode(), add_bos=True, special=True):
                    wrong.append(f"llama.cpp: {text!r}: {ours}")
            failed += bool(wrong)
            for line in wrong[:3]:
                print(f"{i:3} {kind}: {line}")
    beside = "llama.cpp and its rules" if Llama else "llama.cpp's rules"
    print(f"{args.count - failed} of {args.count} vocabularies agree with {beside} on {texts} texts")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
