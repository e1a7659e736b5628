# SPDX-License-Identifier: Apache-2.0
"""Floats to stored rows and back."""

from __future__ import annotations

from typing import Any

from . import _arrays
from ._arrays import Array
from ._context import Context
from ._errors import check, refuse
from ._formats import Format, Quantized
from ._nybble import ffi, lib
from ._place import common_device, context_on, on

_RULES = {"mlx_cpu": lib.NYB_RULE_MLX_CPU, "mlx_gpu": lib.NYB_RULE_MLX_GPU}


def rule_id(rule: str) -> int:
    if rule not in _RULES:
        raise refuse(f"rule is {rule!r}; it must be one of {list(_RULES)}", lib.NYB_ERROR_ENUM)
    return int(_RULES[rule])


def flag_pointer(non_finite: Array | None, device: int) -> Any:
    """The pointer of an int32 flag on the device, which the GPU sets; NULL for none."""
    if non_finite is None:
        return ffi.NULL
    address, dtype, shape, _ = _arrays.read(non_finite)
    if dtype != _arrays.I32 or 0 in shape or device == _arrays.HOST:
        raise refuse(
            f"non_finite is {_arrays.NAMES[dtype]} {tuple(shape)} for arrays on device {device}; "
            "it must be an int32 tensor on the CUDA device that has them (on the CPU the call "
            "fails)",
            lib.NYB_ERROR_VALUE,
        )
    return ffi.cast("int32_t *", address)


def quantize(
    array: Array,
    bits: int = 4,
    group_size: int = 64,
    *,
    dtype: Any = None,
    rule: str = "mlx_cpu",
    out: Quantized | None = None,
    non_finite: Array | None = None,
    context: Context | None = None,
) -> Quantized:
    """Quantize rows, bit for bit as `mx.quantize` does (rule "mlx_cpu": MLX for Linux).

    Args:
        array: f32, f16 or bf16 [tokens, dim], [heads, tokens, dim] or [batch, heads, tokens, dim];
            dim a multiple of group_size.
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128.
        dtype: of scales and biases; the array's own where None.
        rule: "mlx_cpu" or "mlx_gpu" (docs/numerics.md, section 1).
        out: where to put them: rows of the array's shape, at the same bits and group size.
        non_finite: on CUDA, an int32 tensor there that is set to 1 where a group could not be
            stored, which is then zeros; never set back to 0.

    Returns:
        A `Quantized` with three new arrays of the array's kind and its leading axes, or `out`.

    Raises:
        NybbleError: NON_FINITE names the first NaN or infinity (on the CPU); BITS, GROUP_SIZE,
            DTYPE; POINTER for arrays on different devices.
    """
    named = [("array", array)]
    if out is not None:
        named += [("out.codes", out.codes)]
    if non_finite is not None:
        named += [("non_finite", non_finite)]
    device = common_device(named)
    context = context_on(device, context, "array")
    reading = _arrays.read(array)
    address, dtype_in, shape, _ = reading
    batch, heads, tokens, *strides = _arrays.rows("array", reading)
    if dtype_in not in (1, 2, 3):
        raise refuse(
            f"array is {_arrays.NAMES[dtype_in]}; it must be f32, f16 or bf16", lib.NYB_ERROR_DTYPE
        )
    dim = shape[-1]
    dtype_out = dtype_in if dtype is None else _arrays.float_id(dtype)
    Format(bits, group_size, _arrays.NAMES[dtype_out]).row_bytes(dim)  # refuses what does not exist
    if out is None:
        out = _empty_rows(array, shape, bits, group_size, dtype_out)
    else:
        wanted = (batch, heads, tokens, dim), bits, group_size
        if (out.shape, out.bits, out.group_size) != wanted:
            raise refuse(
                f"out's shape, bits and group_size are {(out.shape, out.bits, out.group_size)}; "
                f"they must be {wanted}",
                lib.NYB_ERROR_SHAPE,
            )
        for name in ("codes", "scales", "biases"):
            _arrays.check_writable(f"out.{name}", getattr(out, name))
    call = ffi.new("nyb_quantize *")
    call.struct_size = ffi.sizeof("nyb_quantize")
    call.batch, call.heads, call.tokens, call.dim = batch, heads, tokens, dim
    lib.nybpy_set_view(ffi.addressof(call, "input"), address, dtype_in, *strides)
    call.rule = rule_id(rule)
    call.non_finite = flag_pointer(non_finite, device)
    ffi.memmove(ffi.addressof(call, "output"), out._stored, ffi.sizeof("nyb_stored"))
    with on(device) as place:
        check(lib.nyb_quantize_run(context._c, call, place.stream))
    return out


def _empty_rows(array: Array, shape: Any, bits: int, group_size: int, dtype: int) -> Quantized:
    lead, dim = tuple(shape[:-1]), shape[-1]
    codes = _arrays.empty(array, (*lead, dim * bits // 32), _arrays.U32)
    scales = _arrays.empty(array, (*lead, dim // group_size), dtype)
    biases = _arrays.empty(array, (*lead, dim // group_size), dtype)
    return Quantized(codes, scales, biases, bits=bits, group_size=group_size)


def dequantize(
    rows: Quantized,
    dtype: Any = None,
    *,
    out: Array | None = None,
    context: Context | None = None,
) -> Array:
    """Stored rows back to floats, bit for bit as `mx.dequantize` does.

    Args:
        rows: what `quantize` gives, or `Quantized` over arrays of one's own.
        dtype: of the result; that of the scales where None (or of `out`).
        out: where to put it: [..., dim] with the leading axes of `rows.codes`.

    Returns:
        An array of the kind of `rows.codes`, or `out`.

    Raises:
        NybbleError: SHAPE or DTYPE for an `out` that does not fit; OVERLAP; POINTER for arrays on
            different devices.
    """
    named = [("rows", rows.codes)] + ([] if out is None else [("out", out)])
    device = common_device(named)
    context = context_on(device, context, "rows")
    lead = tuple(_arrays.read(rows.codes)[2][:-1])
    if out is None:
        wanted = rows._stored.format.dtype if dtype is None else _arrays.float_id(dtype)
        out = _arrays.empty(rows.codes, (*lead, rows.dim), wanted)
    _arrays.check_writable("out", out)
    reading = _arrays.read(out)
    if tuple(reading[2]) != (*lead, rows.dim):
        raise refuse(
            f"out is {tuple(reading[2])}; it must be {(*lead, rows.dim)}", lib.NYB_ERROR_SHAPE
        )
    if dtype is not None and _arrays.float_id(dtype) != reading[1]:
        raise refuse(f"out is {_arrays.NAMES[reading[1]]}, not {dtype}", lib.NYB_ERROR_DTYPE)
    call = ffi.new("nyb_dequantize *")
    call.struct_size = ffi.sizeof("nyb_dequantize")
    call.batch, call.heads, call.tokens, call.dim = rows.shape
    call.input = rows._stored[0]
    strides = _arrays.rows("out", reading)[3:]
    lib.nybpy_set_view(ffi.addressof(call, "output"), reading[0], reading[1], *strides)
    with on(device) as place:
        check(lib.nyb_dequantize_run(context._c, call, place.stream))
    return out
