# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's models over nybble's cache and attention, against mlx-lm's own quantized path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import base, gemma, llama, qwen3
from mlx_lm.models import cache as cache_module

import nybble
import nybble.mlx_lm
from nybble import NybbleError, Status

Theirs = cache_module.QuantizedKVCache
Ours = nybble.mlx_lm.QuantizedKVCache
VOCABULARY = 200


@pytest.fixture
def installed() -> Iterator[None]:
    nybble.mlx_lm.install()
    yield
    nybble.mlx_lm.uninstall()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert base.quantized_scaled_dot_product_attention.__module__ == "mlx_lm.models.base"
    assert cache_module.QuantizedKVCache is Theirs


def tiny(kind: str, layers: int = 3) -> Any:
    mx.random.seed(3)
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
    }
    if kind == "llama":
        model = llama.Model(llama.ModelArgs(model_type=kind, **sizes))
    elif kind == "gemma":
        model = gemma.Model(gemma.ModelArgs(model_type=kind, **sizes))
    else:
        more = {"max_position_embeddings": 4096, "rope_theta": 1e4, "tie_word_embeddings": True}
        model = qwen3.Model(qwen3.ModelArgs(model_type=kind, **sizes, **more))
    mx.eval(model.parameters())
    return model


def tokens(batch: int, count: int) -> mx.array:
    mx.random.seed(5)
    return mx.random.randint(0, VOCABULARY, (batch, count))


def teacher_forced(model: Any, caches: list[Any], forced: mx.array, prompt: int) -> np.ndarray:
    """Logits of a prompt in one piece, then token by token."""
    parts = [model(forced[:, :prompt], cache=caches)]
    for i in range(prompt, forced.shape[1]):
        parts.append(model(forced[:, i : i + 1], cache=caches))
        mx.eval(parts[-1])
    return np.array(mx.concatenate(parts, axis=1))


# Both compute in f32. In one layer both quantize the same floats, and what differs is the rounding of
# sums: 7e-6 at most here. From the second layer on the floats differ by that much, and a value that
# stands that near to the middle between two codes may fall to either side, one step of one element,
# which one depends on the machine: that moved logits by up to 1e-2 here, where quantizing to 4 bits
# moves them by 0.5.
# The mean, which one such token cannot move far, is held to a thirtieth.
TOLERANCE = {1: 1e-3, 3: 0.3}


def expect_same(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    difference = np.abs(found - expected)
    assert np.all(difference <= tolerance) and difference.mean() <= tolerance / 30
    top = np.sort(expected, axis=-1)
    clear = top[..., -1] - top[..., -2] > 2 * tolerance
    assert tolerance > TOLERANCE[1] or clear.any()
    assert np.array_equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_teacher_forced(kind: str, bits: int, layers: int, installed: None) -> None:
    model, forced = tiny(kind, layers), tokens(2, 60)
    nybble.mlx_lm.uninstall()
    expected = teacher_forced(model, [Theirs(64, bits) for _ in model.layers], forced, 40)
    nybble.mlx_lm.install()
    context = nybble.default_context()
    context.clear_counters()
    caches = [cache_module.QuantizedKVCache(64, bits) for _ in model.layers]
    expect_same(teacher_forced(model, caches, forced, 40), expected, TOLERANCE[layers])
    counters = context.counters()
    assert counters.attention_fused == layers * 21 and counters.attention_compat == 0
    assert all(type(cache) is Ours and cache.offset == 60 for cache in caches)
    # mlx-lm's own caches, read where they are.
    theirs = [Theirs(64, bits) for _ in model.layers]
    expect_same(teacher_forced(model, theirs, forced, 40), expected, TOLERANCE[layers])
    assert context.counters().attention_fused == 2 * layers * 21


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "add"])
def test_attention_in_halves(dtype: mx.Dtype, mask: Any) -> None:
    mx.random.seed(1)
    q = mx.random.normal((2, 6, 5, 64)).astype(dtype)
    k, v = (mx.quantize(mx.random.normal((2, 2, 33, 64)).astype(dtype), 64, 4) for _ in "kv")
    if mask == "bool":
        mask = mx.random.uniform(shape=(2, 1, 5, 33)) < 0.7
    elif mask == "add":
        mask = mx.random.normal((5, 33)).astype(dtype)
    before = mx.array(q)  # mlx-lm's changes q where it is
    ours = nybble.mlx_lm._quantized_scaled_dot_product_attention(q, k, v, 0.125, mask, 64, 4)
    theirs = base.quantized_scaled_dot_product_attention(q, k, v, 0.125, mask, 64, 4)
    assert ours.dtype == dtype
    # MLX's roundings are asked for (its sums on the CPU are too rough to tell them by).
    rows = (nybble.Quantized(*arrays, bits=4) for arrays in (k, v, k, v))
    seen = "none" if mask is None else mask
    by_rounding = [
        nybble.attention(before, next(rows), next(rows), scale=0.125, mask=seen, rounding=rounding)
        for rounding in ("mlx", "exact")
    ]
    assert mx.array_equal(ours, by_rounding[0]) and not mx.array_equal(ours, by_rounding[1])
    # Scores are rounded to the dtype by both, in sums of different order, so that a weight may
    # differ by an ulp of its score (4 at most, hence 2 units); the output is rounded once more.
    unit = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    difference = mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32))
    assert bool(mx.all(difference <= 4 * unit * (1 + mx.abs(theirs.astype(mx.float32)))))


