# SPDX-License-Identifier: Apache-2.0
"""transformers' models over a NybbleCache, against eager attention over the dequantized cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

import nybble
from nybble import NybbleError, Status
from nybble.transformers import NybbleCache

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# The sizes that Gemma 4 has: rows of 256 in layers with windows, of 512 in the others.
GEMMA4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 200,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
# Windows of 8 tokens, which prompts are longer than.
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3, windows": (
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 8, **ALTERNATING},
    ),
    "phi3": (Phi3Config, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, {"sliding_window": 8, "attn_logit_softcapping": 2.0, **ALTERNATING}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 8, **ALTERNATING}),
    "gemma4": (Gemma4TextConfig, GEMMA4),
    "gemma4, values are keys": (
        Gemma4TextConfig,
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4, shared": (Gemma4TextConfig, {**GEMMA4, "num_kv_shared_layers": 1}),
    "gpt-oss": (
        GptOssConfig,
        {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    ),
}
VOCABULARY = 200
torch.set_num_threads(1)  # the models are tiny


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tiny(kind: str, implementation: str, layers: int = 3) -> Any:
    """The same weights at every call."""
    torch.manual_seed(layers)
    make, options = CONFIGS[kind]
    if layers != 3 and "layer_types" in options:
        options = {**options, "layer_types": options["layer_types"][:layers]}
        options.pop("num_kv_shared_layers", None)
    sizes = {} if kind == "phi3" else {"head_dim": 64}
    sizes |= {name: options[name] for name in ("head_dim",) if name in options}
    options = {name: value for name, value in options.items() if name not in sizes}
    config = make(
        hidden_size=256 if kind == "phi3" else 128,
        num_hidden_layers=layers,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **sizes,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # zero at first
            torch.nn.init.normal_(parameter)
    return model


class DequantizedLayer(DynamicLayer):
    """Holds what NybbleLayer holds, dequantized: the same codes, spelled out."""

    widths, group_size = (8, 8), 64

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        rounded = (
            nybble.dequantize(nybble.quantize(states, bits, self.group_size))
            for states, bits in zip((key_states, value_states), self.widths)
        )
        return super().update(*rounded, *args, **kwargs)


class DequantizedSlidingLayer(DequantizedLayer, DynamicSlidingWindowLayer):
    pass


def dequantized(
    model: Any, bits: Any, value_bits: Any = None, group_size: int = 64
) -> TransformersCache:
    layers = []
    kinds, all_options = get_layer_types_and_kwargs(model.config)
    for i, (kind, options) in enumerate(zip(kinds, all_options)):
        if kind == "dummy":
            layers.append(DummyLayer())
            continue
        layer = DequantizedSlidingLayer(**options) if options else DequantizedLayer()
        width = bits if isinstance(bits, int) else bits[i]
        layer.widths = (width, value_bits or width)
        layer.group_size = group_size
        layers.append(layer)
    return TransformersCache(layers=layers)


def prompt(batch: int = 2, tokens: int = 20) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=torch.manual_seed(7))


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids = prompt(3, 20)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 7, 3)):
        mask[row, :padding] = 0
        ids[row, :padding] = 0
    return ids, mask


def teacher_forced(model: Any, cache: Any, ids: torch.Tensor, parts: list[int]) -> torch.Tensor:
    logits = []
    for part in ids.split(parts, dim=1):
        logits.append(model(part, cache=cache).logits)
    return torch.cat(logits, dim=1)


# Both compute in f32. In one layer both quantize the same floats, and what differs is the rounding of
# sums: 7e-6 at most here. From the second layer on the floats differ by that much, and a value that
# stands that near to the middle between two codes may fall to either side, one step of one element,
# which one depends on the machine: that moved logits by up to 4e-2 here, where quantizing to 4 bits
# moves them by 1.2.
# The mean, which one such token cannot move far, is held to a thirtieth.
ONE_LAYER, MORE_LAYERS = 1e-3, 0.3


def expect_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    difference = (found - expected).abs()
    assert bool((difference <= tolerance).all()) and bool(difference.mean() <= tolerance / 30)
    best = expected.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 2 * tolerance
    assert tolerance > ONE_LAYER or bool(clear.any())
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


BITS: dict[str, dict[str, Any]] = {
    "8": {"bits": 8},
    "4": {"bits": 4},
    "K8V4": {"bits": 8, "value_bits": 4, "group_size": 32},
    "by layer": {"bits": [6, 8, 5]},
}


def check_teacher_forced(kind: str, layers: int, widths: dict[str, Any], limit: float) -> None:
    """A prompt in two pieces, then token by token."""
    ids, parts = prompt(2, 40), [15, 13, *[1] * 12]
    model, eager = tiny(kind, "nybble", layers), tiny(kind, "eager", layers)
    context = nybble.default_context()
    context.clear_counters()
    cache = NybbleCache(model.config, **widths)
    found = teacher_forced(model, cache, ids, parts)
    counters = context.counters()
    assert counters.attention_fused == layers * 14 and counters.attention_compat == 0
    expected = teacher_forced(eager, dequantized(eager, **widths), ids, parts)
    expect_same(found, expected, limit)
    assert cache.get_seq_length() == 40 and cache.batch_size == 2
    widest = 512 if kind.startswith("gemma4") else 64
    assert cache.nbytes() < layers * 2 * 2 * 2 * 64 * 4 * widest  # f32 of as many


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_one_layer(kind: str, bits: int) -> None:
    check_teacher_forced(kind, 1, {"bits": bits}, ONE_LAYER)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_more_layers(kind: str, bits: str) -> None:
    check_teacher_forced(kind, 3, BITS[bits], MORE_LAYERS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    """Ours is no farther from f32 than eager is."""
    ids, parts = prompt(2, 24), [20, 1, 1, 1, 1]
    model, eager = (tiny("llama", word, layers=1).to(dtype) for word in ("nybble", "eager"))
    found = teacher_forced(model, NybbleCache(model.config, bits=8), ids, parts)
    theirs = teacher_forced(eager, dequantized(eager, 8), ids, parts)
    exact = teacher_forced(eager.float(), dequantized(eager, 8), ids, parts)
    ours_error, eager_error = ((x - exact).abs().mean() for x in (found, theirs))
    assert found.dtype == dtype and bool(ours_error <= 1.1 * eager_error)


# ---- generate ------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams, several": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "returned": {"do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 6},
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize(
    ("kind", "way"), [("llama", way) for way in WAYS] + [(kind, "greedy") for kind in CONFIGS][1:]
)
def test_generate(kind: str, way: str, padded: bool) -> None:
    """Token by token the same: in one layer, where no code falls to another side."""
    ids, mask = left_padded() if padded else (prompt(3, 20), torch.ones(3, 20, dtype=torch.long))
    made = []
    for word in ("nybble", "eager"):
        model = tiny(kind, word, layers=1)
        cache = NybbleCache(model.config, 8) if word == "nybble" else dequantized(model, 8)
        torch.manual_seed(1)
        options = {"attention_mask": mask, "max_new_tokens": 12, **WAYS[way]}
        made.append(model.generate(ids, cache=cache, **options))
    assert torch.equal(*made)


def test_assisted() -> None:
    """Drafted tokens that are refused leave no trace: crop."""
    model, assistant = tiny("llama", "nybble"), tiny("llama", "nybble", layers=1)
    ids = prompt(1, 20)
    options = {"max_new_tokens": 24, "do_sample": False}
    greedy = model.generate(ids, cache=NybbleCache(model.config, 8), **options)
    cache = NybbleCache(model.config, 8)
    assisted = model.generate(ids, cache=cache, assistant_model=assistant, **options)
    assert torch.equal(greedy, assisted)
    assert cache.get_seq_length() == 20 + 24 - 1


def test_padding_changes_no_bit() -> None:
    """Field case 49: a left-padded row is its unpadded run."""
    ids, mask = left_padded()
    model = tiny("qwen3", "nybble")
    cache = NybbleCache(model.config, 4)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate() counts them
    together = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
    for row, padding in enumerate((0, 7, 3)):
        alone_cache = NybbleCache(model.config, 4)
        alone = model(ids[row : row + 1, padding:], cache=alone_cache).logits
        # Matrix products of another batch may sum in another order.
        expect_same(together[row : row + 1, padding:], alone, MORE_LAYERS)
        for layer, alone_layer in zip(cache.layers, alone_cache.layers):
            assert layer.stored.lengths[row] == 20 - padding == len(alone_layer.stored)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_a_nybble_cache(kind: str) -> None:
    """Plain tensors: no cache, and transformers' own."""
    model, eager = tiny(kind, "nybble"), tiny(kind, "eager")
    ids, mask = left_padded()
    for options in ({"use_cache": False}, {"attention_mask": mask, "use_cache": False}):
        found, expected = (m(ids, **options).logits for m in (model, eager))
        seen = options.get("attention_mask", torch.ones_like(ids)).bool()
        expect_same(found[seen], expected[seen], ONE_LAYER)
    parts = [12, 6, 1, 1]
    both = (teacher_forced(m, DynamicCache(config=m.config), ids, parts) for m in (model, eager))
    expect_same(*both, ONE_LAYER)  # nothing is quantized


