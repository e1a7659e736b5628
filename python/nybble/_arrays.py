# SPDX-License-Identifier: Apache-2.0
"""What the package knows of arrays: where one lies, and how to make one of the same kind.

An array is read as (address, dtype, shape, strides in elements). No library of arrays is imported
here: an array brings its own. Where it lies, in host memory or on a GPU, is `device_of`'s to say;
_place.py holds arrays of one call together.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ._errors import refuse
from ._nybble import ffi, lib

#: A NumPy array, a PyTorch tensor (on the CPU or a CUDA device), an MLX array, or any object with
#: `__dlpack__` in CPU memory.
Array: TypeAlias = Any

Reading: TypeAlias = tuple[int, int, Sequence[int], Sequence[int]]

# nyb_dtype for floats; the others are numbers of this file's own, which no float field accepts.
F32, F16, BF16 = lib.NYB_F32, lib.NYB_F16, lib.NYB_BF16
BOOL, U32, I32, U16, OTHER = 100, 101, 102, 103, 199
HOST = -1  # the device of what is in CPU memory
BYTES = {F32: 4, F16: 2, BF16: 2, BOOL: 1, U32: 4, I32: 4, U16: 2}

_IDS = {
    "float32": F32,
    "float16": F16,
    "bfloat16": BF16,
    "bool": BOOL,
    "bool_": BOOL,
    "uint32": U32,
    "int32": I32,
    "uint16": U16,
    "f32": F32,
    "f16": F16,
    "bf16": BF16,
}
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", BOOL: "bool", U32: "uint32"}
NAMES |= {I32: "int32", U16: "uint16", OTHER: "another dtype"}


def dtype_id(dtype: Any) -> int:
    """The number of a dtype: "f16", "float16", numpy.float16, torch.float16, mlx.core.float16."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if not isinstance(name, str):
        name = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    found = _IDS.get(name)
    if found is None:
        raise refuse(f"dtype {dtype!r} is none of f32, f16 and bf16", lib.NYB_ERROR_DTYPE)
    return int(found)


def float_id(dtype: Any) -> int:
    """As dtype_id, of the dtypes that rows can have."""
    found = dtype_id(dtype)
    if found not in (F32, F16, BF16):
        raise refuse(f"dtype {dtype!r} is none of f32, f16 and bf16", lib.NYB_ERROR_DTYPE)
    return found


# ---- Reading ------------------------------------------------------------------------------------


def _read_torch(array: Any) -> Reading:
    if not (array.is_cpu or array.is_cuda):
        raise refuse(
            f"a tensor is on {array.device}; it must be in CPU memory or on a CUDA device",
            lib.NYB_ERROR_POINTER,
        )
    return array.data_ptr(), _dtype_of(array.dtype), array.shape, array.stride()


