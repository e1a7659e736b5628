# SPDX-License-Identifier: Apache-2.0
"""The shared library as the tests call it: where it is, contexts, and structs that have its sizes.

NYBBLE_LIBRARY names it, build/libnybble.so where that is not set.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("NYBBLE_LIBRARY", ROOT / "build" / "libnybble.so"))

DTYPE_ID = {"f32": 1, "f16": 2, "bf16": 3}
ISAS = {"scalar": 1, "avx2": 2, "avx512": 3, "neon": 4}
ERROR_STRUCT_SIZE = 2
ERROR_UNSUPPORTED = 16


class ContextOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("isa", ctypes.c_int), ("threads", ctypes.c_int64),
                ("parallel_for", ctypes.c_void_p), ("parallel_for_data", ctypes.c_void_p),
                ("allocator", ctypes.c_void_p * 3), ("backend", ctypes.c_int),
                ("device", ctypes.c_int32), ("device_allocator", ctypes.c_void_p * 3)]  # fmt: skip


class Library:
    """libnybble with a context on one ISA; the test is skipped only where that does not run here."""

    def __init__(self, isa: str) -> None:
        if not LIBRARY.exists():
            pytest.fail(f"{LIBRARY} does not exist; build it or set NYBBLE_LIBRARY")
        self.c = ctypes.CDLL(str(LIBRARY))
        self.c.nyb_last_error.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        self.expect_size(
            ContextOptions,
            lambda options: self.c.nyb_context_create(options, ctypes.byref(self.context)),
        )
        options = ContextOptions(struct_size=ctypes.sizeof(ContextOptions), isa=ISAS[isa])
        status = self.c.nyb_context_create(ctypes.byref(options), ctypes.byref(self.context))
        if status == ERROR_UNSUPPORTED:
            pytest.skip(f"{isa}: {self.sentence()}")
        assert status == 0, self.sentence()

    def close(self) -> None:
        if self.context:
            self.c.nyb_context_destroy(self.context)

    def sentence(self) -> str:
        return self.c.nyb_last_error().decode()

    def expect_size(self, struct: type[ctypes.Structure], call: Any) -> None:
        """The struct is as large as the library's own: it says so of one that is too small."""
        status = call(ctypes.byref(struct(struct_size=1)))
        assert status == ERROR_STRUCT_SIZE, self.sentence()
        known = re.search(r"must be at least (\d+)", self.sentence())
        assert known is not None, self.sentence()
        assert int(known[1]) == ctypes.sizeof(struct), f"{struct.__name__}: {self.sentence()}"

    def expect_run_size(self, name: str, struct: type[ctypes.Structure]) -> None:
        self.expect_size(struct, lambda call: getattr(self.c, name)(self.context, call, None))

    def run(self, name: str, call: Any) -> None:
        status = getattr(self.c, name)(self.context, ctypes.byref(call), None)
        assert status == 0, self.sentence()
