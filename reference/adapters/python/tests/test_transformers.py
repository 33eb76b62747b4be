"""Caches of codes in transformers: small random models, batches, beams, and the shipped model."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from conftest import CALIBRATION, MODEL, TEXT  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvcodes  # noqa: E402
from kvcodes.transformers import ATTENTION, Calibration, CodesCache, calibrate  # noqa: E402

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)


FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def small(family: str, **settings):
    torch.manual_seed(5)
    config, model = FAMILIES[family]
    return model(config(**SMALL, initializer_range=0.2, **settings)).eval()


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request):
    return small(request.param)


@pytest.fixture(scope="module")
def calibration(model):
    ids = torch.randint(3, 97, (500,), generator=torch.Generator().manual_seed(2)).tolist()
    return calibrate(model, [ids[:300], ids[300:]], methods=("sq", "million"), k=(32, 8), v=(32, 8))


METHODS = {
    "sq": dict(method="sq", key_bits=8.0, value_bits=8),
    "million": dict(method="million", k=(32, 8), v=(32, 8)),
}


@pytest.fixture(params=METHODS)
def make(request, model, calibration):
    return lambda **window: CodesCache(model, calibration, **METHODS[request.param] | window)


def prompt(n: int, batch: int = 1):
    return torch.randint(3, 97, (batch, n), generator=torch.Generator().manual_seed(9))


def generate(model, ids, cache, new=12, **options):
    options = (
        dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True) | options
    )
    return model.generate(
        ids, attention_mask=options.pop("attention_mask", torch.ones_like(ids)), cache=cache, **options
    )


def test_a_window_that_holds_all_tokens_is_exact(model, make):
    ids = prompt(40, 2)
    exact = generate(model, ids, DynamicCache(config=model.config))
    codes = generate(model, ids, make(recent=512))
    assert torch.equal(exact.sequences, codes.sequences)
    for a, b in zip(exact.logits, codes.logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_other_families(family):
    model = small(family, sliding_window=None)
    calibration = calibrate(model, [prompt(300)[0].tolist()])
    ids = prompt(40, 2)
    exact = generate(model, ids, DynamicCache(config=model.config))
    codes = generate(model, ids, CodesCache(model, calibration, recent=512))
    assert torch.equal(exact.sequences, codes.sequences)


def test_sliding_windows_are_refused(calibration):
    with pytest.raises(kvcodes.UnsupportedError):
        CodesCache(small("mistral", sliding_window=16), calibration)


def test_codes_are_near(model, make):
    ids = prompt(300)
    cache = make(recent=16)
    step = torch.tensor([[5]])
    with torch.no_grad():
        exact = model(torch.cat([ids, step], 1)).logits[0, -1]
        model(ids, cache=cache)
        codes = model(step, cache=cache).logits[0, -1]
    assert cache.get_seq_length() == 301
    assert cache.layers[0].sequences[0].coded >= 256
    assert (exact - codes).abs().mean() < 0.15 * exact.std()
    assert cache.nbytes > 0 and cache.shared_nbytes > 0


def test_a_chunk_attends_causally(model, make):
    ids = prompt(120)
    whole, parts = make(recent=8), make(recent=8)
    with torch.no_grad():
        model(ids[:, :100], cache=whole)
        one = [model(ids[:, t : t + 1], cache=whole).logits[0, 0] for t in range(100, 120)]
        model(ids[:, :100], cache=parts)
        chunk = model(ids[:, 100:], cache=parts).logits[0]
    # The chunk is appended before it attends, so that other tokens have left the window.
    assert (torch.stack(one) - chunk).abs().max() < 0.5 * chunk.std()


def test_padding_on_the_left(model, make):
    lengths, ids = [90, 61, 12], prompt(90, 3)
    mask = torch.stack([torch.arange(90) >= 90 - n for n in lengths]).long()
    ids = ids * mask
    together = generate(model, ids, make(recent=16), attention_mask=mask)
    for i, n in enumerate(lengths):
        alone = generate(model, ids[i : i + 1, 90 - n :], make(recent=16))
        for a, b in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[i], b[0], atol=1e-2, rtol=0)


def test_padding_on_the_right_is_refused(model, make):
    ids, mask = prompt(20, 2), torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    with pytest.raises(kvcodes.UnsupportedError), torch.no_grad():
        model(ids, attention_mask=mask, cache=make())


def test_beams(model, make):
    ids = prompt(80, 2)
    options = dict(num_beams=3, num_return_sequences=2)
    exact = generate(model, ids, DynamicCache(config=model.config), **options)
    codes = generate(model, ids, make(recent=512), **options)
    assert torch.equal(exact.sequences, codes.sequences)
    generate(model, ids, make(recent=8), **options)


def test_crop_and_assisted_generation(model, make):
    ids = prompt(60)
    cache = make(recent=512)
    with torch.no_grad():
        model(ids, cache=cache)
        first = model(torch.tensor([[4]]), cache=cache).logits
        cache.crop(-1)
        assert cache.get_seq_length() == 60
        again = model(torch.tensor([[4]]), cache=cache).logits
    torch.testing.assert_close(first, again)
    with pytest.raises(kvcodes.ArgumentError):
        cache.crop(3)
    exact = generate(model, ids, DynamicCache(config=model.config))
    assisted = generate(model, ids, make(recent=512), assistant_model=small(model.config.model_type))
    assert torch.equal(exact.sequences, assisted.sequences)
    lookup = generate(model, ids, make(recent=512), prompt_lookup_num_tokens=3)
    assert torch.equal(exact.sequences, lookup.sequences)


def test_copies_reset_and_batches(model, make):
    ids = prompt(70, 2)
    cache = make(recent=8)
    with torch.no_grad():
        model(ids, cache=cache)
        other = copy.deepcopy(cache)
        a = model(torch.tensor([[4], [5]]), cache=cache).logits
        b = model(torch.tensor([[4], [5]]), cache=other).logits
        torch.testing.assert_close(a, b)
        other.batch_select_indices(torch.tensor([1]))
        other.batch_repeat_interleave(2)
        c = model(torch.tensor([[6], [6]]), cache=other).logits
        torch.testing.assert_close(c[0], c[1])
        torch.testing.assert_close(c[0], model(torch.tensor([[7], [6]]), cache=cache).logits[1])
        with pytest.raises(kvcodes.ArgumentError):
            model(ids[:1], cache=cache)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.nbytes == 0
        model(ids[:1], cache=cache)


def test_a_saved_cache_continues(model, make, tmp_path):
    cache, other = make(recent=8), make(recent=8)
    with torch.no_grad():
        model(prompt(90, 2), cache=cache)
        cache.save(tmp_path / "cache")
        other.load(tmp_path / "cache")
        assert other.get_seq_length() == 90
        step = torch.tensor([[4], [5]])
        assert torch.equal(model(step, cache=cache).logits, model(step, cache=other).logits)
    data = bytearray((tmp_path / "cache").read_bytes())
    for at in (3, 20, len(data) // 2, len(data) - 1):
        wrong = bytearray(data)
        wrong[at] ^= 8
        (tmp_path / "wrong").write_bytes(wrong)
        before = other.nbytes
        with pytest.raises(kvcodes.FormatError):
            other.load(tmp_path / "wrong")
        assert other.nbytes == before


def test_a_calibration_is_a_file(model, calibration, tmp_path):
    calibration.save(tmp_path / "calibration")
    again = Calibration.load(tmp_path / "calibration")
    assert again.entries.keys() == calibration.entries.keys()
    assert all(torch.equal(again.entries[name], entry) for name, entry in calibration.entries.items())
    (tmp_path / "calibration").write_bytes(b"nothing")
    with pytest.raises(kvcodes.FormatError):
        Calibration.load(tmp_path / "calibration")


def test_what_is_not_supported_says_so(model, calibration, make):
    ids = prompt(20)
    for call, error in [
        (lambda: CodesCache(model, calibration, "zack"), kvcodes.ArgumentError),
        (lambda: CodesCache(model, calibration, "sq", k=(1, 2)), kvcodes.ArgumentError),
        (lambda: CodesCache(model, calibration, "sq", block=32), kvcodes.ArgumentError),
        (lambda: CodesCache(model, calibration, "million"), kvcodes.ArgumentError),
        (lambda: CodesCache(model, calibration, "million", k=(5, 8)), kvcodes.ArgumentError),
        (lambda: calibrate(model, [[1] * 10]), kvcodes.ArgumentError),
        (lambda: calibrate(model, [[1] * 100], methods=("zack",)), kvcodes.ArgumentError),
        (lambda: model(ids, cache=make()), kvcodes.UnsupportedError),  # gradients
    ]:
        with pytest.raises(error):
            call()
    with torch.no_grad():
        with pytest.raises(kvcodes.UnsupportedError):
            model(ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool), cache=make())
        cache = make()
        model(ids, cache=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(kvcodes.UnsupportedError):
            model(ids, cache=cache)
        model.set_attn_implementation(ATTENTION)
        model(ids, cache=cache)
    config = LlamaConfig(
        **SMALL | dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    )
    with pytest.raises(kvcodes.UnsupportedError):
        CodesCache(LlamaForCausalLM(config), calibration)


def test_positions_of_scalar_codes_are_checked(model, calibration):
    ids = prompt(20)
    with torch.no_grad(), pytest.raises(kvcodes.UnsupportedError):
        model(ids, position_ids=torch.arange(3, 23)[None], cache=CodesCache(model, calibration))


def test_half_precision(calibration, model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(kvcodes.ArgumentError):  # `to` has rounded the frequencies, as loading does not
        CodesCache(half, calibration)
    half.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
    cache = CodesCache(half, calibration, recent=16)
    out = generate(half, prompt(100), cache)
    assert cache.layers[0].sequences[0].dtype == "bf16"
    assert torch.isfinite(torch.stack(out.logits)).all()


@pytest.fixture(scope="module")
def shipped():
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = tokenizer([path.read_text() for path in CALIBRATION]).input_ids
    return model, tokenizer, calibrate(model, texts, methods=("sq", "million"), tokens=2048)


def test_quality_on_the_shipped_model(shipped):
    """KL to the exact cache, of a text of another kind than those of the calibration."""
    model, tokenizer, calibration = shipped
    ids = torch.tensor([tokenizer(TEXT.read_text()).input_ids[:576]])
    with torch.no_grad():
        exact = model(ids).logits[0, 512:].log_softmax(-1)
        for settings, limit in [
            (dict(method="sq"), 0.01),
            (dict(method="sq", key_bits=4.0, value_bits=4), 0.003),
            (dict(method="million"), 0.02),
        ]:
            cache = CodesCache(model, calibration, **settings)
            model(ids[:, :512], cache=cache)
            steps = [model(ids[:, t : t + 1], cache=cache).logits[0, 0] for t in range(512, 576)]
            codes = torch.stack(steps).log_softmax(-1)
            kl = (exact.exp() * (exact - codes)).sum(-1).mean().item()
            assert 0 < kl < limit, (settings, kl)
            values = 2 * 6 * 2 * 128 * 576
            assert cache.nbytes * 8 / values < 10.5  # a sixth of the tokens are exact, in 32 bits