# ---- The cache ------------------------------------------------------------------------------------


def test_length_at_every_step() -> None:
    """Field case 69: after prefill, decode steps, crop and reuse."""
    model, ids = tiny("llama", "nybble"), prompt(2, 12)
    cache = NybbleCache(model.config, 4)
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(5, 0) == (5, 0)
    for length, part in ((8, ids[:, :8]), (9, ids[:, 8:9]), (12, ids[:, 9:])):
        model(part, cache=cache)
        assert [cache.get_seq_length(i) for i in range(3)] == [length] * 3
        assert cache.layers[2].stored.lengths == [length] * 2
    assert cache.get_mask_sizes(3, 1) == (15, 0) and cache.get_max_length() == -1
    cache.crop(-5)
    assert cache.get_seq_length() == 7 and cache.layers[0].stored.lengths == [7, 7]
    again = model(ids[:, 7:], cache=cache).logits
    fresh = NybbleCache(model.config, 4)
    model(ids[:, :7], cache=fresh)
    assert torch.equal(again, model(ids[:, 7:], cache=fresh).logits)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    model(prompt(5, 3), cache=cache)
    assert cache.batch_size == 5 and cache.get_seq_length() == 3


def test_deep_copy() -> None:
    """One prompt and several ends to it."""
    model, ids = tiny("llama", "nybble"), prompt(2, 12)
    cache = NybbleCache(model.config, 4, context=nybble.Context(threads=1))
    model(ids[:, :8], cache=cache)
    copied = copy.deepcopy(cache)
    ends = [model(ids[:, 8:], cache=c).logits for c in (copied, cache)]
    assert torch.equal(*ends)
    assert copied.layers[0].stored is not cache.layers[0].stored
    copied.crop(-7)
    assert (copied.get_seq_length(), cache.get_seq_length()) == (5, 12)


