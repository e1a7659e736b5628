# SPDX-License-Identifier: Apache-2.0
"""The Python package: arrays of three libraries, against arithmetic spelled out in NumPy."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import nybble
from nybble import NybbleError, Status

KINDS = ("numpy", "torch", "mlx")


def to_kind(array: np.ndarray, kind: str, dtype: str = "float32") -> Any:
    if kind == "torch":
        return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))
    if kind == "mlx":
        return mx.array(array).astype(getattr(mx, dtype))
    return array.astype(dtype)


def to_f64(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.double().numpy()
    if isinstance(array, mx.array):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    return np.asarray(array).astype(np.float64)


def randoms(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """In double precision, with lse."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        rows, tokens = scores.shape[-2:]
        seen = np.arange(tokens) <= np.arange(tokens - rows, tokens)[:, None]
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ v, (top + np.log(total))[..., 0]


def close(found: Any, expected: np.ndarray, dtype: str) -> bool:
    """Rounding of the output, and what integer dots add to EXACT (docs/numerics.md, section 8)."""
    unit = {"float32": 2.0**-12, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    return bool(np.all(np.abs(to_f64(found) - expected) <= unit * (1 + np.abs(expected))))


# ---- Quantize ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_is_mlx(kind: str, bits: int) -> None:
    x = randoms(2, 3, 5, 128)
    theirs = mx.quantize(mx.array(x), 32, bits)
    ours = nybble.quantize(to_kind(x, kind), bits, 32)
    for mine, other in zip((ours.codes, ours.scales, ours.biases), theirs):
        assert type(mine).__module__.partition(".")[0] == kind
        assert np.array_equal(np.asarray(memoryview(np.asarray(mine))), np.array(other))
    back = nybble.dequantize(ours)
    assert np.array_equal(to_f64(back), to_f64(mx.dequantize(*theirs, 32, bits)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["torch", "mlx"])
def test_quantize_halves(kind: str, dtype: str) -> None:
    x = to_kind(randoms(4, 64), kind, dtype)
    ours = nybble.quantize(x, 4, 64)
    theirs = mx.quantize(to_kind(to_f64(x).astype(np.float32), "mlx", dtype), 64, 4)
    assert np.array_equal(to_f64(ours.scales), to_f64(theirs[1]))
    assert np.array_equal(np.asarray(ours.codes), np.array(theirs[0]))


def test_quantize_into_ones_own() -> None:
    rows = nybble.quantize(randoms(3, 64), 8, 32)
    out = np.full((3, 64), np.nan, np.float16)
    assert nybble.dequantize(rows, out=out) is out
    assert np.array_equal(out, nybble.dequantize(rows, "f16"))
    with pytest.raises(NybbleError, match=r"out is \(3, 65\); it must be \(3, 64\)"):
        nybble.dequantize(rows, out=np.empty((3, 65), np.float32))
    out.flags.writeable = False
    with pytest.raises(NybbleError, match="read-only"):
        nybble.dequantize(rows, out=out)


# ---- Attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_cache_and_attention(kind: str, dtype: str) -> None:
    if kind == "numpy" and dtype == "bfloat16":
        with pytest.raises(TypeError, match="bfloat16"):  # it has none: nothing to test
            np.dtype(dtype)
        return

    def affine(bits: int) -> nybble.Format:
        return nybble.affine(bits, 32, "f32")  # so that dequantizing in f32 is as good as exact

    cache = nybble.Cache(2, 2, 64, 32, key=affine(8), value=affine(4))
    for step, tokens in enumerate((37, 1, 5)):
        k = to_kind(randoms(2, 2, tokens, 64, seed=step), kind, dtype)
        v = to_kind(randoms(2, 2, tokens, 32, seed=9 + step), kind, dtype)
        cache.append(k, v)
    q = to_kind(randoms(2, 6, 5, 64, seed=5), kind, dtype)
    out, lse = nybble.attention(q, cache, return_lse=True)
    assert type(out) is type(q) and out.dtype == q.dtype and tuple(out.shape) == (2, 6, 5, 32)
    k, v = (to_f64(nybble.dequantize(rows, "f32")) for rows in (cache.keys(), cache.values()))
    expected, expected_lse = expected_attention(to_f64(q), k, v)
    assert close(out, expected, dtype)
    assert close(lse, expected_lse, "float32")
    assert cache.lengths == [43, 43] and len(cache) == 43


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(kind: str) -> None:
    """[B, L, H, D] seen as [B, H, L, D], and every second token: read where they lie."""
    q, k, v = (randoms(1, 12, 4, 64, seed=seed) for seed in range(3))
    out = nybble.attention(*(to_kind(x, kind).swapaxes(1, 2)[:, :, ::2] for x in (q, k, v)))
    expected = expected_attention(*(x.swapaxes(1, 2)[:, :, ::2].astype(float) for x in (q, k, v)))
    assert close(out, expected[0], "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_rows_in_place(kind: str) -> None:
    """A cache of one's own: capacity beyond the length, lengths of its own, codes of MLX."""
    k, v = randoms(2, 2, 40, 64, seed=1), randoms(2, 2, 40, 64, seed=2)
    rows = [nybble.quantize(to_kind(x, kind), 4, 64) for x in (k, v)]
    lengths = np.array([40, 13], np.int32)
    q = randoms(2, 4, 1, 64, seed=3)
    out = nybble.attention(to_kind(q, kind), *rows, lengths=to_kind(lengths, kind, "int32"))
    for b, length in enumerate(lengths):
        kb, vb = (to_f64(nybble.dequantize(r))[b : b + 1, :, :length] for r in rows)
        assert close(out[b : b + 1], expected_attention(q[b : b + 1], kb, vb)[0], "float32")
    with pytest.raises(NybbleError, match=r"lengths\[1\] is 41") as error:
        nybble.attention(to_kind(q, kind), *rows, lengths=[40, 41])
    assert error.value.status == Status.LENGTH


def test_paths_and_roundings_are_counted() -> None:
    context = nybble.Context(threads=1)
    q = torch.randn(1, 2, 3, 32)
    for path in ("fused", "compat", "auto"):
        for rounding in ("exact", "mlx"):
            nybble.attention(q, q, q, path=path, rounding=rounding, context=context)
    counters = context.counters()
    assert counters.attention_fused == 4 and counters.attention_compat == 2
    context.clear_counters()
    assert sum(context.counters()) == 0


def test_prepared_call() -> None:
    cache = nybble.Cache(1, 2, 64)
    cache.append(torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64))
    q, out = torch.randn(1, 4, 1, 64), torch.full((1, 4, 1, 64), float("nan"))
    call = nybble.AttentionCall(q, cache, out=out)
    for _ in range(300):  # over several growths
        cache.append(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        q.normal_()
        call.run()
    assert torch.equal(out, nybble.attention(q, cache))


def test_threads_do_not_meet() -> None:
    """One context, several threads, each with its cache: the bits of one alone."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        cache = nybble.Cache(1, 2, 64)
        cache.append(*torch.randn(2, 1, 2, 200, 64, generator=generator))
        q = torch.randn(1, 4, 7, 64, generator=generator)
        first = nybble.attention(q, cache)
        for _ in range(50):
            if not torch.equal(first, nybble.attention(q, cache)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_merge(kind: str) -> None:
    """Over three parts and over all at once; the formula is the library's own test's."""
    q, k, v = randoms(2, 4, 3, 64), randoms(2, 2, 40, 64, seed=1), randoms(2, 2, 40, 32, seed=2)
    q, k, v = (to_kind(x, kind) for x in (q, k, v))
    options = {"mask": "none", "return_lse": True}
    ranges = (slice(0, 7), slice(7, 8), slice(8, 40))
    parts = [nybble.attention(q, k[:, :, r], v[:, :, r], **options) for r in ranges]
    out, lse = nybble.merge(*zip(*parts))
    whole, whole_lse = nybble.attention(q, k, v, **options)
    assert type(out) is type(q) and close(out, to_f64(whole), "float32")
    assert close(lse, to_f64(whole_lse), "float32")
    with pytest.raises(NybbleError, match="outs has 0 parts"):
        nybble.merge([], [])
    with pytest.raises(NybbleError, match=r"lses\[1\] is \(2, 4, 3, 32\)"):
        nybble.merge([parts[0][0]] * 2, [parts[0][1], parts[0][0]])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_more(kind: str) -> None:
    """Each option against its spelled-out meaning."""
    q, k, v = (randoms(1, 2, n, 64, seed=n) for n in (5, 12, 12))
    scores = (q @ k.swapaxes(-1, -2)).astype(float) / 8
    rows, tokens = np.arange(7, 12)[:, None], np.arange(12)
    causal = tokens <= rows
    bias = randoms(1, 2, 5, 12, seed=3)

    def expected(scores: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True)
        return weights / (total + (0 if sinks is None else np.exp(sinks)[:, None, None])) @ v

    def hidden(seen: np.ndarray) -> np.ndarray:
        return np.where(seen, scores, -np.inf)

    sinks = np.array([0.5, -1], np.float32)
    window = causal & ((tokens > rows - 4) | (tokens < 2))
    capped = np.where(causal, 0.7 * np.tanh(scores / 0.7), -np.inf)
    slopes = np.array([0.3, 0.1], np.float32)
    alibi = hidden(causal) - slopes[:, None, None] * np.abs(rows - tokens)
    cases: list[tuple[dict[str, Any], np.ndarray]] = [
        ({"mask": to_kind(causal, kind, "bool" if kind != "mlx" else "bool_")}, hidden(causal)),
        ({"mask": to_kind(bias, kind)}, scores + bias),
        ({"window_tokens": 4, "window_keep_tokens": 2}, hidden(window)),
        ({"softcap": 0.7}, capped),
        ({"alibi_slopes": to_kind(slopes, kind)}, alibi),
        ({"mask": "causal_top_left"}, hidden(tokens <= rows - 7)),
    ]
    arrays = [to_kind(x, kind) for x in (q, k, v)]
    for options, these in cases:
        assert close(nybble.attention(*arrays, **options), expected(these), "float32"), options
    with_sinks = nybble.attention(*arrays, sinks=[0.5, -1])
    assert close(with_sinks, expected(hidden(causal), sinks), "float32")


# ---- GeGLU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_geglu_is_the_steps(dtype: str) -> None:
    both = (8 * torch.randn(3, 5, 128)).to(getattr(torch, dtype))
    gate, up = both[..., :64], both[..., 64:]
    out = nybble.geglu(gate, up)
    theirs = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    # Ten roundings to the dtype, each of at most half a unit in the last place.
    unit = torch.finfo(gate.dtype).eps
    assert bool(((out.double() - theirs).abs() <= 10 * unit * (1 + theirs.abs())).all())
    assert torch.equal(nybble.geglu(gate, up, path="compat"), out)
    in_place = both.clone()
    nybble.geglu(in_place[..., :64], in_place[..., 64:], out=in_place[..., :64])
    assert torch.equal(in_place[..., :64], out) and torch.equal(in_place[..., 64:], up)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_geglu_beside_pytorchs(dtype: torch.dtype) -> None:
    """Every finite gate: the bits of PyTorch's operations one by one; its own activation, which
    rounds once, differs in the last bits (docs/python.md)."""
    gate = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    gate = gate[torch.isfinite(gate)]
    up = torch.randn(gate.shape, generator=torch.manual_seed(0)).to(dtype)
    x, (k, c) = gate.float(), (torch.tensor(n, dtype=dtype) for n in (0.044715, 0.7978845608))
    z = c * (gate + k * (x * x * x).to(dtype))
    steps = 0.5 * gate * (1 + z.double().tanh().to(dtype)) * up
    assert torch.equal(nybble.geglu(gate, up), steps)
    own = torch.nn.functional.gelu(gate, approximate="tanh")
    once = torch.nn.functional.gelu(x, approximate="tanh").to(dtype)
    assert torch.equal(own, once)
    share = float((nybble.geglu(gate, torch.ones_like(gate)) != own).float().mean())
    assert 0.005 < share < (0.25 if dtype == torch.float16 else 0.03)


def test_geglu_refuses() -> None:
    gate = torch.zeros(2, 4)
    with pytest.raises(NybbleError, match="up is float16 and gate float32"):
        nybble.geglu(gate, gate.half())
    with pytest.raises(NybbleError, match=r"up is \(2, 3\)"):
        nybble.geglu(gate, gate[:, :3])
    with pytest.raises(NybbleError, match="stride 4 along its last axis"):
        nybble.geglu(gate.T, gate.T)


# ---- The cache ----------------------------------------------------------------------------------


def test_trim_reset_reserve() -> None:
    cache = nybble.Cache(2, 1, 32, key=nybble.affine(4, 32))
    k, v = torch.randn(2, 2, 1, 10, 32)
    cache.reserve(64)
    before = cache.usage().reallocations
    cache.append(k, v)
    assert cache.usage().reallocations == before and cache.usage().used_bytes > 0
    assert cache.trim(3) == 3 and cache.trim(2, sequence=1) == 2 and cache.lengths == [7, 5]
    assert cache.trim(100, sequence=0) == 7
    cache.reset()
    assert cache.lengths == [0, 0] and cache.usage().used_bytes == 0


def test_reorder() -> None:
    cache = nybble.Cache(3, 1, 32, key=nybble.affine(8, 32))
    k, v = torch.randn(2, 3, 1, 10, 32)
    cache.append(k, v)
    cache.trim(4, sequence=1)
    query = torch.randn(3, 2, 1, 32)
    before = nybble.attention(query[:1].expand(3, 2, 1, 32), cache)
    cache.reorder(torch.tensor([2, 1, 1, 0]))
    assert cache.batch == 4 and cache.lengths == [10, 6, 6, 10]
    after = nybble.attention(query[:1].expand(4, 2, 1, 32), cache)
    assert torch.equal(after, before[[2, 1, 1, 0]])
    with pytest.raises(NybbleError, match="4"):
        cache.reorder([0, 4])
    assert cache.batch == 4


@pytest.mark.parametrize("kind", KINDS)
def test_starts_are_left_padding(kind: str) -> None:
    k, v, q = randoms(2, 2, 12, 64), randoms(2, 2, 12, 64, seed=1), randoms(2, 4, 3, 64, seed=2)
    starts = np.array([0, 5], np.int32)
    out = nybble.attention(
        *(to_kind(x, kind) for x in (q, k, v)), starts=to_kind(starts, kind, "int32")
    )
    for b, start in enumerate(starts):
        alone = nybble.attention(q[b : b + 1], k[b : b + 1, :, start:], v[b : b + 1, :, start:])
        assert np.array_equal(to_f64(out[b : b + 1]), to_f64(alone))


@pytest.mark.parametrize("stored", [nybble.affine(3, 32), nybble.plain("bf16")], ids=str)
def test_deep_copy(stored: nybble.Format) -> None:
    """Of its own, with the same bytes and lengths; what either does the other does not see."""
    cache = nybble.Cache(2, 3, 32, 64, key=stored, value=nybble.affine(8, 32), max_tokens=20)
    assert copy.deepcopy(cache).lengths == [0, 0]
    cache.append(torch.randn(2, 3, 10, 32), torch.randn(2, 3, 10, 64), padding=[0, 4])
    cache.reserve(19)
    query = torch.randn(2, 6, 1, 32)
    before = nybble.attention(query, cache)
    for copied in (copy.deepcopy(cache), copy.copy([cache])[0].__copy__()):
        assert copied is not cache and copied.context is cache.context
        assert copied.lengths == [10, 6]
        assert copied.usage().capacity_tokens == cache.usage().capacity_tokens >= 19
        assert torch.equal(nybble.attention(query, copied), before)
        copied.append(torch.randn(2, 3, 5, 32), torch.randn(2, 3, 5, 64))
        assert copied.lengths == [15, 11] and cache.lengths == [10, 6]
        assert torch.equal(nybble.attention(query, cache), before)
        with pytest.raises(NybbleError, match="20"):
            copied.append(torch.randn(2, 3, 6, 32), torch.randn(2, 3, 6, 64))


@pytest.mark.parametrize(
    "options",
    [
        {"window_tokens": 8},
        {"page_tokens": 16},
        {"first_tokens": 2, "part_dtype": "bf16"},
        {"last_tokens": 2, "part_dtype": "bf16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_copies_that_are_refused(options: dict[str, Any]) -> None:
    cache = nybble.Cache(1, 1, 32, key=nybble.affine(4, 32), **options)
    assert copy.deepcopy(cache).lengths == [0]
    cache.append(torch.randn(1, 1, 3, 32), torch.randn(1, 1, 3, 32))
    with pytest.raises(NybbleError, match="is not copied; make another one") as caught:
        copy.deepcopy(cache)
    assert caught.value.status is Status.UNSUPPORTED
    with pytest.raises(NybbleError, match="is not pickled"):
        pickle.dumps(cache)


def test_plain_cache_keeps_the_elements() -> None:
    cache = nybble.Cache(1, 2, 48, 80, key=nybble.plain("f32"))
    k, v = torch.randn(1, 2, 6, 48), torch.randn(1, 2, 6, 80)
    cache.append(k, v)
    assert np.array_equal(cache.keys(), k.numpy()) and np.array_equal(cache.values(), v.numpy())


def test_cache_outlives_names() -> None:
    """The context goes before the cache by name, after it in truth."""
    context = nybble.Context(threads=1)
    cache = nybble.Cache(1, 1, 32, key=nybble.affine(4, 32), context=context)
    cache.append(torch.randn(1, 1, 3, 32), torch.randn(1, 1, 3, 32))
    del context
    gc.collect()
    out = nybble.attention(torch.randn(1, 1, 1, 32), cache)
    assert bool(torch.isfinite(out).all())


# ---- What is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], Status, str]] = {
    "isa": (lambda: nybble.Context(isa="mmx"), Status.ENUM, "isa is 'mmx'"),
    "threads": (lambda: nybble.Context(threads=-1), Status.VALUE, "threads is -1"),
    "bits": (lambda: nybble.quantize(randoms(2, 64), 7), Status.BITS, "is 7"),
    "group": (lambda: nybble.quantize(randoms(2, 80), 4), Status.GROUP_SIZE, "80"),
    "integers": (
        lambda: nybble.quantize(np.zeros((2, 64), np.int32)), Status.DTYPE, "array is int32"
    ),
    "doubles": (lambda: nybble.quantize(np.zeros((2, 64))), Status.DTYPE, "array is another"),
    "NaN": (
        lambda: nybble.quantize(np.full((2, 64), np.nan, np.float32)),
        Status.NON_FINITE,
        "NaN",
    ),
    "last axis": (
        lambda: nybble.quantize(randoms(64, 64).T), Status.STRIDE, "contiguous"
    ),
    "axes": (lambda: nybble.quantize(randoms(64)), Status.SHAPE, "has 1 axes"),
    "cache group": (lambda: nybble.Cache(1, 1, 80), Status.GROUP_SIZE, "80"),
    "cache heads": (lambda: nybble.Cache(1, 0, 64), Status.SHAPE, "kv_heads is 0"),
    "append shape": (
        lambda: nybble.Cache(1, 2, 64).append(torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 4, 64)),
        Status.SHAPE,
        r"value is \(1, 2, 4, 64\); it must be \(1, 2, 3, 64\)",
    ),
    "max_tokens": (
        lambda: nybble.Cache(1, 1, 64, max_tokens=2).append(*torch.zeros(2, 1, 1, 3, 64)),
        Status.LENGTH,
        "at most 2 tokens",
    ),
    "heads": (
        lambda: nybble.attention(torch.zeros(1, 3, 1, 64), *torch.zeros(2, 1, 2, 4, 64)),
        Status.HEADS,
        "multiple",
    ),
    "query dim": (
        lambda: nybble.attention(torch.zeros(1, 2, 1, 32), *torch.zeros(2, 1, 2, 4, 64)),
        Status.SHAPE,
        r"query is \(1, 2, 1, 32\)",
    ),
    "mask word": (
        lambda: nybble.attention(*torch.zeros(3, 1, 1, 1, 64), mask="diagonal"),
        Status.ENUM,
        "'diagonal'",
    ),
    "out overlaps": (
        lambda: (q := torch.zeros(1, 1, 1, 64)) is None or nybble.attention(q, q, q, out=q),
        Status.OVERLAP,
        "out",
    ),
    "value missing": (
        lambda: nybble.attention(*torch.zeros(2, 1, 1, 1, 64)), Status.VALUE, "value is None"
    ),
    "codes": (
        lambda: nybble.Quantized(*np.zeros((3, 4, 8), np.float32), bits=4),
        Status.DTYPE,
        "codes are float32",
    ),
    "codes width": (
        lambda: nybble.Quantized(
            np.zeros((4, 8), np.uint32), *np.zeros((2, 4, 2), np.float32), bits=4
        ),
        Status.SHAPE,
        "the first must be 16",
    ),
    "meta tensor": (
        lambda: nybble.quantize(torch.zeros(2, 64, device="meta")), Status.POINTER, "meta"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, status, words = REFUSED[name]
    with pytest.raises(NybbleError, match=words) as error:
        call()
    assert error.value.status == status


def test_not_an_array() -> None:
    with pytest.raises(TypeError, match="list is no array"):
        nybble.quantize([[1.0]])
