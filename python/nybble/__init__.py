# SPDX-License-Identifier: Apache-2.0
"""nybble: attention straight over a quantized KV cache.

Arrays are NumPy arrays, PyTorch tensors in CPU memory or MLX arrays; anything else that speaks
DLPack from CPU memory is read too. They are read where they lie, with any strides whose last axis
is contiguous, and results are of the query's kind. Whatever the library refuses raises
`NybbleError` with its sentence.

    cache = nybble.Cache(1, 8, 128, key=nybble.affine(4))
    cache.append(key, value)                      # [1, 8, tokens, 128]
    out = nybble.attention(query, cache)          # query: [1, 32, query_len, 128]

docs/python.md has the rest; include/nybble.h is the reference of every field.
"""

from ._arrays import Array, BFloat16
from ._attention import AttentionCall, attention
from ._cache import Cache, Usage
from ._context import Context, Counters, default_context, version
from ._errors import NybbleError, Status
from ._formats import Format, Quantized, affine, plain
from ._geglu import geglu
from ._merge import merge
from ._quantize import dequantize, quantize

__version__ = version()

__all__ = [
    "Array",
    "AttentionCall",
    "BFloat16",
    "Cache",
    "Context",
    "Counters",
    "Format",
    "NybbleError",
    "Quantized",
    "Status",
    "Usage",
    "affine",
    "attention",
    "default_context",
    "dequantize",
    "geglu",
    "merge",
    "plain",
    "quantize",
    "version",
]
