# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one layer."""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import _arrays
from ._arrays import Array
from ._calls import append
from ._context import Context
from ._errors import check, refuse
from ._formats import Format, Quantized, affine
from ._nybble import ffi, lib
from ._place import (
    DeviceMemory,
    common_device,
    context_on,
    device_name,
    device_number,
    on,
    stream_on,
)
from ._quantize import flag_pointer, rule_id

# ---- Caches in functions that torch.compile compiles: nybble.torch fills these in -----------------

_handles = itertools.count(1)
_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_is_compiling: Callable[[], bool] | None = None
_compiled_append: Callable[[Cache, Array, Array], None]
_give_state: Callable[[Cache], None] | None = None


def compiling(
    is_compiling: Callable[[], bool],
    compiled_append: Callable[[Cache, Array, Array], None],
    give_state: Callable[[Cache], None],
) -> None:
    """From here on appends that are being compiled are `compiled_append`, and caches have a state,
    which `give_state` gives to those that there are."""
    global _is_compiling, _compiled_append, _give_state
    _is_compiling, _compiled_append, _give_state = is_compiling, compiled_append, give_state
    for cache in list(_caches):
        give_state(cache)


# Which eight bytes of a descriptor say where a cache's tokens are.
_PLACE = tuple(
    ffi.offsetof("nyb_attention", *name.split(".")) // 8
    for name in ("k.codes", "lengths", "ring.offsets", "pages.table", "batch", "capacity_tokens")
)


class Usage(NamedTuple):
    """What a cache takes, in bytes, and how it came to grow."""

    used_bytes: int
    allocated_bytes: int
    capacity_tokens: int
    reallocations: int
    copied_bytes: int


def _refuse_while_capturing(device: int) -> None:
    """A capture's memory is the graph's: replays would write to it what they did before it was given
    to the cache."""
    torch = sys.modules.get("torch")
    if device != _arrays.HOST and torch and torch.cuda.is_current_stream_capturing():
        raise refuse(
            "the stream is being captured; a cache is created before or after the capture",
            lib.NYB_ERROR_UNSUPPORTED,
        )


def _memory_of(rows: Any) -> list[Array]:
    """The arrays that rows from `Cache.keys` consist of, of elements that can be assigned."""
    arrays = (rows.codes, rows.scales, rows.biases) if isinstance(rows, Quantized) else (rows,)
    return [x.bits if isinstance(x, _arrays.BFloat16) else x for x in arrays]


