# SPDX-License-Identifier: Apache-2.0
"""GeGLU fused against the steps spelled out, on a model of Gemma's architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

import nybble.transformers
from nybble import default_context

from .compare import Array, Comparison

PROMPT_TOKENS, FORCED_TOKENS = 64, 64
VOCABULARY = 1000


def tiny_gemma(dtype: torch.dtype) -> Any:
    """Gemma 3 with random weights, large enough ones that both tails of GELU are met."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
        dtype=dtype,
    )
    return Gemma3ForCausalLM(config).to(dtype).eval()


@dataclass
class GegluRuns:
    """The fused path against the compat path, and against the model's own activation."""

    layers: int
    forwards: int
    fused_against_compat: Comparison
    fused_against_own: Comparison
    fused_counters: dict[str, int]
    compat_counters: dict[str, int]


def _logits(model: Any) -> Array:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, PROMPT_TOKENS + FORCED_TOKENS), generator=generator)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        parts = [model(ids[:, :PROMPT_TOKENS], cache=cache).logits[0]]
        for i in range(PROMPT_TOKENS, ids.shape[1]):
            parts.append(model(ids[:, i : i + 1], cache=cache).logits[0])
    return torch.cat(parts).float().numpy()


def run(dtype: torch.dtype = torch.bfloat16) -> GegluRuns:
    """The logits of a prompt and of forced tokens, three times."""
    model = tiny_gemma(dtype)
    own = _logits(model)
    logits: dict[str, Array] = {}
    counters: dict[str, dict[str, int]] = {}
    for path in ("fused", "compat"):
        nybble.transformers.patch_mlp(model, path)
        before = default_context().counters()
        logits[path] = _logits(model)
        after = default_context().counters()
        counters[path] = {name: new - old for name, old, new in zip(after._fields, before, after)}
    for name, found in (("own", own), *logits.items()):
        if not np.isfinite(found).all():
            raise ArithmeticError(f"the logits of the model with {name} GeGLU are not finite")
    return GegluRuns(
        layers=model.config.num_hidden_layers,
        forwards=1 + FORCED_TOKENS,
        fused_against_compat=Comparison.of(logits["compat"], logits["fused"]),
        fused_against_own=Comparison.of(own, logits["fused"]),
        fused_counters=counters["fused"],
        compat_counters=counters["compat"],
    )
