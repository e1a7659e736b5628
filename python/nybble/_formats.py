# SPDX-License-Identifier: Apache-2.0
"""How rows of keys and values are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _arrays
from ._arrays import Array
from ._errors import check, refuse
from ._nybble import ffi, lib


class Format(NamedTuple):
    """One row's layout; `affine()` and `plain()` make them.

    bits is 2, 3, 4, 5, 6 or 8 (MLX's affine layout; group_size 32, 64 or 128 elements share a
    scale and a bias of `dtype`), or 0: the elements themselves, in `dtype`.
    """

    bits: int
    group_size: int
    dtype: str

    def _fill(self, c_format: Any) -> None:
        c_format.scheme = lib.NYB_AFFINE if self.bits else lib.NYB_PLAIN
        c_format.bits = self.bits
        c_format.group_size = self.group_size
        c_format.dtype = _arrays.float_id(self.dtype)

    def row_bytes(self, dim: int) -> int:
        """Bytes that a row of `dim` elements takes, scales and biases included."""
        c_format = ffi.new("nyb_format *")
        self._fill(c_format)
        size = int(lib.nyb_format_row_bytes(c_format, dim))
        if size < 0:
            check(self._status())
        return size

    def _status(self) -> int:
        """Which status goes with nyb_last_error(), where the library gave -1 instead of one."""
        if self.bits not in (0, 2, 3, 4, 5, 6, 8):
            return int(lib.NYB_ERROR_BITS)
        return int(lib.NYB_ERROR_GROUP_SIZE if self.bits else lib.NYB_ERROR_SHAPE)


def affine(bits: int, group_size: int = 64, dtype: str = "bf16") -> Format:
    """MLX's affine quantization: value = scale * code + bias for each group.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128; it must divide the rows.
        dtype: of scales and biases: "f32", "f16" or "bf16".
    """
    if bits == 0:
        raise refuse("bits is 0; it must be 2, 3, 4, 5, 6 or 8", lib.NYB_ERROR_BITS)
    return Format(bits, group_size, dtype)


def plain(dtype: str) -> Format:
    """The elements themselves: "f32", "f16" or "bf16"."""
    return Format(0, 0, dtype)


class Quantized:
    """Rows in MLX's affine layout: three arrays of one kind, read where they lie.

    Args:
        codes: uint32 [batch, heads, tokens, dim * bits / 32]; [tokens, ...] and
            [heads, tokens, ...] are batches of one. Any strides, the last axis contiguous.
        scales, biases: f32, f16 or bf16 [batch, heads, tokens, dim / group_size].
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128.

    Raises:
        NybbleError: SHAPE or DTYPE where the three do not belong together; BITS, GROUP_SIZE.

    `mx.quantize(x, group_size, bits)` gives these three arrays: `Quantized(*that, bits=bits)`.
    """

    __slots__ = (
        "biases", "bits", "codes", "device", "dim", "group_size", "scales", "shape", "_stored",
    )  # fmt: skip

    def __init__(
        self, codes: Array, scales: Array, biases: Array, *, bits: int, group_size: int = 64
    ) -> None:
        self.codes, self.scales, self.biases = codes, scales, biases
        self.bits, self.group_size = bits, group_size
        stored = ffi.new("nyb_stored *")
        readings = [_arrays.read(array) for array in (codes, scales, biases)]
        devices = [_arrays.device_of(array) for array in (codes, scales, biases)]
        if devices.count(devices[0]) != 3:
            raise refuse(
                f"codes, scales and biases are on devices {devices} (-1 is the CPU); they must be "
                "on one",
                lib.NYB_ERROR_POINTER,
            )
        self.device = devices[0]
        sizes = [
            _arrays.rows(name, reading)
            for name, reading in zip(("codes", "scales", "biases"), readings)
        ]
        if readings[0][1] != _arrays.U32:
            raise refuse(
                f"codes are {_arrays.NAMES[readings[0][1]]}; they must be uint32",
                lib.NYB_ERROR_DTYPE,
            )
        if readings[1][1] != readings[2][1] or readings[1][1] not in (1, 2, 3):
            raise refuse(
                f"scales are {_arrays.NAMES[readings[1][1]]} and biases "
                f"{_arrays.NAMES[readings[2][1]]}; both must be f32, f16 or bf16, the same",
                lib.NYB_ERROR_DTYPE,
            )
        groups = readings[1][2][-1]
        self.dim = groups * group_size
        if sizes[0][:3] != sizes[1][:3] or sizes[0][:3] != sizes[2][:3]:
            raise refuse(
                f"codes, scales and biases are {[tuple(r[2]) for r in readings]}; all but their "
                "last axes must be the same",
                lib.NYB_ERROR_SHAPE,
            )
        if readings[0][2][-1] * 32 != self.dim * bits or readings[2][2][-1] != groups:
            raise refuse(
                f"codes, scales and biases have rows of {readings[0][2][-1]}, {groups} and "
                f"{readings[2][2][-1]}; at {bits} bits and groups of {group_size} the first must "
                f"be {self.dim * bits / 32:g} for the second, and the third the same as that",
                lib.NYB_ERROR_SHAPE,
            )
        self.shape = (*sizes[0][:3], self.dim)
        stored.format.scheme = lib.NYB_AFFINE
        stored.format.bits, stored.format.group_size = bits, group_size
        stored.format.dtype = readings[1][1]
        stored.codes, stored.scales, stored.biases = (
            ffi.cast("void *", reading[0]) for reading in readings
        )
        stored.codes_stride, stored.scales_stride, stored.biases_stride = (
            size[3:] for size in sizes
        )
        self._stored = stored

    def __repr__(self) -> str:
        return f"nybble.Quantized({self.shape}, bits={self.bits}, group_size={self.group_size})"


def plain_stored(name: str, array: Array) -> tuple[Any, tuple[int, int, int, int]]:
    """A float array as nyb_stored, and its shape."""
    reading = _arrays.read(array)
    size = _arrays.rows(name, reading)
    if reading[1] not in (1, 2, 3):
        raise refuse(
            f"{name} is {_arrays.NAMES[reading[1]]}; it must be f32, f16 or bf16",
            lib.NYB_ERROR_DTYPE,
        )
    stored = ffi.new("nyb_stored *")
    stored.format.scheme, stored.format.dtype = lib.NYB_PLAIN, reading[1]
    stored.codes = ffi.cast("void *", reading[0])
    stored.codes_stride = size[3:]
    return stored, (*size[:3], reading[2][-1])
