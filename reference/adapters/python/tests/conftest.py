"""What the tests share: random arrays, and attention by its definition in f64."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
MODEL = REPOSITORY / "reference/assets/tiny-llama-12m"
TEXT = REPOSITORY / "reference/assets/sotu-heldout.txt"
CALIBRATION = sorted((REPOSITORY / "reference/assets/calibration").glob("*.txt"))


DOORS = (REPOSITORY / "reference/adapters/README.md").read_text()


def block(name: str) -> str:
    """The block of this name in the page of all doors."""
    (found,) = re.findall(rf"^ *```{name}\n(.*?)^ *```$", DOORS, re.DOTALL | re.MULTILINE)
    return found


def settings(engine: str, folder: Path) -> dict:
    """The settings of an engine that the page gives, with another folder."""
    text = block(f"json {engine}").replace("/var/cache/kv", str(folder))
    return json.loads(text[text.index("{") :])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Noise with an offset in every eighth component, as keys have it."""
    noise = rng.standard_normal(shape).astype(np.float32)
    noise[..., ::8] += 3
    return noise


def attention(queries, keys, values, scale=None, softcap=None, window=None) -> np.ndarray:
    """Causal attention of the last t tokens' queries, (t, query heads, dim), over (n, heads, dim), in f64."""
    queries, keys, values = (np.asarray(x).astype(np.float64) for x in (queries, keys, values))
    (t, query_heads, dim), (n, heads, _) = queries.shape, keys.shape
    out = np.zeros((t, query_heads, values.shape[2]))
    for i in range(t):
        end = n - t + i + 1
        start = 0 if window is None else max(0, end - window)
        for h in range(query_heads):
            kv = h // (query_heads // heads)
            scores = keys[start:end, kv] @ queries[i, h] * (dim**-0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ values[start:end, kv] / weights.sum()
    return out
