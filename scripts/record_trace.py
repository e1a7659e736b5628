#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record the queries, keys and values of a Hugging Face causal language model as a trace.

The model runs once over the first tokens of a text, in one pass with a causal mask; what its
attention layers are handed (after the rotary embedding, before grouped heads are repeated) is
written to a safetensors file that `nybble replay` reads. docs/trace-format.md describes the file.

    python scripts/record_trace.py MODEL --text FILE --output FILE

needs torch and transformers. MODEL is a local folder or a name that transformers resolves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both are imported where they are used: writing a trace needs neither
    import torch

FORMAT = "nybble-trace"
VERSION = "1"
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
PARTS = ("query", "key", "value")


class TraceError(Exception):
    """Something that keeps a trace from being recorded, told in a sentence for the user."""


@dataclass
class Layer:
    """One layer's tensors as little-endian bytes: [heads, tokens, dim], rows contiguous."""

    shapes: dict[str, tuple[int, int, int]]
    data: dict[str, bytes]
    extra: dict[str, str] = field(default_factory=dict)  # optional metadata: window, softcap


def write_trace(path: Path, layers: dict[int, Layer], dtype: str, metadata: dict[str, str]) -> None:
    """Write a trace of version 1. The same input gives the same bytes; a failure leaves no file."""
    info = {"format": FORMAT, "version": VERSION, **metadata}
    header: dict[str, Any] = {"__metadata__": info}
    chunks: list[bytes] = []
    offset = 0
    for index in sorted(layers):
        layer = layers[index]
        info.update({f"layers.{index}.{key}": text for key, text in sorted(layer.extra.items())})
        for part in PARTS:
            name, shape, data = f"layers.{index}.{part}", layer.shapes[part], layer.data[part]
            expected = math.prod(shape) * DTYPE_BYTES[dtype]
            if len(data) != expected:
                raise TraceError(f"{name} has {len(data)} bytes, but {shape} takes {expected}.")
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [offset, offset + len(data)],
            }
            chunks.append(data)
            offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors then begin on a multiple of 64 bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.writelines(chunks)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def progress(message: str) -> None:
    """Say what is going on, but only to a person."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


def layer_list(text: str) -> list[int]:
    """Parse --layers: decimal layer numbers with commas between."""
    try:
        layers = [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of layer numbers such as 0,15,29"
        ) from None
    if min(layers) < 0 or len(set(layers)) != len(layers):
        raise argparse.ArgumentTypeError(
            f"{text!r} must name each layer once, by a number of 0 or more"
        )
    return sorted(layers)


def positive(text: str) -> int:
    """Parse a count of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
