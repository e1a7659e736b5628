# SPDX-License-Identifier: Apache-2.0
"""The context: instruction set, threads, counters, and each thread's memory for calls."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from ._errors import check, refuse
from ._nybble import ffi, lib

_ISAS = ("auto", "scalar", "avx2", "avx512", "neon")


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
        self.workspace = ffi.gc(ffi.new("struct nybpy_workspace *"), lib.nybpy_free)
        self.lengths = None  # the last int32 array of lengths that was made, and its values
        self.lengths_key: tuple[int, int] | None = None


class Context:
    """Where calls compute. Most programs need none: calls take `default_context()`.

    Args:
        isa: "auto", "scalar", "avx2", "avx512" or "neon". "auto" follows NYBBLE_ISA, else takes
            the best that runs here.
        threads: how many tasks run at once; 0 follows NYBBLE_THREADS, else takes all processors.
            No bit of a result depends on it.

    Raises:
        NybbleError: UNSUPPORTED where the instruction set does not run here, ENVIRONMENT where a
            NYBBLE_* variable holds an unknown word, ENUM for an unknown `isa`.
    """

    def __init__(self, isa: str = "auto", threads: int = 0) -> None:
        if isa not in _ISAS:
            raise refuse(f"isa is {isa!r}; it must be one of {_ISAS}", lib.NYB_ERROR_ENUM)
        options = ffi.new("nyb_context_options *")
        options.struct_size = ffi.sizeof("nyb_context_options")
        options.isa = _ISAS.index(isa)
        options.threads = threads
        made = ffi.new("struct nybpy_context **")
        check(lib.nybpy_context_create(options, made))
        self._owner: Any = ffi.gc(made[0], lib.nybpy_context_release)
        self._c: Any = self._owner.context
        self._scratch = _Scratch()

    @property
    def isa(self) -> str:
        """The instruction set that runs: "avx512", say."""
        return str(ffi.string(lib.nyb_isa_name(lib.nyb_context_isa(self._c))).decode())

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
        return f"nybble.Context(isa={self.isa!r}, threads={self.threads})"


_default: Context | None = None
_default_lock = threading.Lock()


def default_context() -> Context:
    """The context of calls that name none, made at the first one."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Context()
    return _default
