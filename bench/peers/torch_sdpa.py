# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention over a bf16 cache, and FlashInfer's where it is installed: what a GPU reaches
without quantization, measured as `nybble bench --backend cuda` measures: K and V in more memory than
the L2 holds, a CUDA graph of many calls, events around each replay, medians.

    torch_sdpa.py --shapes bench/shapes/attention-gpu.txt --json sdpa.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
COLD_BYTES = 512 << 20
LEAST_CALLS = 32

Shape = tuple[int, int, int, int, int]
Call = Callable[[int], Any]


def median_us(call: Call, calls: int, seconds: float) -> float:
    """The median over replays of a call's share of a graph of `calls` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples: list[float] = []
        spent_ms = 0.0
        while len(samples) < 8 or spent_ms < seconds * 1e3:
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            samples.append(start.elapsed_time(end))
            spent_ms += samples[-1]
            if spent_ms > 20 * seconds * 1e3 and len(samples) >= 4:
                break
    return statistics.median(samples[2:] or samples) * 1e3 / calls


def sets_of(bytes_of_one: int) -> int:
    return max(2, -(-COLD_BYTES // bytes_of_one))


def sdpa_calls(shape: Shape, query_len: int) -> tuple[Call, int, int]:
    batch, query_heads, kv_heads, dim, tokens = shape
    bytes_of_one = 2 * batch * kv_heads * tokens * dim * 2
    sets = sets_of(bytes_of_one)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(batch, query_heads, query_len, dim, **options)
    key = torch.randn(sets, batch, kv_heads, tokens, dim, **options)
    value = torch.randn(sets, batch, kv_heads, tokens, dim, **options)
    grouped = query_heads != kv_heads

    def call(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key[i % sets], value[i % sets], enable_gqa=grouped
        )

    return call, sets, bytes_of_one


def measure_sdpa(shape: Shape, query_len: int, names: list[str], seconds: float) -> list[Any]:
    results = []
    call, sets, bytes_of_one = sdpa_calls(shape, query_len)
    rounds = max(1, -(-LEAST_CALLS // sets))
    for name in names:
        # The math path writes scores and copies of K and V for each query head: a few calls do.
        calls = sets * rounds if name != "math" and query_len == 1 else 2
        result: dict[str, Any] = {
            "peer": name,
            "shape": shape,
            "query_len": query_len,
            "bytes": bytes_of_one,
        }
        try:
            with sdpa_kernel(BACKENDS[name]):
                result["median_us"] = median_us(call, calls, seconds)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            result["median_us"] = None
            result["reason"] = str(error).strip().splitlines()[0][:200]
        torch.cuda.empty_cache()
        results.append(result)
    return results


def measure_flashinfer(shape: Shape, seconds: float) -> list[Any]:
    """bf16, one sequence; nothing where FlashInfer is not installed."""
    batch, query_heads, kv_heads, dim, tokens = shape
    try:
        import flashinfer
    except ImportError:
        return []
    if batch != 1:
        return []
    sets = sets_of(2 * kv_heads * tokens * dim * 2)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(query_heads, dim, **options)
    key = torch.randn(sets, tokens, kv_heads, dim, **options)
    value = torch.randn(sets, tokens, kv_heads, dim, **options)
    result: dict[str, Any] = {"peer": "flashinfer", "shape": shape, "query_len": 1}

    def call(i: int) -> torch.Tensor:
        return flashinfer.single_decode_with_kv_cache(
            query, key[i % sets], value[i % sets], use_tensor_cores=True
        )

    try:
        result["median_us"] = median_us(call, max(LEAST_CALLS, sets), seconds)
    except Exception as error:  # whatever a peer raises is its result
        result["median_us"] = None
        result["reason"] = str(error).strip().splitlines()[0][:200]
    return [result]


def measure_geglu(elements: int, seconds: float, compiled: bool) -> list[Any]:
    gate, up, out = (
        torch.randn(2, elements, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )

    def eager(i: int) -> None:
        torch.mul(F.gelu(gate[i % 2], approximate="tanh"), up[i % 2], out=out[i % 2])

    calls: dict[str, Call] = {"geglu eager": eager}
    if compiled:
        fused = torch.compile(lambda a, b: F.gelu(a, approximate="tanh") * b)
        calls["geglu torch.compile"] = lambda i: fused(gate[i % 2], up[i % 2])
    return [
        {"peer": name, "elements": elements, "median_us": median_us(call, 4, seconds)}
        for name, call in calls.items()
    ]


def read_shapes(path: Path) -> list[Shape]:
    shapes = []
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            batch, query_heads, kv_heads, dim, tokens = (int(field) for field in text.split(","))
            shapes.append((batch, query_heads, kv_heads, dim, tokens))
    return shapes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Path, required=True, help="B,Hq,Hkv,D,N a line")
    parser.add_argument("--prefill", help="L:B,Hq,Hkv,D,N, measured without a mask")
    parser.add_argument("--geglu", type=int, default=0, help="elements")
    parser.add_argument("--compile", action="store_true", help="GeGLU by torch.compile, too")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each measurement")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    results = []
    for shape in read_shapes(given.shapes):
        # Where there is a fused kernel, the math path is only a matter of how long one waits.
        names = ["flash", "cudnn", "math"] if shape[0] == 1 else ["flash", "cudnn"]
        results += measure_sdpa(shape, 1, names, given.seconds)
        results += measure_flashinfer(shape, given.seconds)
        torch.cuda.empty_cache()
    if given.prefill:
        query_len, shape_text = given.prefill.split(":")
        shape = tuple(int(field) for field in shape_text.split(","))
        results += measure_sdpa(shape, int(query_len), ["flash", "cudnn"], given.seconds)
    if given.geglu:
        results += measure_geglu(given.geglu, given.seconds, given.compile)
    report = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "results": results,
    }
    given.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
