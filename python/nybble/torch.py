# SPDX-License-Identifier: Apache-2.0
"""nybble as PyTorch operators: torch.ops.nybble.*, for torch.compile and torch.export.

    import nybble.torch

    @torch.compile(fullgraph=True)
    def step(query, key, value, cache):
        cache.append(key, value)
        return nybble.attention(query, cache)

Importing this module registers the operators, each with the shapes and dtypes of its results, so
that compilers see through them, and teaches torch.compile to put them where a compiled function
calls `nybble.attention`, `nybble.geglu`, `Cache.append`. Compiled results have eager's bits: it is
the same call. They compute for inference: no operator has a gradient.

A cache is a tensor in operators: `state(cache)`, int64 [2] in CPU memory, its handle and how many
tokens were appended through it. An append writes to it and attention reads it, which keeps the two
in order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from . import _cache
from ._arrays import NAMES, float_id
from ._attention import attention
from ._cache import Cache
from ._errors import refuse
from ._formats import Quantized
from ._geglu import geglu
from ._nybble import lib
from ._quantize import dequantize, quantize

__all__ = ["cache_of", "state"]

Tensor = torch.Tensor

_library: Any = torch.library.Library("nybble", "DEF")  # type: ignore[no-untyped-call]
# Strides of inputs are as eager's: the last axis stays contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_OPTIONS = (
    "*, float? scale=None, str mask='causal', Tensor? mask_array=None, Tensor? lengths=None, "
    "Tensor? starts=None, SymInt window_tokens=0, SymInt window_keep_tokens=0, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, float softcap=0.0, str path='auto', "
    "str rounding='exact'"
)
_SCHEMAS = {
    "geglu": "(Tensor gate, Tensor up, str path='auto') -> Tensor",
    "quantize": "(Tensor array, int bits=4, int group_size=64, ScalarType? dtype=None, "
    "str rule='mlx_cpu') -> (Tensor, Tensor, Tensor)",
    "quantize_into": "(Tensor array, Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) biases, "
    "int bits, int group_size, SymInt position=0, str rule='mlx_cpu') -> ()",
    "dequantize": "(Tensor codes, Tensor scales, Tensor biases, int bits=4, int group_size=64, "
    "ScalarType? dtype=None) -> Tensor",
    "attention": f"(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> Tensor",
    "attention_quantized": "(Tensor query, Tensor[] key, Tensor[] value, int key_bits, "
    f"int key_group_size, int value_bits, int value_group_size, {_OPTIONS}) -> Tensor",
    "cache_append": "(Tensor(a!) state, Tensor key, Tensor value) -> ()",
    "cache_attention": f"(Tensor query, Tensor state, int value_dim, {_OPTIONS}) -> Tensor",
}


def _register(name: str, real: Any, fake: Any) -> None:
    _library.define(name + _SCHEMAS[name], tags=_TAGS)
    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nybble::{name}", fake, lib=_library)


# ---- Caches -------------------------------------------------------------------------------------


def state(cache: Cache) -> Tensor:
    """The tensor that stands for a cache in the operators `cache_append` and `cache_attention`."""
    if cache._state is None:
        _give_state(cache)
    found: Tensor = cache._state
    return found


def cache_of(state: Tensor) -> Cache:
    """The cache that a tensor of `state` stands for.

    Raises:
        NybbleError: VALUE where there is no such cache, or no longer.
    """
    handle = int(state[0])
    cache = _caches.get(handle)
    if cache is None:
        raise refuse(f"state is of cache {handle}, which does not exist, or no longer")
    return cache


_caches: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()


def _give_state(cache: Cache) -> None:
    cache._state = torch.tensor([cache._handle, 0], dtype=torch.int64)
    _caches[cache._handle] = cache


# ---- The operators ------------------------------------------------------------------------------


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else NAMES[float_id(dtype)]


def _geglu(gate: Tensor, up: Tensor, path: str = "auto") -> Tensor:
    made: Tensor = geglu(gate, up, path=path)
    return made


def _fake_geglu(gate: Tensor, up: Tensor, path: str = "auto") -> Tensor:
    return gate.new_empty(gate.shape)


def _quantize(
    array: Tensor,
    bits: int = 4,
    group_size: int = 64,
    dtype: torch.dtype | None = None,
    rule: str = "mlx_cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    made = quantize(array, bits, group_size, dtype=_dtype_name(dtype), rule=rule)
    return made.codes, made.scales, made.biases


def _fake_quantize(
    array: Tensor,
    bits: int = 4,
    group_size: int = 64,
    dtype: torch.dtype | None = None,
    rule: str = "mlx_cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    *lead, dim = array.shape
    kind = array.dtype if dtype is None else dtype
    groups = [*lead, dim // group_size]
    codes = array.new_empty([*lead, dim * bits // 32], dtype=torch.uint32)
    return codes, array.new_empty(groups, dtype=kind), array.new_empty(groups, dtype=kind)


def _quantize_into(
    array: Tensor,
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    bits: int,
    group_size: int,
    position: int = 0,
    rule: str = "mlx_cpu",
) -> None:
    end = position + array.shape[-2]
    if not 0 <= position <= end <= codes.shape[-2]:
        raise refuse(
            f"position is {position} for {array.shape[-2]} tokens; codes have room for "
            f"{codes.shape[-2]}",
            lib.NYB_ERROR_LENGTH,
        )
    rows = (x[..., position:end, :] for x in (codes, scales, biases))
    out = Quantized(*rows, bits=bits, group_size=group_size)
    quantize(array, bits, group_size, rule=rule, out=out)


def _nothing(*arguments: Any, **options: Any) -> None:
    """The fake of an operator that returns nothing."""


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    bits: int = 4,
    group_size: int = 64,
    dtype: torch.dtype | None = None,
) -> Tensor:
    rows = Quantized(codes, scales, biases, bits=bits, group_size=group_size)
    made: Tensor = dequantize(rows, _dtype_name(dtype))
    return made


def _fake_dequantize(
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    bits: int = 4,
    group_size: int = 64,
    dtype: torch.dtype | None = None,
) -> Tensor:
    shape = [*scales.shape[:-1], scales.shape[-1] * group_size]
    return scales.new_empty(shape, dtype=scales.dtype if dtype is None else dtype)


def _attend(
    query: Tensor, key: Any, value: Any, mask: str, mask_array: Tensor | None, options: Any
) -> Tensor:
    chosen: Any = mask if mask_array is None else mask_array
    made: Tensor = attention(query, key, value, mask=chosen, **options)
    return made


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str = "causal",
    mask_array: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return _attend(query, key, value, mask, mask_array, options)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return query.new_empty([*query.shape[:3], value.shape[-1]])


def _attention_quantized(
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    *formats: int,
    mask: str = "causal",
    mask_array: Tensor | None = None,
    **options: Any,
) -> Tensor:
    key_rows = Quantized(*key, bits=formats[0], group_size=formats[1])
    value_rows = Quantized(*value, bits=formats[2], group_size=formats[3])
    return _attend(query, key_rows, value_rows, mask, mask_array, options)


def _fake_attention_quantized(
    query: Tensor, key: Sequence[Tensor], value: Sequence[Tensor], *formats: int, **options: Any
) -> Tensor:
    return query.new_empty([*query.shape[:3], value[1].shape[-1] * formats[3]])


def _cache_append(state: Tensor, key: Tensor, value: Tensor) -> None:
    cache_of(state).append(key, value)
    state[1] += key.shape[2]


def _cache_attention(
    query: Tensor,
    state: Tensor,
    value_dim: int,
    *,
    mask: str = "causal",
    mask_array: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return _attend(query, cache_of(state), None, mask, mask_array, options)


def _fake_cache_attention(query: Tensor, state: Tensor, value_dim: int, **options: Any) -> Tensor:
    return query.new_empty([*query.shape[:3], value_dim])


_register("geglu", _geglu, _fake_geglu)
_register("quantize", _quantize, _fake_quantize)
_register("quantize_into", _quantize_into, _nothing)
_register("dequantize", _dequantize, _fake_dequantize)
_register("attention", _attention, _fake_attention)
_register("attention_quantized", _attention_quantized, _fake_attention_quantized)
_register("cache_append", _cache_append, _nothing)
_register("cache_attention", _cache_attention, _fake_cache_attention)


# ---- torch.compile ------------------------------------------------------------------------------


@torch.compiler.substitute_in_graph(geglu)
def _traced_geglu(
    gate: Tensor,
    up: Tensor,
    *,
    out: Tensor | None = None,
    path: str = "auto",
    context: Any = None,
) -> Tensor:
    if context is not None:
        raise NotImplementedError("context is not compiled: operators take the default one")
    made: Tensor = torch.ops.nybble.geglu(gate, up, path)
    return made if out is None else out.copy_(made)


@torch.compiler.substitute_in_graph(attention)
def _traced_attention(
    query: Tensor,
    key: Any,
    value: Any = None,
    *,
    scale: float | None = None,
    mask: Any = "causal",
    lengths: Any = None,
    starts: Any = None,
    window_tokens: int = 0,
    window_keep_tokens: int = 0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    return_lse: bool = False,
    path: str = "auto",
    rounding: str = "exact",
    context: Any = None,
) -> Tensor:
    if return_lse or context is not None:
        raise NotImplementedError("return_lse and context are not compiled")
    options = {
        "scale": scale,
        "mask": mask if isinstance(mask, str) else "none",
        "mask_array": None if isinstance(mask, str) else mask,
        "starts": starts,
        "window_tokens": window_tokens,
        "window_keep_tokens": window_keep_tokens,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "softcap": softcap,
        "path": path,
        "rounding": rounding,
    }
    made: Tensor
    if isinstance(key, Cache):
        made = torch.ops.nybble.cache_attention(query, key._state, key.value_dim, **options)
    elif isinstance(key, Quantized):
        made = torch.ops.nybble.attention_quantized(
            query,
            [key.codes, key.scales, key.biases],
            [value.codes, value.scales, value.biases],
            key.bits,
            key.group_size,
            value.bits,
            value.group_size,
            lengths=lengths,
            **options,
        )
    else:
        made = torch.ops.nybble.attention(query, key, value, lengths=lengths, **options)
    return made if out is None else out.copy_(made)


def _traced_append(cache: Cache, key: Tensor, value: Tensor) -> None:
    torch.ops.nybble.cache_append(cache._state, key, value)


_cache.compiling(torch.compiler.is_compiling, _traced_append, _give_state)
