# SPDX-License-Identifier: Apache-2.0
"""Where a call computes: in the CPU's memory, or on a CUDA device that has PyTorch tensors.

Every call takes its arrays' device, all of one, a context of that device, and PyTorch's current
stream there. On the CPU there is nothing to that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ._arrays import HOST, Array, device_of
from ._context import Context, default_context
from ._errors import refuse
from ._nybble import ffi, lib


def device_name(device: int) -> str:
    return "the CPU" if device == HOST else f"cuda:{device}"


def device_number(device: Any) -> int:
    """ "cuda:1", 1, torch.device("cuda", 1) as 1; "cuda" as PyTorch's current one; "cpu" as HOST."""
    if isinstance(device, int):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return HOST
    if kind != "cuda" or not (number.isdigit() or number == ""):
        raise refuse(
            f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:NUMBER'", lib.NYB_ERROR_VALUE
        )
    if number:
        return int(number)
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None else 0


class _Host:
    """Calls on the CPU."""

    stream = ffi.NULL

    def __enter__(self) -> _Host:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Device:
    """Calls on a CUDA device: it is the thread's current one meanwhile."""

    __slots__ = ("_guard", "stream")

    def __init__(self, device: int) -> None:
        self._guard = sys.modules["torch"].cuda.device(device)
        self.stream = ffi.cast("void *", stream_on(device))

    def __enter__(self) -> _Device:
        self._guard.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)


_HOST = _Host()


def on(device: int) -> Any:
    """A context manager with a `stream`, for calls of the library on that device."""
    return _HOST if device == HOST else _Device(device)


def stream_on(device: int) -> int:
    """PyTorch's current stream there, as a number; 0 on the CPU."""
    if device == HOST:
        return 0
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)


def is_current(device: int) -> bool:
    """Whether calls go to that device without further ado."""
    return device == HOST or sys.modules["torch"].cuda.current_device() == device


def common_device(arrays: Iterable[tuple[str, Array]]) -> int:
    """The device of all these arrays.

    Raises:
        NybbleError: POINTER where two are on different ones.
    """
    first = None
    for name, array in arrays:
        device = device_of(array)
        if first is None:
            first = name, device
        elif device != first[1]:
            raise refuse(
                f"{first[0]} is on {device_name(first[1])} and {name} on {device_name(device)}; "
                "all arrays of a call must be on one device",
                lib.NYB_ERROR_POINTER,
            )
    return HOST if first is None else first[1]


def context_on(device: int, context: Context | None, name: str) -> Context:
    """The context for arrays on a device: the given one, if it is of that device.

    Raises:
        NybbleError: POINTER where it is of another; UNSUPPORTED where there is no CUDA.
    """
    if context is None:
        return default_context(device)
    if context.device != device:
        raise refuse(
            f"{name} is on {device_name(device)} and the context computes on "
            f"{device_name(context.device)}; both must be the same",
            lib.NYB_ERROR_POINTER,
        )
    return context


class DeviceMemory:
    """Workspaces on a CUDA device, of PyTorch's allocator and for its current stream."""

    def __init__(self, device: int) -> None:
        self._device = f"cuda:{device}"

    def __call__(self, size: int) -> tuple[Any, int]:
        """What must live until the call is queued, and its address."""
        torch = sys.modules["torch"]
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return memory, memory.data_ptr()
