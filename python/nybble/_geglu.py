# SPDX-License-Identifier: Apache-2.0
"""The gated activation."""

from __future__ import annotations

from . import _arrays
from ._arrays import Array
from ._context import Context
from ._errors import check, refuse
from ._nybble import ffi, lib
from ._place import common_device, context_on, on

PATHS = {"auto": 0, "fused": 1, "compat": 2}


def path_id(path: str) -> int:
    if path not in PATHS:
        raise refuse(f"path is {path!r}; it must be one of {list(PATHS)}", lib.NYB_ERROR_ENUM)
    return PATHS[path]


def _matrix(name: str, reading: _arrays.Reading) -> tuple[int, int, int]:
    """Rows, columns and the stride between rows, where the leading axes are one even row."""
    _, _, shape, strides = reading
    if not shape:
        raise refuse(f"{name} has no axes; it must have at least one", lib.NYB_ERROR_SHAPE)
    if strides[-1] != 1 and shape[-1] > 1:
        raise refuse(
            f"{name} has stride {strides[-1]} along its last axis; it must be contiguous there",
            lib.NYB_ERROR_STRIDE,
        )
    rows, stride = 1, 0
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1])):
        if size == 1:
            continue
        if rows == 1:
            stride = step
        elif step != stride * rows:
            raise refuse(
                f"{name} has strides {tuple(strides)}; its rows must stand at even distances",
                lib.NYB_ERROR_STRIDE,
            )
        rows *= size
    return rows, shape[-1], stride or shape[-1]


def geglu(
    gate: Array,
    up: Array,
    *,
    out: Array | None = None,
    path: str = "auto",
    context: Context | None = None,
) -> Array:
    """gelu_tanh(gate) * up, each step rounded to the dtype (docs/numerics.md, section 4).

    For f16 and bf16 every bit is that of the steps spelled out in PyTorch or MLX.

    Args:
        gate, up: f32, f16 or bf16 [..., columns], of one shape and dtype. Rows may be halves of
            one array.
        out: where to put it; may be `gate` or `up` itself.
        path: "auto" (NYBBLE_GEGLU, else "fused"), "fused" or "compat": the same bits.

    Returns:
        A new array of gate's kind, or `out`.

    Raises:
        NybbleError: SHAPE, DTYPE where the arrays differ; STRIDE; OVERLAP; POINTER for arrays on
            different devices.
    """
    arrays = [("gate", gate), ("up", up)]
    if out is not None:
        arrays.append(("out", out))
    device = common_device(arrays)
    context = context_on(device, context, "gate")
    readings = [_arrays.read(gate), _arrays.read(up)]
    if out is None:
        out = _arrays.empty(gate, readings[0][2], readings[0][1])
    _arrays.check_writable("out", out)
    readings.append(_arrays.read(out))
    for name, reading in zip(("up", "out"), readings[1:]):
        if tuple(reading[2]) != tuple(readings[0][2]):
            raise refuse(
                f"{name} is {tuple(reading[2])} and gate {tuple(readings[0][2])}; they must be "
                "the same",
                lib.NYB_ERROR_SHAPE,
            )
        if reading[1] != readings[0][1]:
            raise refuse(
                f"{name} is {_arrays.NAMES[reading[1]]} and gate {_arrays.NAMES[readings[0][1]]}; "
                "they must be the same",
                lib.NYB_ERROR_DTYPE,
            )
    call = ffi.new("nyb_geglu *")
    call.struct_size = ffi.sizeof("nyb_geglu")
    call.dtype, call.path = readings[0][1], path_id(path)
    for name, reading in zip(("gate", "up", "out"), readings):
        call.rows, call.columns, stride = _matrix(name, reading)
        setattr(call, name, ffi.cast("void *", reading[0]))
        setattr(call, f"{name}_stride", stride)
    with on(device) as place:
        check(lib.nyb_geglu_run(context._c, call, place.stream))
    return out
