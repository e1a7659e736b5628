# SPDX-License-Identifier: Apache-2.0
"""The Python package on a GPU: what the fake driver of the other tests cannot show."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_transformers import CONFIGS, WAYS, left_padded, prompt, tiny

import nybble
import nybble.transformers as ours
from nybble import _context
from nybble.transformers import NybbleCache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU here")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---- Memory of caches -----------------------------------------------------------------------------

# What is queued before these bytes are written: a tenth of a second on a GPU of 2 GHz.
BUSY_CYCLES = 200_000_000
SIZES = (512, 2048, 1 << 16, 1 << 20, 1 << 23)


def leave_bytes_that_are_written_later() -> None:
    """Memory that PyTorch gives out again at once, since what is queued writes to it before."""
    torch.cuda._sleep(BUSY_CYCLES)
    for size in SIZES:
        kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(8)]
        for memory in kept:
            memory.fill_(0x5A)


def attended(rows: list[torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    cache = nybble.Cache(3, 2, 64, key=nybble.affine(8), device="cuda")
    cache.append(*rows[1:])
    cache.append(*(x[:, :, :1] for x in rows[1:]))
    out = nybble.attention(rows[0], cache).clone()
    cache.refresh()
    return cache.lengths, out


def rows_on_the_gpu() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(3, heads, 40, 64, device="cuda").bfloat16() for heads in (4, 2, 2)]


def wrong_of(caches: int) -> int:
    """How many of so many fresh caches are wrong, in memory that is still being written."""
    rows = rows_on_the_gpu()
    torch.cuda.synchronize()
    lengths, expected = attended(rows)
    assert lengths == [41] * 3
    wrong = 0
    for _ in range(caches):
        leave_bytes_that_are_written_later()
        lengths, found = attended(rows)
        wrong += lengths != [41] * 3 or not torch.equal(found, expected)
    return wrong


def test_fresh_caches_in_memory_that_is_still_written() -> None:
    """Their lengths begin at 0, whatever was queued before."""
    assert wrong_of(20) == 0


def test_fresh_caches_would_be_wrong_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before can see."""

    def at_once(device: int, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")

    monkeypatch.setattr(_context, "_allocate", at_once)
    try:
        assert wrong_of(5) > 0
    except nybble.NybbleError:
        pass  # a length that no cache has


def test_deep_copy() -> None:
    """The tokens that the device has counted, with their bytes."""
    rows = torch.randn(2, 2, 3, 40, 64, device="cuda")
    query = torch.randn(2, 6, 1, 64, device="cuda")
    for stored in (nybble.affine(4), nybble.affine(3, 32), nybble.plain("bf16")):
        cache = nybble.Cache(2, 3, 64, key=stored, device="cuda")
        cache.append(*rows)
        cache.trim(7, sequence=1)
        copied = copy.deepcopy(cache)
        assert copied.lengths == [40, 33]
        expected = nybble.attention(query, cache)
        assert torch.equal(nybble.attention(query, copied), expected)
        copied.append(*rows[:, :, :, :1])
        assert cache.lengths == [40, 33] and torch.equal(nybble.attention(query, cache), expected)


def test_fresh_caches_beside_another_stream() -> None:
    """Caches come and go while another stream works in memory of the same pool."""
    rows = rows_on_the_gpu()
    _, expected = attended(rows)
    other = torch.cuda.Stream()
    for i in range(20):
        with torch.cuda.stream(other):
            torch.cuda._sleep(BUSY_CYCLES // 20)
            given = torch.full((1 << (9 + i % 12),), 7, dtype=torch.uint8, device="cuda")
        given.record_stream(torch.cuda.current_stream())
        del given
        lengths, found = attended(rows)
        assert lengths == [41] * 3 and torch.equal(found, expected), i


# ---- Decode steps ---------------------------------------------------------------------------------


def generated(model: Any, ids: torch.Tensor, **options: Any) -> SimpleNamespace:
    cache = NybbleCache(model.config, 8)
    cache.reserve(64)
    torch.manual_seed(1)
    made = model.generate(
        ids,
        cache=cache,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return SimpleNamespace(cache=cache, tokens=made.sequences, logits=torch.stack(made.logits))


def asked(padded: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    ids, mask = left_padded() if padded else (prompt(3, 20), None)
    return ids.cuda(), {} if mask is None else {"attention_mask": mask.cuda()}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize(
    ("kind", "way"), [("llama", "greedy"), ("llama", "sampling"), ("gemma3", "greedy")]
)
def test_captured_steps(kind: str, way: str, padded: bool) -> None:
    """The bits that the model has without."""
    ids, options = asked(padded)
    model = tiny(kind, "nybble").cuda().bfloat16()
    expected = generated(model, ids, **options, **WAYS[way])
    graphs = ours.patch_decode(model)
    found = generated(model, ids, **options, **WAYS[way])
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logits, expected.logits)
    assert (graphs.captured, graphs.replayed, graphs.eager) == (1, 10, 1) and graphs.reason is None
    assert found.cache.layers[1].stored.lengths == expected.cache.layers[1].stored.lengths


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_compiled_steps(kind: str, padded: bool) -> None:
    """Tokens that are forced have the logits that they had, but for sums in another order: where one
    moves a code, as here and there it does, that is a 255th of a group's range in a few rows."""
    ids, options = asked(padded)
    model = tiny(kind, "nybble").cuda()
    if kind == "gpt-oss":  # its own loop over experts waits for the GPU
        model.set_experts_implementation("batched_mm")
    forced = prompt(3, 8).cuda()
    logits = []
    for compile in (None, True):
        graphs = None if compile is None else ours.patch_decode(model, compile)
        cache = NybbleCache(model.config, 8)
        cache.reserve(64)
        length, steps = ids.shape[1], []
        model(ids, cache=cache, **options)
        for token in forced.split(1, 1):
            length += 1
            if padded:
                new = torch.ones(3, length - ids.shape[1], dtype=torch.long, device="cuda")
                options = {"attention_mask": torch.cat([left_padded()[1].cuda(), new], 1)}
            steps.append(model(token, cache=cache, **options).logits)
        logits.append(torch.cat(steps, 1))
        if padded:
            options = {"attention_mask": left_padded()[1].cuda()}
    assert graphs is not None and graphs.reason is None and graphs.compile
    assert (graphs.captured, graphs.replayed, graphs.eager) == (1, 7, 1)
    error = (logits[0] - logits[1]).abs()
    assert error.max() < 0.02 and error.mean() < 1e-3, (error.max(), error.mean())
