# SPDX-License-Identifier: Apache-2.0
"""How much resident memory a stretch of work takes at its peak, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


def _give_back() -> None:
    """Hand memory that was freed back to the system: what lies around would hide new memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PeakMemory:
    """The peak above what was resident when it was made: the caller's own peak, not the model's.

    `read()` gives bytes; None where the system does not count them (all but Linux) or does not
    let its count be set back.
    """

    def __init__(self) -> None:
        _give_back()
        self._before: int | None = None
        try:
            _RESET.write_text("5", encoding="ascii")  # the peak is what is resident now
            self._before = _status_bytes("VmRSS")
        except OSError:
            pass

    def read(self) -> int | None:
        if self._before is None:
            return None
        return max(_status_bytes("VmHWM") - self._before, 0)
