#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs beyond the C call: microseconds of CPU time, the least of many.

The problem is as small as can be (one token, one head of 32), so that the C call is short.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import numpy as np

import nybble
from nybble._nybble import ffi, lib


def least(call: Callable[[], object], number: int = 4000) -> float:
    return min(timeit.repeat(call, number=number, repeat=15, timer=time.thread_time)) / number * 1e6


def main() -> None:
    context = nybble.Context(threads=1)
    cache = nybble.Cache(1, 1, 32, key=nybble.affine(4, 32), context=context)
    query, out = np.zeros((2, 1, 1, 1, 32), np.float32)
    cache.append(query, query)
    prepared = nybble.AttentionCall(query, cache, out=out)
    c_arguments = (context._c, ffi.NULL, prepared._call, prepared._workspace)
    run = lib.nybpy_run
    in_c = least(lambda: run(*c_arguments)) - least(lambda: lib.nyb_dtype_bytes(0))
    print(f"the C call                        {in_c:6.2f} us")
    calls: dict[str, Callable[[], object]] = {
        "AttentionCall.run()": prepared.run,
        "attention(numpy, cache, out=)": lambda: nybble.attention(query, cache, out=out),
    }
    try:
        import torch

        tensor, tensor_out = torch.from_numpy(query), torch.from_numpy(out)
        calls["attention(torch, cache, out=)"] = lambda: nybble.attention(
            tensor, cache, out=tensor_out
        )
    except ImportError:
        pass
    for name, call in calls.items():
        print(f"{name:<32}{least(call) - in_c:6.2f} us more")


if __name__ == "__main__":
    main()