def test_generation(installed: None) -> None:
    """kv_bits alone: mlx-lm quantizes after the first part of the prompt."""
    model = tiny("llama", layers=1)  # both quantize the same floats
    prompt = tokens(1, 50)[0]

    def generated() -> list[int]:
        steps = generate_step(
            prompt, model, max_tokens=24, kv_bits=8, quantized_kv_start=0, prefill_step_size=16
        )
        return [int(token) for token, _ in steps]

    before = nybble.default_context().counters().attention_fused
    ours = generated()
    assert nybble.default_context().counters().attention_fused > before
    nybble.mlx_lm.uninstall()
    assert ours == generated()


def test_speculation_rolls_back(installed: None) -> None:
    """Drafted tokens that are refused leave no trace (field case 43, through mlx-lm)."""
    model, draft = tiny("llama"), tiny("qwen3", layers=1)
    prompt = tokens(1, 20)[0]
    caches = nybble.mlx_lm.make_prompt_cache(model, bits=8)
    drafts = nybble.mlx_lm.make_prompt_cache(draft, bits=4)
    steps = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=3, max_tokens=24, prompt_cache=caches + drafts
    )
    speculated = [int(token) for token, _, _ in steps]
    greedy = generate_step(
        prompt, model, max_tokens=24, prompt_cache=nybble.mlx_lm.make_prompt_cache(model, bits=8)
    )
    assert speculated == [int(token) for token, _ in greedy]


# ---- The cache as mlx-lm probes it ---------------------------------------------------------------


def filled(count: int = 10, **options: Any) -> Any:
    mx.random.seed(count)
    cache = Ours(**options)
    cache.update_and_fetch(*(mx.random.normal((1, 2, count, 64)) for _ in "kv"))
    return cache


def test_every_attribute_is_there() -> None:
    """Field case 67: what has `bits` has all else that mlx-lm's quantized path reads."""
    theirs = Theirs()
    for cache in (Ours(), filled()):
        assert isinstance(cache, Theirs) and isinstance(cache, cache_module._BaseCache)
        missing = [name for name in dir(theirs) if not hasattr(cache, name)]
        assert missing == []
    assert type(Ours()).__name__ == "QuantizedKVCache"  # what saved files call it
    assert not hasattr(Ours(), "to_quantized")  # mlx-lm would quantize it again
    assert Ours().empty() and Ours().nbytes == 0 and Ours().offset == 0


def test_length_at_every_step() -> None:
    """Field case 69."""
    cache, k = Ours(64, 4), mx.random.normal((1, 2, 7, 64))
    cache.update_and_fetch(k, k)
    assert cache.offset == cache.size() == 7
    for step in range(3):
        keys, values = cache.update_and_fetch(k[:, :, :1], k[:, :, :1])
        assert cache.offset == 8 + step and keys.shape == values.shape == (1, 2, 8 + step, 64)
    assert cache.trim(4) == 4 and cache.offset == 6
    assert cache.trim(100) == 6 and cache.offset == 0 and not cache.empty()
    cache.update_and_fetch(k, k)
    assert cache.offset == 7 and cache.is_trimmable()


def test_masks_are_mlx_lms() -> None:
    ours, theirs = filled(5), Theirs()
    theirs.offset = 5
    assert ours.make_mask(1, return_array=False, window_size=None) is None
    assert ours.make_mask(3, return_array=False, window_size=None) == "causal"
    for arguments in ({"window_size": 4, "return_array": True}, {"window_size": 2}):
        arguments = {"return_array": False, **arguments}
        assert mx.array_equal(ours.make_mask(3, **arguments), theirs.make_mask(3, **arguments))


def test_evaluating_the_state_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    looked: list[int] = []
    original = Ours._state_items
    monkeypatch.setattr(Ours, "_state_items", lambda self: looked.append(1) or original(self))
    mx.eval([c.state for c in [cache, Ours()]])
    assert looked == []
    keys, values, offset, group_size, bits = cache.state
    assert (offset, group_size, bits) == (10, 64, 8) and len(looked) == 1
    assert keys[0].shape == (1, 2, 10, 16) and values[1].shape == (1, 2, 10, 1)


