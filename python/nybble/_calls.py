# SPDX-License-Identifier: Apache-2.0
"""The module in python/calls.c, which stands in the shared object of `_nybble`."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ExtensionFileLoader
from typing import Any

from . import _nybble

_NAME = "nybble._calls"


def _load() -> Any:
    file: str = _nybble.__file__
    loader = ExtensionFileLoader(_NAME, file)
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_module = _load()
attend = _module.attend
append = _module.append
