# SPDX-License-Identifier: Apache-2.0
"""The library's statuses as exceptions."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from ._nybble import ffi, lib

if TYPE_CHECKING:
    # The members follow the header: Status.NULL is NYB_ERROR_NULL, and so on.
    class Status(IntEnum):
        OK = 0

        @classmethod
        def _missing_(cls, value: object) -> Status: ...

else:
    Status = IntEnum(
        "Status",
        {
            name.removeprefix("NYB_").removeprefix("ERROR_"): value
            for name, value in ffi.typeof("nyb_status").relements.items()
        },
    )
    Status.__doc__ = "nyb_status: NYB_ERROR_HEADS is Status.HEADS."


class NybbleError(RuntimeError):
    """A call that the library or this package refused.

    Attributes:
        status: why, as `Status`; code can branch on it.

    The text is a sentence that names the field, its value and what would be right.
    """

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = Status(status)


def check(status: int) -> None:
    """Raise where a call failed. To be called in the thread that made the call."""
    if status == lib.NYBPY_NO_MEMORY:
        raise MemoryError("no memory for a handle, or for the workspace of an attention call")
    if status != 0:
        raise NybbleError(ffi.string(lib.nyb_last_error()).decode(), status)


def refuse(sentence: str, status: int = lib.NYB_ERROR_VALUE) -> NybbleError:
    """An error that this package found before the library was asked."""
    return NybbleError(sentence, status)
