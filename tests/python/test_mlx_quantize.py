# SPDX-License-Identifier: Apache-2.0
"""nybble's quantize and dequantize against those of MLX for Linux, bit by bit.

Needs numpy and mlx (`pip install 'mlx[cpu]'`), and the shared library: NYBBLE_LIBRARY names it,
build/libnybble.so where that is not set.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from nybble_library import DTYPE_ID, ISAS, Library

np = pytest.importorskip("numpy", reason="numpy is not installed")
mx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'mlx[cpu]'")

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = ("f32", "f16", "bf16")
MLX_DTYPE = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
BITS_OF = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}  # how a dtype's bits are held
AFFINE = 2


class Format(ctypes.Structure):
    _fields_ = [("scheme", ctypes.c_int), ("bits", ctypes.c_int32),
                ("group_size", ctypes.c_int32), ("dtype", ctypes.c_int)]  # fmt: skip


class Floats(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("stride", ctypes.c_int64 * 3)]


class Stored(ctypes.Structure):
    _fields_ = [("format", Format), ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p),
                ("biases", ctypes.c_void_p), ("codes_stride", ctypes.c_int64 * 3),
                ("scales_stride", ctypes.c_int64 * 3),
                ("biases_stride", ctypes.c_int64 * 3)]  # fmt: skip


class Quantize(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("batch", ctypes.c_int64),
                ("heads", ctypes.c_int64), ("tokens", ctypes.c_int64), ("dim", ctypes.c_int64),
                ("input", Floats), ("output", Stored), ("rule", ctypes.c_int),
                ("reserved", ctypes.c_int32), ("non_finite", ctypes.c_void_p)]  # fmt: skip


class Dequantize(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("batch", ctypes.c_int64),
                ("heads", ctypes.c_int64), ("tokens", ctypes.c_int64), ("dim", ctypes.c_int64),
                ("input", Stored), ("output", Floats)]  # fmt: skip


@pytest.fixture(scope="module", params=ISAS)
def library(request: pytest.FixtureRequest) -> Any:
    made = Library(request.param)
    made.expect_run_size("nyb_quantize_run", Quantize)
    made.expect_run_size("nyb_dequantize_run", Dequantize)
    yield made
    made.close()


def strides(row: int, rows: int) -> Any:
    return (ctypes.c_int64 * 3)(row * rows, row * rows, row)


def stored_of(
    codes: Any, scales: Any, biases: Any, bits: int, group_size: int, dtype: str
) -> Stored:
    rows = codes.shape[0]
    return Stored(Format(AFFINE, bits, group_size, DTYPE_ID[dtype]), codes.ctypes.data,
                  scales.ctypes.data, biases.ctypes.data, strides(codes.shape[1], rows),
                  strides(scales.shape[1], rows), strides(biases.shape[1], rows))  # fmt: skip


def floats_of(values: Any, dtype: str) -> Floats:
    return Floats(values.ctypes.data, DTYPE_ID[dtype], strides(values.shape[1], values.shape[0]))


def quantize(library: Library, values: Any, dtype: str, bits: int, group_size: int) -> Any:
    """The triple of a matrix that holds the bits of `dtype`, with outputs poisoned beforehand."""
    rows, dim = values.shape
    codes = np.full((rows, dim * bits // 32), 0xA5A5A5A5, np.uint32)
    scales = np.full((rows, dim // group_size), 0xA5A5, BITS_OF[dtype])
    biases = np.full_like(scales, 0x5A5A)
    library.run("nyb_quantize_run", Quantize(
        struct_size=ctypes.sizeof(Quantize), batch=1, heads=1, tokens=rows, dim=dim,
        input=floats_of(values, dtype),
        output=stored_of(codes, scales, biases, bits, group_size, dtype)))  # fmt: skip
    return codes, scales, biases


def dequantize(library: Library, triple: Any, dtype: str, bits: int, group_size: int) -> Any:
    rows, words = triple[0].shape
    values = np.full((rows, words * 32 // bits), 0xA5A5, BITS_OF[dtype])
    library.run("nyb_dequantize_run", Dequantize(
        struct_size=ctypes.sizeof(Dequantize), batch=1, heads=1, tokens=rows, dim=values.shape[1],
        input=stored_of(*triple, bits, group_size, dtype),
        output=floats_of(values, dtype)))  # fmt: skip
    return values


def to_mlx(bits: Any, dtype: str) -> Any:
    return mx.array(bits).view(MLX_DTYPE[dtype])


def from_mlx(array: Any, dtype: str) -> Any:
    return np.array(array.view(mx.uint32 if BITS_OF[dtype] is np.uint32 else mx.uint16))


def to_bits(values: Any, dtype: str) -> Any:
    """float64 values rounded by MLX to dtype, as bits."""
    return from_mlx(mx.array(values.astype(np.float32)).astype(MLX_DTYPE[dtype]), dtype)


def to_float(bits: Any, dtype: str) -> Any:
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if dtype == "f32" else np.float16).astype(np.float32)


def kinds_of_groups(dtype: str, group_size: int, rng: Any) -> Any:
    """Groups [n, group_size] of `dtype`'s bits that could each go wrong in a way of their own."""
    largest = {"f32": 3.0e38, "f16": 65504.0, "bf16": 3.0e38}[dtype]
    tiniest = {"f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}[dtype]
    ramp = np.linspace(-1, 1, group_size)
    normal = rng.standard_normal((40, group_size))
    rows = [
        *(normal[:12] * 10.0 ** rng.integers(-6, 4, (12, 1))),
        *(-np.abs(normal[12:18])),  # all negative
        *np.abs(normal[18:24]),
        *(normal[24:30] * 1e-7),  # about the floor of the scale
        *(normal[30:36] + 1000.0),  # far from zero
        *(np.round(normal[36:40] * 8) / 8),  # many ties
        -4.5 + ramp / 2,
        *(np.full(group_size, c) for c in (0.0, -0.0, 9.0, -9.0, 1.0, -1e-7, 5e-8, 1e-7, largest,
                                           -largest, tiniest, -tiniest)),
        *(ramp * c for c in (1e-9, 1e-7, 3e-7, 1.0, 60000.0, largest / 2, tiniest * 3)),
        np.where(np.arange(group_size) == 5, 300.0, normal[0]),  # an outlier
        np.where(np.arange(group_size) == 5, -300.0, 0.0),
        np.where(np.arange(group_size) % 2 == 0, 0.0, -0.0),
        np.arange(group_size) / 2.0,
        -np.arange(group_size) / 2.0,
        np.arange(group_size) % 2 * 1.0,
        np.where(np.arange(group_size) % 2 == 0, -7.5, 7.5),  # |min| equals |max|
    ]  # fmt: skip
    made = to_bits(np.array(rows), dtype)
    # Any bits at all, as long as the group's range fits f32; exponents at random are what makes
    # denormals and huge values meet.
    exponent = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}[dtype]
    anything = rng.integers(
        0, np.iinfo(BITS_OF[dtype]).max, (200, group_size), BITS_OF[dtype], True
    )
    anything[(anything & exponent) == exponent] = 0
    value = to_float(anything, dtype).astype(np.float64)
    fits = value.max(axis=1) - value.min(axis=1) < 3.4e38
    # The same, with exponents that lie close together.
    near = anything[:100] & BITS_OF[dtype](~exponent & np.iinfo(BITS_OF[dtype]).max)
    near |= (rng.integers(100, 104, near.shape) << {"f32": 23, "bf16": 7, "f16": 10}[dtype]
             & exponent).astype(BITS_OF[dtype])  # fmt: skip
    value = to_float(near, dtype).astype(np.float64)
    assert np.isfinite(value).all() or dtype == "f16"
    near = near[np.isfinite(value).all(axis=1)]
    return np.concatenate([made, anything[fits], near])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_quantize_and_back(library: Library, bits: int, group_size: int, dtype: str) -> None:
    rng = np.random.default_rng(bits * 1000 + group_size + DTYPE_ID[dtype])
    groups = kinds_of_groups(dtype, group_size, rng)
    groups = groups[: len(groups) // 3 * 3].reshape(-1, 3 * group_size)  # three groups in a row
    ours = quantize(library, groups, dtype, bits, group_size)
    theirs = mx.quantize(to_mlx(groups, dtype), group_size=group_size, bits=bits)
    for name, mine, other in zip(("scales", "biases"), ours[1:], theirs[1:]):
        assert np.array_equal(mine, from_mlx(other, dtype)), name
    assert np.array_equal(ours[0], np.array(theirs[0])), "codes"
    values = dequantize(library, ours, dtype, bits, group_size)
    back = mx.dequantize(*theirs, group_size=group_size, bits=bits)
    assert np.array_equal(values, from_mlx(back, dtype)), "dequantized"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_random_normal(library: Library, bits: int, group_size: int, dtype: str) -> None:
    rng = np.random.default_rng(7)
    values = to_bits(rng.standard_normal((96, 1024)), dtype)
    ours = quantize(library, values, dtype, bits, group_size)
    theirs = mx.quantize(to_mlx(values, dtype), group_size=group_size, bits=bits)
    assert np.array_equal(ours[0], np.array(theirs[0]))
    assert np.array_equal(ours[1], from_mlx(theirs[1], dtype))
    assert np.array_equal(ours[2], from_mlx(theirs[2], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_dequantize_of_any_scale(library: Library, bits: int, dtype: str) -> None:
    """Scales and biases of any finite bits, denormal, huge and overflowing ones among them."""
    rng = np.random.default_rng(bits)
    group_size, rows, groups = 32, 300, 4
    codes = rng.integers(0, 2**32, (rows, groups * bits), np.uint32)
    exponent = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}[dtype]
    pair = rng.integers(0, np.iinfo(BITS_OF[dtype]).max, (2, rows, groups), BITS_OF[dtype], True)
    pair[(pair & exponent) == exponent] = 0
    pair[0, : rows // 2] &= BITS_OF[dtype](~exponent & np.iinfo(BITS_OF[dtype]).max)  # denormal
    ours = dequantize(library, (codes, pair[0], pair[1]), dtype, bits, group_size)
    theirs = from_mlx(mx.dequantize(mx.array(codes), to_mlx(pair[0], dtype),
                                    to_mlx(pair[1], dtype), group_size=group_size, bits=bits),
                      dtype)  # fmt: skip
    is_number = ~np.isnan(to_float(theirs, dtype))  # inf - inf: which NaN it is does not matter
    assert np.array_equal(np.isnan(to_float(ours, dtype)), ~is_number)
    assert np.array_equal(ours[is_number], theirs[is_number])
