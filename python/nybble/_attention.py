# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache, over quantized arrays, over plain ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from . import _arrays
from ._arrays import Array
from ._cache import Cache
from ._calls import attend
from ._context import Context
from ._errors import NybbleError, check, refuse
from ._formats import Quantized, plain_stored
from ._geglu import PATHS
from ._nybble import ffi, lib
from ._place import DeviceMemory, common_device, context_on, device_name, is_current, on, stream_on

_MASKS = {
    "none": lib.NYB_MASK_NONE,
    "causal": lib.NYB_MASK_CAUSAL,
    "causal_top_left": lib.NYB_MASK_CAUSAL_TOP_LEFT,
}
_ROUNDINGS = {"exact": lib.NYB_ROUNDING_EXACT, "mlx": lib.NYB_ROUNDING_MLX}
_ELSEWHERE = -2  # no array is there: the way through Python sets the current device
_ATTENTION_BYTES = ffi.sizeof("nyb_attention")
_EMPTY = ffi.new("nyb_attention *", {"struct_size": _ATTENTION_BYTES})
_INT32 = ffi.typeof("int32_t[]")


def _in_place(name: str, values: Any, dtype: int, count: int, device: int) -> int:
    """The address of [count] values that the call can read where they are; 0 for others."""
    if isinstance(values, list | tuple) or not hasattr(values, "__dlpack__"):
        return 0
    address, found, shape, strides = _arrays.read(values)
    where = _arrays.device_of(values)
    if where != device:
        if where == _arrays.HOST:
            return 0  # copied there
        raise refuse(
            f"{name} is on {device_name(where)} and query on {device_name(device)}; both must be "
            "on one device",
            lib.NYB_ERROR_POINTER,
        )
    contiguous = len(shape) == 1 and (strides[0] == 1 or shape[0] <= 1)
    return address if found == dtype and contiguous and shape[0] == count else 0


def _on_device(values: list[Any], dtype: str, device: int) -> Any:
    """A tensor of these values on a CUDA device; it must live until the call is queued."""
    torch = sys.modules["torch"]
    made = torch.tensor(values, dtype=getattr(torch, dtype))
    return made.to(f"cuda:{device}")


def _int32s(name: str, values: Sequence[int] | Array, batch: int, device: int) -> tuple[Any, Any]:
    """A pointer to [batch] int32 values, and what must live as long."""
    address = _in_place(name, values, _arrays.I32, batch, device)
    if address:
        return ffi.cast("int32_t *", address), values
    found = [int(value) for value in values]
    if len(found) != batch:
        raise refuse(f"{name} has {len(found)} entries; it must have {batch}", lib.NYB_ERROR_SHAPE)
    if device != _arrays.HOST:
        tensor = _on_device(found, "int32", device)
        return ffi.cast("int32_t *", tensor.data_ptr()), tensor
    made = ffi.new(_INT32, found)
    return made, made


def _fill_mask_array(call: Any, mask: Array) -> Array:
    """An array as attention.mask_array: bool, or added to the scores."""
    address, dtype, shape, strides = _arrays.read(mask)
    rank = len(shape)
    if not 2 <= rank <= 4 or (strides[-1] != 1 and shape[-1] > 1):
        raise refuse(
            f"mask is {tuple(shape)} with strides {tuple(strides)}; it must be [batch, "
            "query_heads, query_len, tokens], contiguous along its last axis",
            lib.NYB_ERROR_SHAPE,
        )
    wanted = (call.batch, call.query_heads, call.query_len)
    for axis in range(3):
        have = shape[axis - 4 + rank] if axis - 4 + rank >= 0 else 1
        step = strides[axis - 4 + rank] if axis - 4 + rank >= 0 else 0
        if have not in (1, wanted[axis]):
            raise refuse(
                f"mask is {tuple(shape)}; its leading axes must be 1 or {wanted}",
                lib.NYB_ERROR_SHAPE,
            )
        call.mask_array.stride[axis] = 0 if have == 1 else step
    call.mask_array.data = ffi.cast("void *", address)
    call.mask_array.tokens = shape[-1]
    if dtype == _arrays.BOOL:
        call.mask_array.kind, call.mask_array.dtype = lib.NYB_MASK_ARRAY_BOOL, 0
    else:
        call.mask_array.kind, call.mask_array.dtype = lib.NYB_MASK_ARRAY_ADD, dtype
    return mask


