# SPDX-License-Identifier: Apache-2.0
"""nybble's GeGLU against MLX for Linux: every gate of f16 and bf16, bit by bit; f32 by its bound.

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
nn = pytest.importorskip("mlx.nn", reason="mlx is not installed: pip install 'mlx[cpu]'")

MLX_DTYPE = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
INFINITY = {"f16": 0x7C00, "bf16": 0x7F80}
NAN = {"f16": 0x7E00, "bf16": 0x7FC0}
PATHS = {"fused": 1, "compat": 2}


class Geglu(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("rows", ctypes.c_int64),
                ("columns", ctypes.c_int64), ("dtype", ctypes.c_int), ("path", ctypes.c_int),
                ("gate", ctypes.c_void_p), ("gate_stride", ctypes.c_int64),
                ("up", ctypes.c_void_p), ("up_stride", ctypes.c_int64),
                ("out", ctypes.c_void_p), ("out_stride", ctypes.c_int64)]  # fmt: skip


@pytest.fixture(scope="module", params=[(isa, path) for isa in ISAS for path in PATHS])
def geglu(request: pytest.FixtureRequest) -> Any:
    """A function of (gate, up, dtype), arrays of bits or floats, on one ISA and path."""
    isa, path = request.param
    library = Library(isa)
    library.expect_run_size("nyb_geglu_run", Geglu)

    def run(gate: Any, up: Any, dtype: str) -> Any:
        out = np.full_like(gate, -1 if dtype == "f32" else 0xFFFF)
        call = Geglu(ctypes.sizeof(Geglu), 1, gate.size, DTYPE_ID[dtype], PATHS[path],
                     gate.ctypes.data, 0, up.ctypes.data, 0, out.ctypes.data, 0)  # fmt: skip
        library.run("nyb_geglu_run", call)
        return out

    yield run
    library.close()


def mlx_geglu(gate: Any, up: Any, dtype: str, gelu: Any = nn.gelu_approx) -> Any:
    """Bits in, bits out, as mlx-lm's gemma models do it."""
    view = MLX_DTYPE[dtype]
    result = gelu(mx.array(gate).view(view)) * mx.array(up).view(view)
    assert result.dtype == view
    return np.array(result.view(mx.uint16))


def with_one_nan(bits: Any, dtype: str) -> Any:
    """MLX's NaNs have any sign and payload; nybble's only one."""
    return np.where((bits & 0x7FFF) > INFINITY[dtype], np.uint16(NAN[dtype]), bits)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_gate(geglu: Any, dtype: str) -> None:
    random = np.random.default_rng(0)
    gate = np.arange(65536, dtype=np.uint16)
    ones = np.array(mx.ones(65536, MLX_DTYPE[dtype]).view(mx.uint16))
    for up in [ones, *(random.integers(0, 65536, 65536, dtype=np.uint16) for _ in range(8))]:
        expected = with_one_nan(mlx_geglu(gate, up, dtype), dtype)
        wrong = np.flatnonzero(geglu(gate, up, dtype) != expected)
        assert wrong.size == 0, f"{wrong.size} differ, the first at gate {gate[wrong[0]]:04x}"


def test_f32(geglu: Any) -> None:
    random = np.random.default_rng(1)
    gate = (random.standard_normal(1 << 18) * 3).astype(np.float32)
    up = random.standard_normal(1 << 18).astype(np.float32)
    expected = np.array(nn.gelu_approx(mx.array(gate)) * mx.array(up)).astype(np.float64)
    error = np.abs(geglu(gate, up, "f32") - expected)
    # nybble's own bound, and as much for MLX, whose tanh and pow are f32 too.
    assert (error <= 2 * 2.0**-21 * np.abs(gate.astype(np.float64) * up)).all()