def test_a_copy_is_its_own() -> None:
    cache = filled()
    other = copy.deepcopy(cache)
    cache.trim(3)
    assert other.offset == 10 and cache.offset == 7
    assert all(mx.array_equal(a[:, :, :7], b) for a, b in zip(other.keys, cache.keys))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_saved_by_one_loaded_by_the_other(bits: int, dtype: mx.Dtype, tmp_path: Path) -> None:
    """Field cases 44 and 45: length, bytes and what follows are those of the cache saved."""
    mx.random.seed(9)
    k, v, more = (mx.random.normal((1, 2, n, 64)).astype(dtype) for n in (13, 13, 2))
    file = str(tmp_path / "cache.safetensors")
    for first, second in ((Ours, Theirs), (Theirs, Ours), (Ours, Ours)):
        saved = [first(64, bits) for _ in range(2)]
        for cache in saved:
            cache.update_and_fetch(k, v)
            cache.trim(2)
        cache_module.save_prompt_cache(file, saved, {"model": "tiny"})
        if second is Ours:
            nybble.mlx_lm.install()
        try:
            loaded, metadata = cache_module.load_prompt_cache(file, return_metadata=True)
        finally:
            nybble.mlx_lm.uninstall()
        assert metadata == {"model": "tiny"} and [type(c) for c in loaded] == [second] * 2
        for cache, other in zip(saved, loaded):
            assert other.offset == 11 and (other.bits, other.group_size) == (bits, 64)
            for one in (cache, other):
                one.update_and_fetch(more, more)
            for mine, theirs in zip((cache.keys, cache.values), (other.keys, other.values)):
                for a, b in zip(mine, theirs):
                    assert a.dtype == b.dtype and mx.array_equal(a[:, :, :13], b[:, :, :13])
    assert Path(file).stat().st_size < 20_000  # 11 tokens, not a capacity


def test_two_widths(installed: None, tmp_path: Path) -> None:
    model, forced = tiny("llama"), tokens(1, 30)
    caches = nybble.mlx_lm.make_prompt_cache(model, bits=8, value_bits=4, group_size=32)
    expected = teacher_forced(model, caches, forced[:, :20], 15)
    file = str(tmp_path / "cache.safetensors")
    cache_module.save_prompt_cache(file, caches)
    loaded = cache_module.load_prompt_cache(file)
    assert [(c.bits, c.value_bits, c.offset) for c in loaded] == [(8, 4, 20)] * 3
    after = [teacher_forced(model, c, forced[:, 20:], 5) for c in (caches, loaded)]
    assert np.array_equal(*after) and np.isfinite(expected).all()


# ---- What is refused ------------------------------------------------------------------------------


def test_refused() -> None:
    with pytest.raises(NybbleError, match="bits is 7") as error:
        Ours(64, 7)
    assert error.value.status == Status.BITS
    with pytest.raises(NybbleError, match="group_size is 48"):
        Ours(48, 4)
    cache = Ours(64, 4)
    with pytest.raises(NybbleError, match="96") as error:
        cache.update_and_fetch(mx.zeros((1, 2, 3, 96)), mx.zeros((1, 2, 3, 96)))
    assert error.value.status == Status.GROUP_SIZE and cache.empty()
    cache = filled()
    with pytest.raises(NybbleError, match="another model"):
        cache.update_and_fetch(mx.zeros((1, 4, 1, 64)), mx.zeros((1, 4, 1, 64)))
    k = mx.full((1, 2, 1, 64), float("nan"))
    with pytest.raises(NybbleError, match="NaN"):
        cache.update_and_fetch(k, k)
    assert cache.offset == 10
    rows = cache.keys_and_values()
    with pytest.raises(TypeError, match="quantized attention alone"):
        rows[0][0]
    cache.trim(1)
    q = mx.zeros((1, 4, 1, 64))
    with pytest.raises(NybbleError, match="held 10 when"):
        nybble.mlx_lm._quantized_scaled_dot_product_attention(q, *rows, 1.0, None)


def test_other_caches_are_refused() -> None:
    class Model:
        layers = (1, 2)

        def make_cache(self) -> list[Any]:
            return [cache_module.KVCache(), cache_module.RotatingKVCache(8)]

    with pytest.raises(NybbleError, match="layer 1 needs a RotatingKVCache") as error:
        nybble.mlx_lm.make_prompt_cache(Model())
    assert error.value.status == Status.UNSUPPORTED