def _floats(name: str, values: Sequence[float] | Array, heads: int, device: int) -> tuple[Any, Any]:
    """A pointer to [query_heads] f32 values, and what must live as long."""
    address = _in_place(name, values, _arrays.F32, heads, device)
    if address:
        return ffi.cast("float *", address), values
    found = [float(value) for value in values]
    if len(found) != heads:
        raise refuse(f"{name} has {len(found)} entries; it must have {heads}", lib.NYB_ERROR_SHAPE)
    if device != _arrays.HOST:
        tensor = _on_device(found, "float32", device)
        return ffi.cast("float *", tensor.data_ptr()), tensor
    made = ffi.new("float[]", found)
    return made, made


def _fill_rows(call: Any, key: Any, value: Any) -> tuple[Any, ...]:
    """K and V as arrays; returns what must live as long as the call."""
    kept = []
    shapes = []
    for name, rows, to in (("key", key, "k"), ("value", value, "v")):
        if isinstance(rows, Quantized):
            stored, shape = rows._stored, rows.shape
        else:
            stored, shape = plain_stored(name, rows)
        setattr(call, to, stored[0])
        kept.append((stored, rows))
        shapes.append(shape)
    if shapes[0][:3] != shapes[1][:3]:
        raise refuse(
            f"key is {shapes[0]} and value {shapes[1]}; all but the last axis must be the same",
            lib.NYB_ERROR_SHAPE,
        )
    call.batch, call.kv_heads, call.capacity_tokens, call.key_dim = shapes[0]
    call.value_dim = shapes[1][3]
    return tuple(kept)


def _fill_options(
    call: Any,
    mask: Array | None,
    starts: Any,
    window_tokens: int,
    window_keep_tokens: int,
    sinks: Any,
    alibi_slopes: Any,
    softcap: float,
    device: int,
) -> list[Any]:
    """The fields that most calls leave 0."""
    kept = []
    if mask is not None:
        if _arrays.device_of(mask) != device:
            raise refuse(
                f"mask is on {device_name(_arrays.device_of(mask))} and query on "
                f"{device_name(device)}; both must be on one device",
                lib.NYB_ERROR_POINTER,
            )
        kept.append(_fill_mask_array(call, mask))
    if starts is not None:
        call.starts, keep = _int32s("starts", starts, call.batch, device)
        kept.append(keep)
    if window_tokens or window_keep_tokens:
        call.window_tokens, call.window_keep_tokens = window_tokens, window_keep_tokens
    for name, values in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if values is not None:
            pointer, keep = _floats(name, values, call.query_heads, device)
            setattr(call, name, pointer)
            kept.append(keep)
    call.softcap = softcap
    return kept