def _read_numpy(array: Any) -> Reading:
    dtype = array.dtype
    size = dtype.itemsize
    try:
        # Much faster than asking for the array's interface, but for contiguous memory alone.
        address = int(ffi.cast("uintptr_t", ffi.from_buffer(array)))
    except (ValueError, TypeError, BufferError):
        address = array.__array_interface__["data"][0]
    strides = array.strides
    return address, _dtype_of(dtype), array.shape, tuple([stride // size for stride in strides])


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_DLPACK_CPU = 1
# (code, bits) of DLPack's data types.
_DLPACK_DTYPES = {(2, 32): F32, (2, 16): F16, (4, 16): BF16, (6, 8): BOOL, (1, 32): U32}
_DLPACK_DTYPES |= {(0, 32): I32, (1, 16): U16}


def _read_dlpack(array: Any) -> Reading:
    capsule = array.__dlpack__()
    tensor = ffi.cast("struct nybpy_dlpack *", _capsule_pointer(capsule, b"dltensor"))
    if tensor.device_type != _DLPACK_CPU:
        raise refuse(
            f"an array is on DLPack device {tensor.device_type}; it must be in CPU memory, or a "
            "PyTorch tensor",
            lib.NYB_ERROR_POINTER,
        )
    rank = tensor.rank
    shape = ffi.unpack(tensor.shape, rank) if rank else []
    if tensor.strides:
        strides = ffi.unpack(tensor.strides, rank)
    else:
        strides = contiguous_strides(shape)
    address = int(ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset
    return address, _DLPACK_DTYPES.get((tensor.code, tensor.bits), OTHER), shape, strides


_dtype_ids: dict[Any, int] = {}


def _dtype_of(dtype: Any) -> int:
    """The number of an array's dtype, OTHER for one that the library has no use for."""
    found = _dtype_ids.get(dtype)
    if found is None:
        name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
        found = _dtype_ids[dtype] = _IDS.get(name, OTHER)
    return found


class BFloat16:
    """bfloat16 values where there is no bfloat16 array: NumPy's uint16 array of their bits."""

    __slots__ = ("bits",)

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    def __repr__(self) -> str:
        return f"nybble.BFloat16({self.bits!r})"


def _read_bfloat16(array: BFloat16) -> Reading:
    address, dtype, shape, strides = read(array.bits)
    if dtype != U16:
        raise refuse(f"bits are {NAMES[dtype]}; they must be uint16", lib.NYB_ERROR_DTYPE)
    return address, BF16, shape, strides


_readers: dict[type, Callable[[Any], Reading]] = {BFloat16: _read_bfloat16}


def _reader(array: Any) -> Callable[[Any], Reading]:
    for base in type(array).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name == "torch.Tensor":
            return _read_torch
        if name == "numpy.ndarray":
            return _read_numpy
    if hasattr(array, "__dlpack__"):
        return _read_dlpack
    raise TypeError(
        f"{type(array).__qualname__} is no array: NumPy, PyTorch and MLX arrays are, and whatever "
        "has __dlpack__"
    )


def read(array: Array) -> Reading:
    """Address, dtype, shape and strides (in elements) of an array. It must live on meanwhile."""
    kind = type(array)
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = _reader(array)
    return reader(array)


def device_of(array: Array) -> int:
    """The number of the CUDA device that has a PyTorch tensor; HOST for any other array."""
    ask = getattr(array, "get_device", None)
    if ask is None or array.is_cpu:
        return HOST
    return int(ask())


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def rows(name: str, reading: Reading) -> tuple[int, int, int, int, int, int]:
    """(batch, heads, tokens) and their strides; a matrix is one head, three axes one batch entry.

    The last axis must be contiguous: the library has no stride for it.
    """
    _, _, shape, strides = reading
    rank = len(shape)
    if not 2 <= rank <= 4:
        raise refuse(f"{name} has {rank} axes; it must have 2 to 4", lib.NYB_ERROR_SHAPE)
    if strides[-1] != 1 and shape[-1] > 1:
        raise refuse(
            f"{name} has stride {strides[-1]} along its last axis; it must be contiguous there",
            lib.NYB_ERROR_STRIDE,
        )
    if rank == 4:
        return shape[0], shape[1], shape[2], strides[0], strides[1], strides[2]
    if rank == 3:
        return 1, shape[0], shape[1], 0, strides[0], strides[1]
    return 1, 1, shape[0], 0, 0, strides[0]


def check_writable(name: str, array: Array) -> None:
    flags = getattr(array, "flags", None)
    if flags is not None and getattr(flags, "writeable", True) is False:
        raise refuse(f"{name} is read-only; it must be writable")


# ---- Making -------------------------------------------------------------------------------------


def _module_of(array: Any) -> str:
    for base in type(array).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("torch", "numpy", "mlx"):
            return root
    return "numpy"


def _numpy_dtype(dtype: int, like: Any) -> Any:
    import numpy

    if dtype != BF16:
        return numpy.dtype(NAMES[dtype])
    name = getattr(getattr(like, "dtype", None), "name", "")
    if name == "bfloat16" and _module_of(like) == "numpy":
        return like.dtype
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise refuse(
            "NumPy has no bfloat16 of its own; install ml_dtypes, or ask for f16 or f32",
            lib.NYB_ERROR_DTYPE,
        ) from None
    return numpy.dtype(ml_dtypes.bfloat16)


def empty(like: Array, shape: Sequence[int], dtype: int) -> Array:
    """A new contiguous array of the kind that `like` is and where it is, to be written."""
    kind = _module_of(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, NAMES[dtype]), device=like.device)
    if kind == "mlx":
        import mlx.core as mx

        # Evaluated, so that there is memory; nobody else has it yet, so that it can be written.
        made = mx.zeros(tuple(shape), dtype=getattr(mx, NAMES[dtype] if dtype != BOOL else "bool_"))
        mx.eval(made)
        return made
    import numpy

    return numpy.empty(tuple(shape), _numpy_dtype(dtype, like))


class _DeviceMemory:
    """Memory of a GPU as PyTorch takes it."""

    def __init__(self, address: int, count: int, words: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": words,
            "version": 3,
        }


def over_memory(
    kind: str, pointer: Any, dtype: int, shape: Sequence[int], strides: Sequence[int], device: int
) -> Array:
    """An array over memory of the library's: "numpy" or "torch"; on a GPU "torch" alone."""
    if device != HOST:
        return _over_device_memory(kind, pointer, dtype, shape, strides, device)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    memory = b"" if 0 in shape else ffi.buffer(ffi.cast("char *", pointer), count * BYTES[dtype])
    if kind == "torch":
        import torch

        torch_dtype = getattr(torch, NAMES[dtype])
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=torch_dtype)
        return torch.frombuffer(memory, dtype=torch_dtype).as_strided(tuple(shape), tuple(strides))
    if kind != "numpy":
        raise refuse(f"kind is {kind!r}; it must be 'numpy' or 'torch'", lib.NYB_ERROR_ENUM)
    import numpy

    numpy_dtype = numpy.dtype("uint16" if dtype == BF16 else NAMES[dtype])
    if 0 in shape:
        array = numpy.empty(tuple(shape), numpy_dtype)
    else:
        steps = [step * BYTES[dtype] for step in strides]
        array = numpy.ndarray(tuple(shape), numpy_dtype, memory, 0, steps)
    return BFloat16(array) if dtype == BF16 else array


def _over_device_memory(
    kind: str, pointer: Any, dtype: int, shape: Sequence[int], strides: Sequence[int], device: int
) -> Array:
    if kind != "torch":
        raise refuse(
            f"kind is {kind!r}; of a cache on cuda:{device} it must be 'torch'", lib.NYB_ERROR_ENUM
        )
    import torch

    torch_dtype = getattr(torch, NAMES[dtype])
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=torch_dtype, device=f"cuda:{device}")
    count = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    # As integers of the size: the interface has no bfloat16, and PyTorch takes no uint32 by it.
    memory = _DeviceMemory(int(ffi.cast("uintptr_t", pointer)), count, f"<i{BYTES[dtype]}")
    flat = torch.as_tensor(memory, device=f"cuda:{device}").view(torch_dtype)
    return flat.as_strided(tuple(shape), tuple(strides))
