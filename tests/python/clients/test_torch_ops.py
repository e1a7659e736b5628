# SPDX-License-Identifier: Apache-2.0
"""torch.ops.nybble: opcheck, and compiled functions without graph breaks, with eager's bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nybble
import nybble.torch
from nybble import NybbleError

OPS = torch.ops.nybble
# The code generator needs a C++ compiler, which nothing else here does; tracing does not.
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
CODE_GENERATOR = "inductor" if CXX else "aot_eager"
if CXX:
    os.environ["CXX"] = CXX


def randoms(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed)).to(dtype)


def rows(bits: int = 4, group_size: int = 64, tokens: int = 24, seed: int = 1) -> list[Any]:
    made = nybble.quantize(randoms(2, 2, tokens, 64, seed=seed), bits, group_size)
    return [made.codes, made.scales, made.biases]


def filled_cache(bits: int = 4, tokens: int = 9) -> nybble.Cache:
    cache = nybble.Cache(2, 2, 64, key=nybble.affine(bits), value=nybble.affine(bits))
    cache.append(randoms(2, 2, tokens, 64, seed=5), randoms(2, 2, tokens, 64, seed=6))
    return cache


QUERY = randoms(2, 4, 3, 64, seed=9)
LENGTHS = torch.tensor([24, 17], dtype=torch.int32)
HIDDEN = torch.zeros(1, 1, 3, 24).masked_fill_(torch.arange(24) > 20, -torch.inf)
CACHES = [filled_cache() for _ in range(2)]  # a state lives as long as its cache
# Of each operator: some calls as opcheck takes them.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("geglu", (randoms(3, 5, 64), randoms(3, 5, 64, seed=1)), {}),
    ("geglu", (randoms(4, 64).bfloat16(), randoms(4, 64).bfloat16(), "compat"), {}),
    ("quantize", (randoms(2, 3, 5, 128), 5, 32), {}),
    ("quantize", (randoms(4, 64).half(),), {"dtype": torch.bfloat16, "rule": "mlx_gpu"}),
    ("quantize_into", (randoms(2, 2, 3, 64), *rows(), 4, 64), {"position": 7}),
    ("dequantize", (*rows(6, 32), 6, 32), {}),
    ("dequantize", tuple(rows()), {"dtype": torch.float16}),
    ("attention", (QUERY, randoms(2, 2, 24, 64), randoms(2, 2, 24, 32, seed=2)), {}),
    (
        "attention",
        (QUERY.half(), randoms(2, 2, 24, 64).half(), randoms(2, 2, 24, 64).half()),
        {"mask_array": HIDDEN, "mask": "none", "lengths": LENGTHS, "softcap": 3.0},
    ),
    (
        "attention_quantized",
        (QUERY, rows(8), rows(4, 32), 8, 64, 4, 32),
        {"lengths": LENGTHS, "window_tokens": 6, "sinks": torch.tensor([0.5, 0.0, -1.0, 2.0])},
    ),
    (
        "cache_append",
        (nybble.torch.state(CACHES[0]), randoms(2, 2, 3, 64), randoms(2, 2, 3, 64, seed=1)),
        {},
    ),
    ("cache_attention", (QUERY, nybble.torch.state(CACHES[1]), 64), {"path": "fused"}),
]


@pytest.mark.parametrize("name,arguments,options", CALLS, ids=[name for name, _, _ in CALLS])
def test_opcheck(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.library.opcheck(getattr(OPS, name).default, arguments, options)


def compiled(function: Callable[..., Any], backend: str = CODE_GENERATOR) -> Callable[..., Any]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend)
    return made


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def same(found: Any, expected: Any) -> bool:
    """Bit by bit; torch.equal has no uint32."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    return len(found) == len(expected) and all(map(same, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiled_functions_have_eagers_bits(dtype: torch.dtype) -> None:
    """nybble's own functions, with operations of PyTorch before and after."""

    def step(x: torch.Tensor, up: torch.Tensor, key: torch.Tensor) -> Any:
        gated = nybble.geglu(2 * x, up + 1)
        codes, scales, biases = OPS.quantize(key, 4, 32)
        back = OPS.dequantize(codes, scales, biases, 4, 32)
        stored = [codes, scales, biases]
        return (
            gated * 2,
            codes,
            nybble.attention(x, key, back, window_tokens=5),
            OPS.attention_quantized(x, stored, stored, 4, 32, 4, 32, scale=0.3) + 1,
        )

    # One data type is enough for the code generator, which is slow.
    fast = compiled(step, CODE_GENERATOR if dtype == torch.bfloat16 else "aot_eager")
    arguments = [randoms(2, 4, 3, 64, dtype=dtype, seed=seed) for seed in range(2)]
    for tokens in (24, 31, 40):  # from the second length on, lengths are symbols
        key = randoms(2, 2, tokens, 64, dtype=dtype, seed=tokens)
        assert same(fast(*arguments, key), step(*arguments, key))
    assert graphs() == 2


def test_compiled_decode_loop() -> None:
    """A cache of ours in a compiled step: in order, without a graph break, compiled once."""

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Any) -> Any:
        cache.append(2 * key, value)
        first = nybble.attention(query, cache)
        cache.append(key, value - 1)
        return first, nybble.attention(query + 1, cache, softcap=5.0)

    caches = filled_cache(), filled_cache()
    fast = compiled(step)
    for turn in range(12):  # over growths of the cache
        q, k, v = (randoms(2, h, 1, 64, seed=10 * turn + h) for h in (4, 2, 2))
        assert same(fast(q, k, v, caches[0]), step(q, k, v, caches[1]))
    assert caches[0].lengths == caches[1].lengths == [33, 33]
    assert graphs() == 1
    assert same(caches[0].keys("torch").codes, caches[1].keys("torch").codes)


def test_state_of_a_cache_that_is_gone() -> None:
    state = nybble.torch.state(filled_cache())
    with pytest.raises(NybbleError, match="which does not exist, or no longer"):
        OPS.cache_attention(QUERY, state, 64)


def test_what_operators_refuse() -> None:
    """The library's sentence, eager and compiled."""
    with pytest.raises(NybbleError, match="position is 22 for 3 tokens; codes have room for 24"):
        OPS.quantize_into(randoms(2, 2, 3, 64), *rows(), 4, 64, 22)
    wrong = torch.zeros(2, 3, 1, 64), *torch.zeros(2, 2, 2, 4, 64)
    traced = compiled(lambda *arrays: nybble.attention(*arrays), "aot_eager")
    for function in (OPS.attention, traced):
        with pytest.raises(NybbleError, match="query_heads is 3"):
            function(*wrong)
