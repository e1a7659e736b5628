# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's quantized KV cache and attention, on nybble's.

    import nybble.mlx_lm
    nybble.mlx_lm.install()

From then on `mlx_lm.generate(..., kv_bits=4)`, and every model of mlx-lm that uses its quantized
attention, attends straight over the packed bytes: no scores of [query_len, tokens] are held, and
the cache doubles when it is full instead of being copied every 256 tokens. Saved prompt caches are
mlx-lm's own: what one wrote the other loads. Caches of mlx-lm that were made before `install()` are
read where they are.

MLX must compute on the CPU (`mx.default_device()`): arrays are read in CPU memory.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx_lm.models.base as base
import mlx_lm.models.cache as cache_module

from . import _arrays
from ._attention import attention
from ._cache import Cache
from ._errors import refuse
from ._formats import Quantized, affine
from ._nybble import lib

__all__ = ["QuantizedKVCache", "install", "make_prompt_cache", "uninstall"]

_Theirs = cache_module.QuantizedKVCache


class _Rows:
    """Keys or values of a cache, for the attention function alone; the bytes stay in the cache."""

    __slots__ = ("cache", "dim", "offset")

    def __init__(self, cache: QuantizedKVCache, dim: int) -> None:
        self.cache, self.dim, self.offset = cache, dim, cache.offset

    @property
    def shape(self) -> tuple[int, int, int, int]:
        stored = self.cache._stored
        return stored.batch, stored.kv_heads, self.offset, self.dim

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            "these keys and values are packed in a nybble cache, and go to mlx-lm's quantized "
            "attention alone; cache.state has them as arrays"
        )


class _State(dict):  # type: ignore[type-arg]
    """A cache's state as mlx-lm expects it, whose arrays are made when somebody looks at them.

    mlx-lm evaluates the states of all caches after each part of a prompt, and mx.eval reads a
    dictionary's own storage: this one's is empty, so that nothing is copied there. To Python, and
    so to mlx-lm's functions that save, it is the sequence (keys, values, offset, group_size, bits).
    """

    def __init__(self, cache: QuantizedKVCache) -> None:
        super().__init__()
        self._cache = cache

    def items(self) -> Any:
        return enumerate(self._cache._state_items())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cache._state_items())

    def __getitem__(self, index: Any) -> Any:
        return self._cache._state_items()[index]

    def __len__(self) -> int:
        return len(self._cache._state_items())

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        return tuple, (self._cache._state_items(),)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._cache._state_items(), memo)


def _to_mlx(array: Any) -> mx.array:
    """A copy, as an MLX array, of NumPy's view of a cache's memory."""
    if isinstance(array, _arrays.BFloat16):
        return mx.array(array.bits).view(mx.bfloat16)
    return mx.array(array)


def _to_numpy(array: mx.array) -> Any:
    import numpy

    if array.dtype == mx.bfloat16:
        return numpy.asarray(array.view(mx.uint16))
    return numpy.asarray(array)