def test_batch_operations() -> None:
    """Field case 48: reorder, repeat and select move all that a sequence is."""
    model, ids = tiny("llama", "nybble"), prompt(4, 10)
    step = prompt(1, 1).expand(4, 1)

    def after(change: Any) -> torch.Tensor:
        cache = NybbleCache(model.config, 4)
        model(ids, cache=cache)
        change(cache)
        logits = model(step[:1].expand(cache.batch_size, 1), cache=cache).logits
        assert cache.get_seq_length() == 11
        return logits

    plain = after(lambda cache: None)
    changes: list[tuple[Any, list[int]]] = [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0, 1])), [2, 2, 0, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (lambda cache: cache.batch_select_indices(torch.tensor([3, 1])), [3, 1]),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([True, False, True, False])),
            [0, 2],
        ),
    ]
    for change, sources in changes:
        expect_same(after(change), plain[sources], MORE_LAYERS)


# ---- What is refused -----------------------------------------------------------------------------


def test_refused_at_construction() -> None:
    model = tiny("llama", "nybble")
    with pytest.raises(NybbleError, match="'eager'; it must be 'nybble'") as error:
        NybbleCache(tiny("llama", "eager").config)
    assert error.value.status == Status.UNSUPPORTED
    with pytest.raises(NybbleError, match="group_size is 128") as error:
        NybbleCache(model.config, group_size=128)
    assert error.value.status == Status.GROUP_SIZE
    with pytest.raises(NybbleError, match="bits is 7") as error:
        NybbleCache(model.config, bits=[4, 7, 4])
    assert error.value.status == Status.BITS
    with pytest.raises(NybbleError, match="bits has 2 entries; the model has 3 layers"):
        NybbleCache(model.config, bits=[4, 4])
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(NybbleError, match="layer 1 is 'linear_attention'"):
        NybbleCache(model.config)


