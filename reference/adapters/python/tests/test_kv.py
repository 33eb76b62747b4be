"""Greedy tokens of ``kv generate``, with the codebooks and bases of ``kv calibrate``.

The program is ``$KV``, or that of the repository's target folder.
"""

import json
import os
import subprocess

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from conftest import CALIBRATION, MODEL, REPOSITORY, TEXT  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402

from kvcodes.transformers import Calibration, CodesCache, calibrate  # noqa: E402

PROGRAMS = [
    os.environ.get("KV", ""),
    *(str(REPOSITORY / "target" / kind / "kv") for kind in ("release", "debug")),
]
KV = next((path for path in PROGRAMS if path and os.path.exists(path)), None)
pytestmark = pytest.mark.skipif(KV is None, reason="SKIPPED: `kv` is not built, and $KV does not name it")

TOKENS = 48
METHODS = {
    "dense": ("dense:dtype=f32", None),
    "sq": ("sq:block=64:exact=f32", dict(method="sq", batch=64)),
    "sq at 4 bits": ("sq:k=4:v=4:block=64:exact=f32", dict(method="sq", batch=64, key_bits=4.0, value_bits=4)),
    "million": ("million:exact=f32", dict(method="million", batch=1)),
}


def kv(*arguments) -> None:
    subprocess.run([KV, *map(str, arguments)], check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("kv") / "profile"
    texts = [word for text in CALIBRATION for word in ("--text", text)]
    kv("calibrate", path, *texts, "--tokens", 2048, "--methods", "sq:block=64,million")
    return path


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts():
    text = TEXT.read_text()
    return [text[at : at + n].strip() for at, n in [(0, 600), (3000, 1500), (9000, 2500), (20000, 4000)]]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_kv(method, profile, model, prompts, tmp_path):
    spec, settings = METHODS[method]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in prompts:
        (tmp_path / "prompt").write_text(text)
        needs = [] if settings is None else ["--profile", profile]
        kv(
            "generate",
            "--file",
            tmp_path / "prompt",
            "--method",
            spec,
            "--tokens",
            TOKENS,
            "--device",
            "cpu",
            *needs,
            "--json",
            tmp_path / "json",
        )
        expected = json.loads((tmp_path / "json").read_text())
        ids = tokenizer(text, return_tensors="pt")
        cache = (
            DynamicCache(config=model.config)
            if settings is None
            else CodesCache(model, Calibration.load(profile), **settings)
        )
        out = model.generate(**ids, cache=cache, max_new_tokens=TOKENS, do_sample=False)
        got = out[0, ids.input_ids.shape[1] :].tolist()
        assert got == expected["tokens"][-len(got) :]


def test_calibration_is_that_of_kv(profile, model):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = tokenizer([path.read_text() for path in CALIBRATION]).input_ids
    ours, theirs = calibrate(model, texts, tokens=2048), Calibration.load(profile)
    for name, entry in ours.entries.items():
        part, other = name.rsplit("/", 1)[1], theirs.entries[name]
        if part in ("basis", "dual"):
            continue  # columns of equal deviation may be any of their plane
        scale = other.abs().max().item()
        assert (entry.flatten() - other).abs().max().item() < 0.02 * scale, name
