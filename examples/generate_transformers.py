#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generate with transformers over a quantized KV cache.

    generate_transformers.py [MODEL [PROMPT]]     MODEL: a folder or name that transformers loads

Without a model a tiny one with random weights generates tokens that mean nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import nybble
import nybble.transformers


def load() -> tuple[Any, Any, torch.Tensor]:
    if len(sys.argv) > 1:
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="nybble")
        prompt = sys.argv[2] if len(sys.argv) > 2 else "The sea is"
        return model, tokenizer, tokenizer(prompt, return_tensors="pt").input_ids
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="nybble")
    return model.eval(), None, torch.randint(3, 1000, (1, 100))


def main() -> None:
    model, tokenizer, ids = load()
    cache = nybble.transformers.NybbleCache(model.config, bits=8, value_bits=4)
    made = model.generate(ids, cache=cache, max_new_tokens=40, do_sample=False)
    print(made[0, ids.shape[1] :].tolist() if tokenizer is None else tokenizer.decode(made[0]))
    print(f"{cache.get_seq_length()} tokens in {cache.nbytes():,} bytes of keys and values")
    print(nybble.default_context().counters())


if __name__ == "__main__":
    main()
