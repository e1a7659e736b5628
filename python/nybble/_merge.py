# SPDX-License-Identifier: Apache-2.0
"""Results over parts of the tokens into the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence

from . import _arrays
from ._arrays import Array
from ._context import Context
from ._errors import check, refuse
from ._nybble import ffi, lib
from ._place import common_device, context_on, on


def merge(
    outs: Sequence[Array], lses: Sequence[Array], *, context: Context | None = None
) -> tuple[Array, Array]:
    """Attention over disjoint sets of tokens into attention over all of them, part after part.

    Args:
        outs: results of `attention`, each f32, f16 or bf16 [batch, query_heads, query_len,
            value_dim]; ask the parts for f32, since rounded ones cost their rounding.
        lses: theirs, each f32 [batch, query_heads, query_len] (`return_lse=True`).

    Returns:
        (out, lse) of the kind and dtype of the first part.

    Raises:
        NybbleError: SHAPE or DTYPE where the parts differ, or there is none; UNSUPPORTED on CUDA
            for more scattered parts than a kernel's parameter lists.
    """
    parts = len(outs)
    if parts == 0 or len(lses) != parts:
        raise refuse(
            f"outs has {parts} parts and lses {len(lses)}; both must have as many, at least 1",
            lib.NYB_ERROR_SHAPE,
        )
    named = [(f"outs[{part}]", out) for part, out in enumerate(outs)]
    named += [(f"lses[{part}]", lse) for part, lse in enumerate(lses)]
    device = common_device(named)
    context = context_on(device, context, "outs[0]")
    out_views, lse_views = ffi.new("nyb_input[]", parts), ffi.new("nyb_input[]", parts)
    shape: tuple[int, ...] = tuple(_arrays.read(outs[0])[2])
    if len(shape) != 4:
        raise refuse(f"outs[0] has {len(shape)} axes; it must have 4", lib.NYB_ERROR_SHAPE)
    for part, (out, lse) in enumerate(zip(outs, lses)):
        for name, array, views, wanted in (
            ("outs", out, out_views, shape),
            ("lses", lse, lse_views, shape[:3]),
        ):
            address, dtype, have, strides = _arrays.read(array)
            if tuple(have) != wanted or (len(wanted) == 4 and shape[3] > 1 and strides[3] != 1):
                raise refuse(
                    f"{name}[{part}] is {tuple(have)} with strides {tuple(strides)}; it must be "
                    f"{wanted}, an out contiguous along its last axis",
                    lib.NYB_ERROR_SHAPE,
                )
            lib.nybpy_set_view(ffi.addressof(views, part), address, dtype, *strides[:3])
    made = _arrays.empty(outs[0], shape, _arrays.read(outs[0])[1])
    made_lse = _arrays.empty(outs[0], shape[:3], _arrays.F32)
    call = ffi.new("nyb_attention_merge *")
    call.struct_size = ffi.sizeof("nyb_attention_merge")
    call.parts = parts
    call.batch, call.query_heads, call.query_len, call.value_dim = shape
    call.outs, call.lses = out_views, lse_views
    for name, array in (("out", made), ("lse", made_lse)):
        address, dtype, _, strides = _arrays.read(array)
        lib.nybpy_set_view(ffi.addressof(call, name), address, dtype, *strides[:3])
    with on(device) as place:
        check(lib.nyb_attention_merge_run(context._c, call, place.stream))
    return made, made_lse