class QuantizedKVCache(_Theirs):
    """mlx-lm's QuantizedKVCache, kept in a `nybble.Cache`.

    Args:
        group_size: 32, 64 or 128; it must divide the head dimensions.
        bits: of the keys: 2, 3, 4, 5, 6 or 8.
        value_bits: of the values; `bits` where None. mlx-lm itself cannot load what is saved with
            two widths.

    Raises:
        NybbleError: BITS or GROUP_SIZE at construction; GROUP_SIZE at the first
            `update_and_fetch`, where the head dimension is known.
    """

    def __init__(self, group_size: int = 64, bits: int = 8, value_bits: int | None = None) -> None:
        self.group_size = group_size
        self.bits = bits
        self.value_bits = bits if value_bits is None else value_bits
        for width in (self.bits, self.value_bits):
            affine(width, group_size).row_bytes(group_size)  # refuses what does not exist
        self._stored: Any = None

    # What mlx-lm reads and sets.

    @property
    def offset(self) -> int:
        """Tokens held."""
        return 0 if self._stored is None else len(self._stored)

    @offset.setter
    def offset(self, tokens: int) -> None:
        if tokens > self.offset:
            raise refuse(f"offset is set to {tokens}; the cache holds {self.offset} tokens")
        self.trim(self.offset - tokens)

    def _check_shapes(self, keys: mx.array, values: mx.array) -> None:
        stored = self._stored
        wanted = (stored.batch, stored.kv_heads, keys.shape[2])
        if keys.shape != (*wanted, stored.key_dim) or values.shape != (*wanted, stored.value_dim):
            raise refuse(
                f"keys are {keys.shape} and values {values.shape}; this cache holds [{wanted[0]}, "
                f"{wanted[1]}, tokens, {stored.key_dim}] and {stored.value_dim}: it is of another "
                "model or batch",
                lib.NYB_ERROR_SHAPE,
            )

    def _make(self, shape: Any, value_dim: int, dtype: mx.Dtype) -> Cache:
        batch, heads, _, key_dim = shape
        name = str(dtype).rpartition(".")[2]
        return Cache(
            batch,
            heads,
            key_dim,
            value_dim,
            key=affine(self.bits, self.group_size, name),
            value=affine(self.value_bits, self.group_size, name),
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_Rows, _Rows]:
        """Append tokens; what comes back goes to mlx-lm's attention.

        Args:
            keys: f32, f16 or bf16 [batch, kv_heads, tokens, head_dim].
            values: likewise, with a head dimension of its own.

        Raises:
            NybbleError: SHAPE for a cache of another model; NON_FINITE. Nothing is then appended.
        """
        made = None
        if self._stored is None:
            made = self._stored = self._make(keys.shape, values.shape[-1], keys.dtype)
        try:
            self._check_shapes(keys, values)
            self._stored.append(keys, values)
        except Exception:
            if made is not None:
                self._stored = None
            raise
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[_Rows, _Rows]:
        stored = self._stored
        return _Rows(self, stored.key_dim), _Rows(self, stored.value_dim)

    @property
    def keys(self) -> tuple[mx.array, ...] | None:  # type: ignore[override]
        """Codes, scales and biases of the keys held, copied; None before the first update."""
        return None if self._stored is None else self._arrays_of(self._stored.keys())

    @property
    def values(self) -> tuple[mx.array, ...] | None:  # type: ignore[override]
        """Likewise of the values."""
        return None if self._stored is None else self._arrays_of(self._stored.values())

    @staticmethod
    def _arrays_of(rows: Any) -> tuple[mx.array, ...]:
        return tuple(_to_mlx(array) for array in (rows.codes, rows.scales, rows.biases))

    def _state_items(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset, self.group_size, self.bits

    @property
    def state(self) -> _State:
        """(keys, values, offset, group_size, bits), as mlx-lm saves it."""
        return _State(self)

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, offset, group_size, bits = state
        widths = [bits, bits]
        if keys is not None:
            # A cache with two widths says so by the shapes of its arrays alone.
            widths = [
                rows[0].shape[-1] * 32 // (rows[1].shape[-1] * group_size)
                for rows in (keys, values)
            ]
        made = QuantizedKVCache(group_size, *widths)
        if keys is not None:
            made._restore(keys, values, offset)
        self.__dict__.update(made.__dict__)

    def _restore(self, keys: Any, values: Any, offset: int) -> None:
        import numpy

        checked = [
            Quantized(*rows, bits=bits, group_size=self.group_size)
            for rows, bits in ((keys, self.bits), (values, self.value_bits))
        ]
        batch, heads, tokens, key_dim = checked[0].shape
        if checked[1].shape[:3] != (batch, heads, tokens) or not 0 <= offset <= tokens:
            raise refuse(
                f"keys are {checked[0].shape} and values {checked[1].shape} with offset {offset}; "
                "they do not belong together",
                lib.NYB_ERROR_SHAPE,
            )
        shape = (batch, heads, offset, key_dim)
        self._stored = self._make(shape, checked[1].dim, keys[1].dtype)
        if offset == 0:
            return
        # Room for the tokens, then their bytes as they are: quantizing anew could change them.
        zeros = [numpy.zeros(rows.dim, numpy.float32) for rows in checked]
        self._stored.append(*(numpy.broadcast_to(z, (batch, heads, offset, z.size)) for z in zeros))
        for rows, to in zip((keys, values), (self._stored.keys(), self._stored.values())):
            for source, target in zip(rows, (to.codes, to.scales, to.biases)):
                memory = target.bits if isinstance(target, _arrays.BFloat16) else target
                memory[...] = _to_numpy(source)[:, :, :offset]

    def size(self) -> int:
        return self.offset

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens, or as many as there are; returns how many."""
        return 0 if self._stored is None else int(self._stored.trim(n))

    def empty(self) -> bool:
        return self._stored is None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return 0 if self._stored is None else int(self._stored.usage().allocated_bytes)

    def __deepcopy__(self, memo: Any) -> QuantizedKVCache:
        made = QuantizedKVCache(self.group_size, self.bits, self.value_bits)
        if self._stored is not None:
            made._restore(self.keys, self.values, self.offset)
        return made

    def __copy__(self) -> QuantizedKVCache:
        return copy.deepcopy(self)


# ---- Attention ----------------------------------------------------------------------------------


def _attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    mask: Any,
    group_size: int,
    bits: int,
    sinks: mx.array | None = None,
) -> Any:
    options: dict[str, Any] = {"scale": scale, "rounding": "mlx", "mask": "none"}
    if isinstance(mask, str):
        options["mask"] = mask  # "causal", MLX's one word
    elif mask is not None:
        if mask.dtype not in (mx.bool_, mx.float32, queries.dtype):
            mask = mask.astype(mx.float32)
        options["mask"] = mask
    if sinks is not None:
        options["sinks"] = sinks.astype(mx.float32)
    if not isinstance(keys, _Rows):
        rows = (Quantized(*pair, bits=bits, group_size=group_size) for pair in (keys, values))
        return attention(queries, *rows, **options)
    if keys.offset != keys.cache.offset:
        raise refuse(
            f"the cache holds {keys.cache.offset} tokens, and held {keys.offset} when these keys "
            "were fetched"
        )
    return attention(queries, keys.cache._stored, **options)


def _quantized_scaled_dot_product_attention(
    queries: mx.array,
    q_keys: Any,
    q_values: Any,
    scale: float,
    mask: Any,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    """mlx-lm's function of this name, by nybble; keys and values may also be mlx-lm's arrays."""
    out: mx.array = _attend(queries, q_keys, q_values, scale, mask, group_size, bits)
    return out


def _to_quantized(self: Any, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
    """KVCache.to_quantized: what an unquantized cache holds, quantized."""
    made = QuantizedKVCache(group_size=group_size, bits=bits)
    if self.keys is not None and self.offset > 0:
        made.update_and_fetch(self.keys[..., : self.offset, :], self.values[..., : self.offset, :])
    return made


def _scaled_dot_product_attention(
    queries: Any,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
) -> Any:
    """mlx-lm's function of this name, which refuses sinks with a quantized cache."""
    if sinks is not None and hasattr(cache, "bits"):
        return _attend(queries, keys, values, scale, mask, cache.group_size, cache.bits, sinks)
    original = _replaced[("mlx_lm.models.base", "scaled_dot_product_attention")]
    return original(queries, keys, values, cache, scale, mask, sinks)


# ---- Installing ---------------------------------------------------------------------------------

_replaced: dict[tuple[str, str], Any] = {}


def install() -> None:
    """Let mlx-lm make nybble's caches and attend by nybble. A second call changes nothing.

    Raises:
        NybbleError: UNSUPPORTED where MLX computes on a GPU.
    """
    if mx.default_device().type != mx.cpu:
        raise refuse(
            f"MLX computes on {mx.default_device()}; nybble.mlx_lm needs mx.set_default_device("
            "mx.cpu)",
            lib.NYB_ERROR_UNSUPPORTED,
        )
    if _replaced:
        return
    _replace(
        base, "quantized_scaled_dot_product_attention", _quantized_scaled_dot_product_attention
    )
    original = base.scaled_dot_product_attention
    for name, module in list(sys.modules.items()):
        # Models have the function by its name, those imported later from `base`.
        in_mlx_lm = name.startswith("mlx_lm.")
        if in_mlx_lm and getattr(module, "scaled_dot_product_attention", None) is original:
            _replace(module, "scaled_dot_product_attention", _scaled_dot_product_attention)
    _replace(cache_module, "QuantizedKVCache", QuantizedKVCache)
    _replaced[("KVCache", "to_quantized")] = cache_module.KVCache.to_quantized
    cache_module.KVCache.to_quantized = _to_quantized  # type: ignore[method-assign]


def _replace(module: Any, name: str, by: Callable[..., Any] | type) -> None:
    _replaced[(module.__name__, name)] = getattr(module, name)
    setattr(module, name, by)


def uninstall() -> None:
    """Put mlx-lm back as it was. Caches that were made stay usable only while installed."""
    for (where, name), original in _replaced.items():
        owner: Any = cache_module.KVCache if where == "KVCache" else sys.modules[where]
        setattr(owner, name, original)
    # Models that were imported meanwhile.
    for module in list(sys.modules.values()):
        if getattr(module, "scaled_dot_product_attention", None) is _scaled_dot_product_attention:
            original = _replaced[("mlx_lm.models.base", "scaled_dot_product_attention")]
            module.scaled_dot_product_attention = original  # type: ignore[attr-defined]
    _replaced.clear()


def make_prompt_cache(
    model: Any, bits: int = 4, group_size: int = 64, value_bits: int | None = None
) -> list[Any]:
    """One quantized cache for each layer of an mlx-lm model: mlx-lm's function of this name.

    Args:
        model: any of mlx-lm's whose layers use its plain KV cache.
        bits, group_size, value_bits: see `QuantizedKVCache`.

    Raises:
        NybbleError: UNSUPPORTED names the first layer that needs a cache of another kind
            (rotating, recurrent); GROUP_SIZE, BITS.
    """
    made = []
    for layer, cache in enumerate(cache_module.make_prompt_cache(model)):
        if type(cache) is not cache_module.KVCache:
            raise refuse(
                f"layer {layer} needs a {type(cache).__name__}; there is a quantized cache in "
                "place of KVCache alone",
                lib.NYB_ERROR_UNSUPPORTED,
            )
        made.append(QuantizedKVCache(group_size, bits, value_bits))
    return made