def attention(
    query: Array,
    key: Cache | Quantized | Array,
    value: Quantized | Array | None = None,
    *,
    scale: float | None = None,
    mask: str | Array = "causal",
    lengths: Sequence[int] | Array | None = None,
    starts: Sequence[int] | Array | None = None,
    window_tokens: int = 0,
    window_keep_tokens: int = 0,
    sinks: Sequence[float] | Array | None = None,
    alibi_slopes: Sequence[float] | Array | None = None,
    softcap: float = 0.0,
    out: Array | None = None,
    return_lse: bool = False,
    path: str = "auto",
    rounding: str = "exact",
    context: Context | None = None,
) -> Any:
    """softmax(scale * query key^T + mask) value, straight over the stored rows.

    Args:
        query: f32, f16 or bf16 [batch, query_heads, query_len, key_dim]; query_heads a multiple of
            the KV heads. Any strides whose last axis is contiguous.
        key: a `Cache`; or `Quantized` or float rows [batch, kv_heads, tokens, key_dim].
        value: None with a cache; else likewise, [batch, kv_heads, tokens, value_dim].
        scale: 1 / sqrt(key_dim) where None.
        mask: "causal" (the last query row sees all tokens: append first, then attend), "none",
            "causal_top_left" (row i sees tokens up to i), or an array broadcastable to [batch,
            query_heads, query_len, tokens]: bool (True: seen) or f32 or query's dtype (added).
        lengths: tokens of each sequence, [batch]; all of them where None. A cache has its own.
        starts: where each sequence begins, [batch] (left padding).
        window_tokens: rows see so many last tokens, their own included; 0 is no window.
        window_keep_tokens: and so many first ones.
        sinks: a logit for each query head that enters the denominator, [query_heads].
        alibi_slopes: [query_heads].
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        out: where to put the result: [batch, query_heads, query_len, value_dim], any float dtype.
        return_lse: also return the log of the sum of exp(score), f32 [batch, query_heads,
            query_len].
        path: "auto", "fused" or "compat".
        rounding: "exact", or "mlx" for models served by MLX.

    Returns:
        An array of query's kind and dtype (or `out`), or a pair with lse.

    Raises:
        NybbleError: HEADS, SHAPE, LENGTH, GROUP_SIZE, ... with the sentence of what is wrong;
            UNSUPPORTED for what this machine or path has no kernel for.
    """
    if mask.__class__ is str:
        mask_id, mask_array = _MASKS.get(mask, -1), None
    else:
        mask_id, mask_array = 0, mask
    path_id, rounding_id = PATHS.get(path, -1), _ROUNDINGS.get(rounding, -1)
    if mask_id < 0 or path_id < 0 or rounding_id < 0:
        raise _refuse_words(mask, path, rounding)
    has_options = (
        mask_array is not None
        or starts is not None
        or window_tokens
        or window_keep_tokens
        or sinks is not None
        or alibi_slopes is not None
        or softcap
        or return_lse
    )
    if isinstance(key, Cache) and out is not None and not has_options:
        # What decode loops ask for again and again is one call in C, arrays and all.
        if value is None and lengths is None and context in (None, key.context):
            device = key.device
            memory: Any = key._memory
            stream = 0
            if device == _arrays.HOST:
                memory = key.context._scratch.address
            elif is_current(device):
                stream = stream_on(device)
            else:
                device = _ELSEWHERE
            arrays = key._address, device, memory, stream, query, out
            status = attend(*arrays, scale, mask_id, path_id, rounding_id)
            if status == 0:
                return out
            if status is not None:
                check(status)
    device, context = _find_place(query, key, value, out, lengths, context)
    call = context._scratch.attention
    kept: Any = _fill_tokens(call, key, value, lengths, device)
    shape, dtype = _fill_query(call, query)
    out_shape = (*shape[:3], call.value_dim)
    if out is None:
        out = _arrays.empty(query, out_shape, dtype)
    else:
        _arrays.check_writable("out", out)
    _fill_out(call, out, out_shape)
    lse = None
    if has_options:
        fields = (mask_array, starts, window_tokens, window_keep_tokens, sinks, alibi_slopes)
        kept = (kept, _fill_options(call, *fields, softcap, device))
        if return_lse:
            lse = _arrays.empty(query, out_shape[:3], _arrays.F32)
            lse_address, lse_dtype, _, lse_strides = _arrays.read(lse)
            lib.nybpy_set_view(ffi.addressof(call, "lse"), lse_address, lse_dtype, *lse_strides)
    call.scale = 1.0 / math.sqrt(call.key_dim) if scale is None else scale
    call.mask, call.path, call.rounding = mask_id, path_id, rounding_id
    if device == _arrays.HOST:
        check(lib.nybpy_attend(context._c, call, context._scratch.workspace))
    else:
        _attend_on(device, context, call)
    del kept  # what the call pointed to was alive until here
    return (out, lse) if return_lse else out


def _find_place(
    query: Array, key: Any, value: Any, out: Array | None, lengths: Any, context: Context | None
) -> tuple[int, Context]:
    """The device of all arrays, and the context that computes there."""
    arrays = [("query", query)]
    if out is not None:
        arrays.append(("out", out))
    if isinstance(key, Cache):
        if value is not None or lengths is not None:
            raise refuse("with a cache, value and lengths must be None: the cache has them")
        context = context or key.context
    elif value is None:
        raise refuse("value is None; only with a cache may it be")
    else:
        for name, rows in (("key", key), ("value", value)):
            arrays.append((name, rows.codes if isinstance(rows, Quantized) else rows))
    device = common_device(arrays)
    if isinstance(key, Cache) and device != key.device:
        raise refuse(
            f"query is on {device_name(device)} and the cache on {device_name(key.device)}; both "
            "must be on one device",
            lib.NYB_ERROR_POINTER,
        )
    return device, context_on(device, context, "query")


def _fill_tokens(call: Any, key: Any, value: Any, lengths: Any, device: int) -> Any:
    """The whole descriptor anew, with where the tokens are; returns what must live as long."""
    if isinstance(key, Cache):
        ffi.memmove(call, key._current(), _ATTENTION_BYTES)
        return key
    ffi.memmove(call, _EMPTY, _ATTENTION_BYTES)
    kept = _fill_rows(call, key, value)
    given = [call.capacity_tokens] * call.batch if lengths is None else lengths
    call.lengths, keep = _int32s("lengths", given, call.batch, device)
    return kept, keep


def _attend_on(device: int, context: Context, call: Any) -> None:
    """On a CUDA device, in the order of PyTorch's current stream, whose allocator has the workspace
    back as soon as the call is queued."""
    with on(device) as place:
        check(lib.nyb_attention_plan(context._c, call, context._scratch.plan))
        size = context._scratch.plan.workspace_bytes
        _workspace, address = DeviceMemory(device)(size) if size else (None, 0)
        pointer = ffi.cast("void *", address)
        check(lib.nyb_attention_run(context._c, call, pointer, size, place.stream))


