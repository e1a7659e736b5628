# SPDX-License-Identifier: Apache-2.0
"""The context: instruction set, threads, counters, and each thread's memory for calls."""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple

from ._arrays import HOST
from ._errors import check, refuse
from ._nybble import ffi, lib

_ISAS = ("auto", "scalar", "avx2", "avx512", "neon")
_BACKENDS = {"cpu": lib.NYB_BACKEND_CPU, "cuda": lib.NYB_BACKEND_CUDA}


def version() -> str:
    """The version of the library inside, "major.minor.patch"."""
    return str(ffi.string(lib.nyb_version()).decode())


class Counters(NamedTuple):
    """Calls that succeeded since the context was made or its counters were cleared."""

    attention_fused: int
    attention_compat: int
    geglu_fused: int
    geglu_compat: int
    quantize: int
    dequantize: int
    cache_append: int


class _Scratch(threading.local):
    """Of one thread: a descriptor to fill, and the workspace of its run calls."""

    def __init__(self) -> None:
        self.attention = ffi.new("nyb_attention *")
        self.plan = ffi.new("nyb_plan *", {"struct_size": ffi.sizeof("nyb_plan")})
        self.workspace = ffi.gc(ffi.new("struct nybpy_workspace *"), lib.nybpy_free)
        self.address = int(ffi.cast("uintptr_t", self.workspace))


# ---- Memory of caches on a GPU --------------------------------------------------------------------

# By address: PyTorch's allocator gives it, so that its peaks and its limits count it.
_held: dict[int, Any] = {}


def _nothing(*error: object) -> None:
    """The library says what it lacked."""


def _allocate(device: int, size: int) -> Any:
    """Memory for every stream. PyTorch gives out what work queued on the current one may still be
    writing to, since it means to use it there, behind that; the library zeroes a cache's lengths on
    a stream of its own."""
    torch = sys.modules["torch"]
    memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    if not torch.cuda.is_current_stream_capturing():  # a capture's memory is its own
        torch.cuda.current_stream(device).synchronize()
    return memory


@ffi.def_extern(error=ffi.NULL, onerror=_nothing)  # type: ignore[untyped-decorator]
def nybpy_device_allocate(user_data: Any, size: int, alignment: int) -> Any:
    memory = _allocate(int(ffi.cast("intptr_t", user_data)), size)
    address = memory.data_ptr()
    if address % alignment:
        return ffi.NULL
    _held[address] = memory
    return ffi.cast("void *", address)


@ffi.def_extern(onerror=_nothing)  # type: ignore[untyped-decorator]
def nybpy_device_release(user_data: Any, memory: Any) -> None:
    held = _held.pop(int(ffi.cast("uintptr_t", memory)))
    # Work that is queued on the current stream may still read it.
    held.record_stream(sys.modules["torch"].cuda.current_stream(held.device))


# ---- Contexts -------------------------------------------------------------------------------------


class Context:
    """Where calls compute. Most programs need none: calls take `default_context()`.

    Args:
        isa: "auto", "scalar", "avx2", "avx512" or "neon". "auto" follows NYBBLE_ISA, else takes
            the best that runs here.
        threads: how many tasks run at once; 0 follows NYBBLE_THREADS, else takes all processors.
            No bit of a result depends on it.
        backend: "cpu", or "cuda" for PyTorch tensors on a GPU (docs/cuda.md).
        device: with "cuda", the number of the device.

    Raises:
        NybbleError: UNSUPPORTED where the instruction set or the backend does not run here,
            ENVIRONMENT where a NYBBLE_* variable holds an unknown word, ENUM for an unknown `isa`
            or `backend`.
    """

    def __init__(
        self, isa: str = "auto", threads: int = 0, *, backend: str = "cpu", device: int = 0
    ) -> None:
        if isa not in _ISAS:
            raise refuse(f"isa is {isa!r}; it must be one of {_ISAS}", lib.NYB_ERROR_ENUM)
        if backend not in _BACKENDS:
            raise refuse(
                f"backend is {backend!r}; it must be one of {list(_BACKENDS)}", lib.NYB_ERROR_ENUM
            )
        options = ffi.new("nyb_context_options *")
        options.struct_size = ffi.sizeof("nyb_context_options")
        options.isa = _ISAS.index(isa)
        options.threads = threads
        options.backend = _BACKENDS[backend]
        #: The number of the CUDA device; -1 on the CPU.
        self.device = HOST
        if backend == "cuda":
            options.device = self.device = device
            allocator = options.device_allocator
            allocator.allocate = lib.nybpy_device_allocate
            allocator.release = lib.nybpy_device_release
            allocator.user_data = ffi.cast("void *", device)
        made = ffi.new("struct nybpy_context **")
        check(lib.nybpy_context_create(options, made))
        self._owner: Any = ffi.gc(made[0], lib.nybpy_context_release)
        self._c: Any = self._owner.context
        self._scratch = _Scratch()

    def __copy__(self) -> Context:
        return self  # it has no state of its own that a copy could part from

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self

    @property
    def isa(self) -> str:
        """The instruction set that runs: "avx512", say."""
        return str(ffi.string(lib.nyb_isa_name(lib.nyb_context_isa(self._c))).decode())

    @property
    def backend(self) -> str:
        """ "cpu" or "cuda"."""
        return str(ffi.string(lib.nyb_backend_name(lib.nyb_context_backend(self._c))).decode())

    @property
    def threads(self) -> int:
        """How many threads it does use."""
        return int(lib.nyb_context_threads(self._c))

    def counters(self) -> Counters:
        """How often each path ran: proof that it did."""
        counters = ffi.new("nyb_counters *")
        counters.struct_size = ffi.sizeof("nyb_counters")
        check(lib.nyb_counters_get(self._c, counters))
        return Counters(*(getattr(counters, name) for name in Counters._fields))

    def clear_counters(self) -> None:
        lib.nyb_counters_clear(self._c)

    def __repr__(self) -> str:
        if self.device != HOST:
            return f"nybble.Context(backend='cuda', device={self.device})"
        return f"nybble.Context(isa={self.isa!r}, threads={self.threads})"


_defaults: dict[int, Context] = {}
_default_lock = threading.Lock()


def default_context(device: int = HOST) -> Context:
    """The context of calls that name none, made at the first one: of the CPU, or a CUDA device."""
    found = _defaults.get(device)
    if found is None:
        with _default_lock:
            found = _defaults.get(device)
            if found is None:
                made = Context() if device == HOST else Context(backend="cuda", device=device)
                found = _defaults[device] = made
    return found
