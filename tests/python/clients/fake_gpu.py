# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors without a GPU: the fake driver of tests/fake_cuda, and PyTorch tensors in CPU memory
that say they are on a CUDA device. Launches are noted, not run.

The library looks for a driver once in a process: scenarios run in one of their own (`scenario`).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
STREAM = 0x5EA  # what PyTorch says that its current stream is


def build(folder: Path) -> None:
    """The fake driver and compiler, as shared objects."""
    for name in ("fake_cuda", "fake_nvrtc"):
        command = [os.environ.get("CC", "cc"), "-std=c17", "-shared", "-fPIC", "-pthread", "-w"]
        command += ["-D_GNU_SOURCE", f"-I{ROOT / 'include'}"]
        command += [f"{ROOT}/tests/fake_cuda/{name}.c", "-o", f"{folder}/lib{name}.so"]
        subprocess.run(command, check=True)


def scenario(folder: Path, code: str) -> str:
    """Runs code in a process with the fakes; returns what it printed."""
    environment = {
        **os.environ,
        "NYBBLE_LIBCUDA": f"{folder}/libfake_cuda.so",
        "NYBBLE_NVRTC": f"{folder}/libfake_nvrtc.so",
        "NYBBLE_CACHE_DIR": "off",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-c", "from fake_gpu import *\ngpu = FakeGpu()\n" + code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Control(ctypes.Structure):
    """fake_cuda_control_struct."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("device_count", ctypes.c_int),
        ("compute_capability", ctypes.c_int * 4),
        ("reads_host_memory", ctypes.c_bool),
        ("reuses_contexts", ctypes.c_bool),
        ("memory_bytes", ctypes.c_size_t),
        ("blocks_per_multiprocessor", ctypes.c_int),
        ("fail_call", ctypes.c_char_p),
        ("fail_result", ctypes.c_int),
        ("fail_after", ctypes.c_int64),
        ("capturing", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
        ("launch_data", ctypes.c_void_p),
        ("graph_launch", ctypes.c_void_p),
        ("failed_call", ctypes.c_char_p),
        ("launches", ctypes.c_int64),
        ("modules_loaded", ctypes.c_int64),
        ("live_allocations", ctypes.c_int64),
        ("live_bytes", ctypes.c_int64),
    ]


class Launch(ctypes.Structure):
    """The beginning of nyb_cu_launch."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
    ]


CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Launch), ctypes.c_void_p
)


class OnGpu(torch.Tensor):
    """A tensor in CPU memory that says it is on a CUDA device."""

    number = 0
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", self.number))  # type: ignore[assignment]

    def get_device(self) -> int:
        return self.number


class OnSecondGpu(OnGpu):
    """What is made of it is there too: PyTorch keeps the type."""

    number = 1


class DlTensor(ctypes.Structure):
    """DLPack's tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class Exchange(ctypes.Structure):
    """DLPack's functions in C of an array type."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 5),
    ]


_alive: list[Any] = []  # what the tensors given out point to
DL_CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DlTensor))
def _exchange(array: Any, to: Any) -> int:
    sizes = [(ctypes.c_int64 * array.dim())(*x) for x in (array.shape, array.stride())]
    _alive.extend(sizes)
    code, bits = DL_CODES.get(array.dtype, (0, 8))
    shape, strides = (ctypes.addressof(x) for x in sizes)
    to[0] = DlTensor(
        array.data_ptr(), 2, array.number, array.dim(), code, bits, 1, shape, strides, 0
    )
    return 0


_table = Exchange((1, 3), None, (None, None, None, ctypes.cast(_exchange, ctypes.c_void_p), None))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_NAME = b"dlpack_exchange_api"  # the capsule does not copy it
_made: Any = _new_capsule(ctypes.addressof(_table), _NAME, None)
OnGpu.__dlpack_c_exchange_api__ = _made  # type: ignore[attr-defined]


def on_gpu(tensor: torch.Tensor, number: int = 0) -> Any:
    return tensor.as_subclass((OnGpu, OnSecondGpu)[number])


class _Guard:
    """torch.cuda.device: which devices calls were made on."""

    entered: list[int] = []

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self.entered.append(self.number)

    def __exit__(self, *error: object) -> None:
        pass


class FakeGpu:
    """The fakes' controls, and PyTorch's CUDA functions replaced."""

    def __init__(self) -> None:
        import nybble._arrays
        import nybble._attention
        import nybble._context

        library = ctypes.CDLL(os.environ["NYBBLE_LIBCUDA"])
        library.fake_cuda_control.restype = ctypes.POINTER(Control)
        self.control = library.fake_cuda_control().contents
        self.control.device_count = 2
        self.control.reads_host_memory = True
        self.launches: list[tuple[str, int]] = []
        self._callback = CALLBACK(self._launched)
        self.control.launch = ctypes.cast(self._callback, ctypes.c_void_p)
        cuda: Any = torch.cuda
        # What was allocated, and -1 where PyTorch's stream was waited for.
        self.allocated: list[int] = []
        stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: self.allocated.append(-1))
        cuda.current_stream = lambda device=None: stream
        cuda.is_current_stream_capturing = lambda: False
        cuda.current_device = lambda: 0
        cuda.device = _Guard
        self.entered = _Guard.entered
        empty = torch.empty

        def make(shape: Any, dtype: Any = None, device: Any = "cpu", **options: Any) -> Any:
            device = torch.device(device)
            if device.type == "cpu":
                return empty(shape, dtype=dtype, **options)
            made = empty(shape, dtype=dtype, **options)
            self.allocated.append(made.nbytes)
            if isinstance(shape, int):  # memory of the library's: aligned as a GPU's
                whole = empty(shape + 512, dtype=dtype, **options)
                made = whole[-whole.data_ptr() % 512 :][:shape]
            return on_gpu(made, device.index or 0)

        torch.empty = make  # type: ignore[assignment]
        OnGpu.record_stream = lambda self, stream: None  # type: ignore[assignment]
        OnGpu.to = _to  # type: ignore[assignment, method-assign]
        nybble._attention._on_device = lambda values, dtype, number: on_gpu(
            torch.tensor(values, dtype=getattr(torch, dtype)), number
        )

    def _launched(self, data: Any, kernel: bytes, launch: Any, argument: int) -> None:
        self.launches.append((kernel.decode(), launch.contents.stream))

    def taken(self) -> list[str]:
        """The kernels launched since, all of them on PyTorch's stream."""
        names = [name for name, stream in self.launches]
        assert all(stream == STREAM for _, stream in self.launches), self.launches
        self.launches.clear()
        return names


def _to(self: Any, *arguments: Any, **options: Any) -> Any:
    return on_gpu(torch.Tensor.to(self.as_subclass(torch.Tensor), *arguments, **options))