def _fill_query(call: Any, query: Array) -> tuple[Sequence[int], int]:
    """q and the sizes that follow from it; returns query's shape and dtype."""
    address, dtype, shape, strides = _arrays.read(query)
    batch, key_dim = call.batch, call.key_dim
    if len(shape) != 4 or shape[0] != batch or shape[3] != key_dim or strides[3] != 1:
        _refuse_query(batch, key_dim, shape, strides)
    if dtype > 3:
        raise refuse(
            f"query is {_arrays.NAMES[dtype]}; it must be f32, f16 or bf16", lib.NYB_ERROR_DTYPE
        )
    call.query_heads, call.query_len = shape[1], shape[2]
    lib.nybpy_set_view(ffi.addressof(call, "q"), address, dtype, strides[0], strides[1], strides[2])
    return shape, dtype


def _fill_out(call: Any, out: Array, wanted: tuple[int, ...]) -> None:
    address, dtype, have, strides = _arrays.read(out)
    if tuple(have) != wanted or (strides[3] != 1 and wanted[3] > 1):
        raise refuse(
            f"out is {tuple(have)} with strides {tuple(strides)}; it must be {wanted}, contiguous "
            "along its last axis",
            lib.NYB_ERROR_SHAPE,
        )
    lib.nybpy_set_view(
        ffi.addressof(call, "out"), address, dtype, strides[0], strides[1], strides[2]
    )


def _refuse_query(batch: int, key_dim: int, shape: Sequence[int], strides: Sequence[int]) -> None:
    if len(shape) != 4 or shape[0] != batch or shape[3] != key_dim:
        raise refuse(
            f"query is {tuple(shape)}; it must be [{batch}, query_heads, query_len, {key_dim}]",
            lib.NYB_ERROR_SHAPE,
        )
    if key_dim > 1:
        raise refuse(
            f"query has stride {strides[3]} along its last axis; it must be contiguous there",
            lib.NYB_ERROR_STRIDE,
        )


def _refuse_words(mask: Any, path: Any, rounding: Any) -> NybbleError:
    return refuse(
        f"mask, path and rounding are {mask!r}, {path!r} and {rounding!r}; they must be of "
        f"{list(_MASKS)} (or an array), {list(PATHS)} and {list(_ROUNDINGS)}",
        lib.NYB_ERROR_ENUM,
    )


class AttentionCall:
    """A call whose arrays stay the same, checked and described once: `run()` costs next to nothing.

    For decode loops over buffers of one's own: write the query into its array, append to the
    cache, run, read the output. All arguments are those of `attention`; `query`, `out` and a
    `lengths` array are read and written where they are, at each run.

    Raises:
        NybbleError: as `attention`, already when it is made.
    """

    def __init__(
        self,
        query: Array,
        key: Cache | Quantized | Array,
        value: Quantized | Array | None = None,
        *,
        out: Array,
        scale: float | None = None,
        mask: str = "causal",
        lengths: Array | None = None,
        path: str = "auto",
        rounding: str = "exact",
        context: Context | None = None,
    ) -> None:
        self.query, self.out = query, out
        device, context = _find_place(query, key, value, out, lengths, context)
        self._device, self._context, self._context_c = device, context, context._c
        self._cache = key._c if isinstance(key, Cache) else ffi.NULL
        self._workspace = ffi.gc(ffi.new("struct nybpy_workspace *"), lib.nybpy_free)
        call = self._call = ffi.new("nyb_attention *", {"struct_size": _ATTENTION_BYTES})
        self._kept = _fill_tokens(call, key, value, lengths, device)
        shape, _ = _fill_query(call, query)
        _arrays.check_writable("out", out)
        _fill_out(call, out, (*shape[:3], call.value_dim))
        call.scale = 1.0 / math.sqrt(call.key_dim) if scale is None else scale
        if mask not in _MASKS or path not in PATHS or rounding not in _ROUNDINGS:
            raise _refuse_words(mask, path, rounding)
        call.mask, call.path, call.rounding = _MASKS[mask], PATHS[path], _ROUNDINGS[rounding]
        with on(device):
            check(lib.nyb_attention_plan(context._c, call, context._scratch.plan))

    def run(self) -> None:
        """Attend over what the cache (or the arrays) hold now; the result is in `out`.

        On CUDA the work is queued on PyTorch's current stream, a captured one too.
        """
        if self._device != _arrays.HOST:
            if self._cache:
                check(lib.nyb_cache_view(self._cache, self._call))
            _attend_on(self._device, self._context, self._call)
            return
        status = lib.nybpy_run(self._context_c, self._cache, self._call, self._workspace)
        if status:
            check(status)