class Cache:
    """One layer's keys and values, quantized as they are appended.

    Args:
        batch: sequences, each with a length of its own.
        kv_heads: heads of keys and of values.
        key_dim, value_dim: length of their rows; value_dim is key_dim where None.
        key, value: formats (`affine(4)`, `plain("bf16")`); value is key where None.
        rule: "mlx_cpu" or "mlx_gpu" (docs/numerics.md, section 1).
        initial_capacity_tokens: room from the start; 0 grows at the first append.
        max_tokens: an append beyond it fails; 0 is no limit.
        window_tokens, window_keep_tokens: a rotating cache: the last window_tokens tokens, the
            first window_keep_tokens of the sequence among them.
        first_tokens, last_tokens, part_dtype: so many tokens at either end stay unquantized.
        page_tokens: pages of so many tokens, which reordered sequences share.
        device: "cpu", "cuda" or "cuda:1": where it lies, and computes; the context's where None.

    Raises:
        NybbleError: SHAPE, HEADS, BITS, GROUP_SIZE or DTYPE for what is no cache; UNSUPPORTED,
            also while the current stream is being captured.

    On CUDA the lengths are the device's: a captured append moves them along at each replay, which
    `refresh` lets this object know.

    copy.deepcopy makes a cache of its own with the same bytes, in the same context; rotating, paged
    and mixed ones refuse with UNSUPPORTED, unless they are empty.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        key: Format = affine(4),  # noqa: B008 (a tuple)
        value: Format | None = None,
        rule: str = "mlx_cpu",
        initial_capacity_tokens: int = 0,
        max_tokens: int = 0,
        window_tokens: int = 0,
        window_keep_tokens: int = 0,
        first_tokens: int = 0,
        last_tokens: int = 0,
        part_dtype: str | None = None,
        page_tokens: int = 0,
        device: Any = None,
        context: Context | None = None,
    ) -> None:
        if device is None:
            device = _arrays.HOST if context is None else context.device
        self.device = device_number(device)
        self.context = context_on(self.device, context, "the cache")
        self.batch = batch
        self.kv_heads = kv_heads
        self.key_dim = key_dim
        self.value_dim = key_dim if value_dim is None else value_dim
        self.key_format = key
        self.value_format = key if value is None else value
        # Of a copy, too.
        self._options: dict[str, Any] = {
            "key": key,
            "value": value,
            "rule": rule,
            "initial_capacity_tokens": initial_capacity_tokens,
            "max_tokens": max_tokens,
            "window_tokens": window_tokens,
            "window_keep_tokens": window_keep_tokens,
            "first_tokens": first_tokens,
            "last_tokens": last_tokens,
            "part_dtype": part_dtype,
            "page_tokens": page_tokens,
            "device": device,
            "context": self.context,
        }
        options = ffi.new("nyb_cache_options *")
        options.struct_size = ffi.sizeof("nyb_cache_options")
        options.batch, options.kv_heads = batch, kv_heads
        options.key_dim, options.value_dim = self.key_dim, self.value_dim
        self.key_format._fill(options.key_format)
        self.value_format._fill(options.value_format)
        options.rule = rule_id(rule)
        options.initial_capacity_tokens, options.max_tokens = initial_capacity_tokens, max_tokens
        options.window_tokens, options.window_keep_tokens = window_tokens, window_keep_tokens
        options.first_tokens, options.last_tokens = first_tokens, last_tokens
        options.part_dtype = 0 if part_dtype is None else _arrays.float_id(part_dtype)
        options.page_tokens = page_tokens
        made = ffi.new("struct nybpy_cache **")
        with on(self.device):  # the library takes the current device for the cache's
            _refuse_while_capturing(self.device)
            check(lib.nybpy_cache_create(self.context._owner, options, made))
        self._owner: Any = ffi.gc(made[0], lib.nybpy_cache_destroy)
        self._c: Any = self._owner.cache
        # For the calls in C.
        self._address = int(ffi.cast("uintptr_t", self._owner))
        self._memory = None if self.device == _arrays.HOST else DeviceMemory(self.device)
        self._view = ffi.new("nyb_attention *")
        self._view.struct_size = ffi.sizeof("nyb_attention")
        self._view_words = memoryview(ffi.buffer(self._view)).cast("Q")
        self._handle = next(_handles)
        self._state: Any = None
        _caches.add(self)
        if _give_state is not None:
            _give_state(self)

    def append(
        self,
        key: Array,
        value: Array,
        *,
        padding: Sequence[int] | None = None,
        non_finite: Array | None = None,
    ) -> None:
        """Append tokens to every sequence.

        Args:
            key: f32, f16 or bf16 [batch, kv_heads, tokens, key_dim], any strides whose last axis
                is contiguous.
            value: likewise, [batch, kv_heads, tokens, value_dim].
            padding: so many of each sequence's first rows are padding and are not stored.
            non_finite: on CUDA, an int32 tensor there that is set to 1 where a group could not be
                stored, which is then zeros, or a sequence was full; never set back to 0.

        Raises:
            NybbleError: SHAPE where an array does not fit the cache; NON_FINITE (on the CPU) names
                the first NaN or infinity; LENGTH beyond max_tokens; POINTER for arrays on another
                device. The cache then holds what it held.
        """
        if _is_compiling is not None and _is_compiling():
            if padding is not None or non_finite is not None:
                raise NotImplementedError("padding and non_finite are not compiled")
            _compiled_append(self, key, value)
            return
        if padding is None and non_finite is None:
            status = append(self._address, self.device, stream_on(self.device), key, value)
            if status == 0:
                return
            if status is not None:
                check(status)
        self._check_device(("key", key), ("value", value))
        call = ffi.new("nyb_append *")
        call.struct_size = ffi.sizeof("nyb_append")
        batch = self.batch
        tokens = None
        for name, array, dim in (("key", key, self.key_dim), ("value", value, self.value_dim)):
            reading = _arrays.read(array)
            size = _arrays.rows(name, reading)
            if tokens is None:
                tokens = size[2]
            if size[:3] != (batch, self.kv_heads, tokens) or reading[2][-1] != dim:
                raise refuse(
                    f"{name} is {tuple(reading[2])}; it must be "
                    f"{(batch, self.kv_heads, tokens, dim)}",
                    lib.NYB_ERROR_SHAPE,
                )
            if reading[1] not in (1, 2, 3):
                raise refuse(
                    f"{name} is {_arrays.NAMES[reading[1]]}; it must be f32, f16 or bf16",
                    lib.NYB_ERROR_DTYPE,
                )
            lib.nybpy_set_view(ffi.addressof(call, name), reading[0], reading[1], *size[3:])
        call.tokens = tokens
        if padding is not None:
            if len(padding) != batch:
                raise refuse(
                    f"padding has {len(padding)} entries; it must have {batch}",
                    lib.NYB_ERROR_SHAPE,
                )
            kept = ffi.new("int32_t[]", list(padding))
            call.padding = kept
        call.non_finite = flag_pointer(non_finite, self.device)
        with on(self.device) as place:
            check(lib.nyb_cache_append(self._c, call, place.stream))

    def _check_device(self, *arrays: tuple[str, Array]) -> None:
        device = common_device(arrays)
        if device != self.device:
            raise refuse(
                f"{arrays[0][0]} is on {device_name(device)} and the cache on "
                f"{device_name(self.device)}; both must be on one device",
                lib.NYB_ERROR_POINTER,
            )

    def refresh(self) -> None:
        """On CUDA: wait, and take the lengths from the device, which replayed graphs moved along."""
        with on(self.device) as place:
            check(lib.nyb_cache_refresh(self._c, place.stream))

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens in each sequence: appends up to there do not allocate."""
        with on(self.device) as place:
            check(lib.nyb_cache_reserve(self._c, tokens, place.stream))

    def trim(self, tokens: int, sequence: int | None = None) -> int:
        """Drop the last tokens of a sequence, or of all; returns how many went, at most."""
        trimmed = ffi.new("int64_t *")
        which = lib.NYB_ALL_SEQUENCES if sequence is None else sequence
        with on(self.device) as place:
            check(lib.nyb_cache_trim(self._c, which, tokens, trimmed, place.stream))
        return int(trimmed[0])

    def reorder(self, sources: Sequence[int] | Array) -> None:
        """Sequence i becomes what sequence sources[i] was: beam search, continuous batching.

        The batch is len(sources) afterwards.

        Raises:
            NybbleError: VALUE or SHAPE for a source that does not exist, or for none.
        """
        chosen = [int(source) for source in sources]
        indices = ffi.new("int64_t[]", chosen)
        with on(self.device) as place:
            check(lib.nyb_cache_reorder(self._c, indices, len(chosen), place.stream))
        self.batch = len(chosen)

    def reset(self) -> None:
        """Empty the cache; its memory is kept."""
        with on(self.device) as place:
            check(lib.nyb_cache_reset(self._c, place.stream))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; on CUDA, as this object has counted them (see `refresh`)."""
        return [int(lib.nyb_cache_length(self._c, b)) for b in range(self.batch)]

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def __copy__(self) -> Cache:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """A cache of its own with the same bytes and as much room, in the same context."""
        if self.device != _arrays.HOST:
            self.refresh()  # replayed graphs may have moved the lengths along
        lengths = self.lengths
        kind = "numpy" if self.device == _arrays.HOST else "torch"
        held = (self.keys(kind), self.values(kind)) if any(lengths) and self._is_plain() else None
        if any(lengths) and held is None:
            raise refuse(
                "a rotating or paged cache, or one with unquantized ends, is not copied; make "
                "another one and append to it, or double its sequences by reorder()",
                lib.NYB_ERROR_UNSUPPORTED,
            )
        made = Cache(self.batch, self.kv_heads, self.key_dim, self.value_dim, **self._options)
        memo[id(self)] = made
        if self._is_plain():
            made.reserve(self.usage().capacity_tokens)
        if held is None:
            return made
        # Room for the tokens, then their bytes as they are: quantizing anew could change them.
        lead = (self.batch, self.kv_heads, max(lengths))
        made.append(*(self._zeros((*lead, dim)) for dim in (self.key_dim, self.value_dim)))
        for sequence, length in enumerate(lengths):
            made.trim(max(lengths) - length, sequence)
        for rows, targets in zip(held, (made.keys(kind), made.values(kind))):
            for source, target in zip(_memory_of(rows), _memory_of(targets)):
                target[...] = source
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refuse(
            "a nybble.Cache is not pickled; its keys() and values() are arrays that can be",
            lib.NYB_ERROR_UNSUPPORTED,
        )

    def _is_plain(self) -> bool:
        names = ("window_tokens", "first_tokens", "last_tokens", "page_tokens")
        return not any(self._options[name] for name in names)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        if self.device == _arrays.HOST:
            import numpy

            return numpy.broadcast_to(numpy.zeros(shape[-1], numpy.float32), shape)
        import torch

        return torch.zeros(shape[-1], device=f"cuda:{self.device}").expand(shape)

    def usage(self) -> Usage:
        """Bytes held and allocated."""
        usage = ffi.new("nyb_cache_usage *")
        usage.struct_size = ffi.sizeof("nyb_cache_usage")
        check(lib.nyb_cache_get_usage(self._c, usage))
        return Usage(*(getattr(usage, name) for name in Usage._fields))

    def _current(self) -> Any:
        """The descriptor's fields that say where the tokens are, as of now."""
        status = lib.nyb_cache_view(self._c, self._view)
        if status:
            check(status)
        return self._view

    def _place(self) -> tuple[int, ...]:
        """The same for as long as tokens go where they go now: a graph captured then still fits."""
        self._current()
        words = self._view_words
        return tuple([words[i] for i in _PLACE])

    def keys(self, kind: str = "numpy") -> Quantized | Array:
        """The keys held, as arrays over this cache's own memory: no copy.

        [batch, kv_heads, tokens of the longest sequence, ...]. They are good until the cache
        grows or goes; writing to them changes the cache.

        Args:
            kind: "numpy" (bfloat16 is a `BFloat16` over its bits) or "torch"; of a cache on CUDA
                "torch" alone.

        Raises:
            NybbleError: UNSUPPORTED where the rows do not stand one after the other: rotating and
                paged caches, and those with unquantized ends.
        """
        return self._rows("k", self.key_dim, kind)

    def values(self, kind: str = "numpy") -> Quantized | Array:
        """The values held; see `keys`."""
        return self._rows("v", self.value_dim, kind)

    def _rows(self, name: str, dim: int, kind: str) -> Any:
        view = self._current()
        if view.pages.table or view.ring.offsets or view.first.tokens or view.last.tokens:
            raise refuse(
                "the rows of this kind of cache do not stand one after the other",
                lib.NYB_ERROR_UNSUPPORTED,
            )
        stored = getattr(view, name)
        held = max(lib.nyb_cache_held_tokens(self._c, b) for b in range(self.batch))
        lead = (self.batch, self.kv_heads, held)
        dtype = stored.format.dtype

        def array(member: str, dtype: int, row: int) -> Any:
            strides = (*getattr(stored, f"{member}_stride"), 1)
            memory = getattr(stored, member)
            return _arrays.over_memory(kind, memory, dtype, (*lead, row), strides, self.device)

        if stored.format.scheme == lib.NYB_PLAIN:
            return array("codes", dtype, dim)
        bits, group_size = stored.format.bits, stored.format.group_size
        return Quantized(
            array("codes", _arrays.U32, dim * bits // 32),
            array("scales", dtype, dim // group_size),
            array("biases", dtype, dim // group_size),
            bits=bits,
            group_size=group_size,
        )

    def __repr__(self) -> str:
        return (
            f"nybble.Cache(batch={self.batch}, kv_heads={self.kv_heads}, "
            f"key={self.key_format}, value={self.value_format}, lengths={self.lengths})"
        )
