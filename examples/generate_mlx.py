#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate with mlx-lm over a quantized KV cache.

    generate_mlx.py [MODEL [PROMPT]]              MODEL: a folder or name that mlx-lm loads

Without a model a tiny one with random weights generates tokens that mean nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

import nybble
import nybble.mlx_lm


def tiny() -> Any:
    mx.random.seed(0)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=1000,
    )
    return llama.Model(arguments)


def main() -> None:
    tokenizer = None
    if len(sys.argv) > 1:
        model, tokenizer = load(sys.argv[1])[:2]
        prompt = mx.array(tokenizer.encode(sys.argv[2] if len(sys.argv) > 2 else "The sea is"))
    else:
        model, prompt = tiny(), mx.random.randint(3, 1000, (100,))
    nybble.mlx_lm.install()
    caches = nybble.mlx_lm.make_prompt_cache(model, bits=8, value_bits=4)
    steps = generate_step(prompt, model, max_tokens=40, prompt_cache=caches)
    made = [int(token) for token, _ in steps]
    print(made if tokenizer is None else tokenizer.decode(made))
    held = sum(cache.nbytes for cache in caches)
    print(f"{caches[0].offset} tokens in {held:,} bytes of keys and values")
    print(nybble.default_context().counters())


if __name__ == "__main__":
    main()