def test_refused_in_use() -> None:
    model, ids = tiny("llama", "nybble"), prompt()
    cache = NybbleCache(model.config)
    with pytest.raises(NybbleError, match='attn_implementation="nybble"'):
        tiny("llama", "sdpa")(ids, cache=cache)
    with pytest.raises(NybbleError, match="were not attended by nybble"):
        model(ids, cache=cache)
    cache.reset()
    model(ids, cache=cache)
    with pytest.raises(NybbleError, match="another model or batch"):
        model(prompt(3, 1), cache=cache)
    length, lengths = cache.get_seq_length(), cache.layers[0].stored.lengths
    with pytest.raises(NybbleError, match=f"holds {length} tokens of another model"):
        tiny("llama", "nybble")(ids[:, :1], cache=cache)  # of the same sizes
    assert cache.get_seq_length() == length and cache.layers[0].stored.lengths == lengths
    model(ids[:, :1], cache=cache)
    with pytest.raises(NybbleError, match="must be 0 or negative"):
        cache.crop(4)
    with pytest.raises(NybbleError, match="not offloaded"):
        cache.layers[0].offload()
    with torch.enable_grad(), pytest.raises(NybbleError, match="inference alone"):
        model(ids)
    with pytest.raises(NybbleError, match="it must hold a prompt"):
        nybble.transformers.DecodeGraph(model, NybbleCache(model.config))
    cache.reset()
    tiny("llama", "nybble")(ids, cache=cache)
    cache.reset()
    model(ids, cache=cache)
    with pytest.raises(NybbleError, match="captured on a CUDA device"):
        nybble.transformers.DecodeGraph(model, cache)


def test_other_modules_do_not_see_gradients() -> None:
    """A model in training mode without dropout works under no_grad."""
    model, ids = tiny("llama", "nybble").train(), prompt()
    assert bool(torch.isfinite(model(ids, cache=NybbleCache(model.config)).logits).all())


# ---- GeGLU ---------------------------------------------------------------------------------------


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = NybbleCache(model.config, 4)
    return teacher_forced(model, cache, ids, [10, *[1] * 6])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma4"])
def test_patched_mlps_have_the_bits_of_the_steps(kind: str, dtype: torch.dtype) -> None:
    """Fused against the steps one after the other: KL is 0, and every logit's bit the same."""
    model, ids = tiny(kind, "nybble").to(dtype), prompt(2, 16)
    context = nybble.default_context()
    plain = logits_of(model, ids)
    logits = {}
    for path in ("fused", "compat"):
        assert nybble.transformers.patch_mlp(model, path) == 3
        context.clear_counters()
        logits[path] = logits_of(model, ids)
        counters = context.counters()
        assert (counters.geglu_fused, counters.geglu_compat) == (
            (21, 0) if path == "fused" else (0, 21)
        )
    assert torch.equal(logits["fused"], logits["compat"])
    log_p, log_q = (x.double().log_softmax(-1) for x in (logits["fused"], logits["compat"]))
    assert bool(((log_p.exp() * (log_p - log_q)).sum(-1) == 0).all())
    # Beside PyTorch's own activation: other roundings, the same function.
    assert not torch.equal(plain, logits["fused"])
    mlp, x = model.model.layers[0].mlp, torch.randn(64, 128, dtype=dtype)
    patched = mlp(x)
    assert nybble.transformers.unpatch_mlp(model) == 3
    assert torch.equal(logits_of(model, ids), plain)
    error = (mlp(x) - patched).abs().mean() / mlp(x).abs().mean()
    assert 0 < float(error) < torch.finfo(dtype).eps
    assert nybble.transformers.unpatch_mlp(model) == 0


def test_patch_mlp_refuses() -> None:
    with pytest.raises(NybbleError, match="LlamaForCausalLM has no MLP of GemmaMLP"):
        nybble.transformers.patch_mlp(tiny("llama", "nybble"))
    model = tiny("gemma2", "nybble")
    with pytest.raises(NybbleError, match="path is 'quick'"):
        nybble.transformers.patch_mlp(model, "quick")
    model.model.layers[1].mlp.act_fn = torch.nn.SiLU()
    with pytest.raises(NybbleError, match="activation is SiLU"):
        nybble.transformers.patch_mlp(model)
    assert nybble.transformers.unpatch_mlp(model) == 0
    model = tiny("gemma2", "nybble")
    nybble.transformers.patch_mlp(model)
    with torch.enable_grad(), pytest.raises(NybbleError, match="gate and up require gradients"):
        model.model.layers[0].mlp(torch.zeros(1, 1, 128))
