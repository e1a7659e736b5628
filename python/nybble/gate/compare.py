# SPDX-License-Identifier: Apache-2.0
"""How far two runs over the same tokens are from each other, and each from the text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


def log_softmax(logits: Array) -> Array:
    """In double precision; the last axis is the vocabulary."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergences(reference: Array, other: Array) -> Array:
    """KL(reference || other) in nats, of each token. Equal logits give exactly 0."""
    p, q = log_softmax(reference), log_softmax(other)
    with np.errstate(invalid="ignore"):  # -inf less -inf, where neither has a probability
        terms = np.exp(p) * (p - q)
    return np.where(np.isneginf(p) & np.isneginf(q), 0.0, terms).sum(axis=-1)


def perplexity(logits: Array, next_tokens: Array) -> float:
    """exp of the mean surprise at the text's own next tokens."""
    surprise = -np.take_along_axis(log_softmax(logits), next_tokens[:, None], axis=-1)
    return math.exp(float(surprise.mean()))


@dataclass(frozen=True)
class Comparison:
    """Of the logits of two runs, [tokens, vocabulary]."""

    tokens: int
    agreeing: int  # tokens whose likeliest next one is the same
    mean_kl: float
    max_kl: float
    bit_identical: bool
    kl: list[float]

    @classmethod
    def of(cls, reference: Array, other: Array) -> Comparison:
        kl = divergences(reference, other)
        return cls(
            tokens=len(kl),
            agreeing=int((reference.argmax(-1) == other.argmax(-1)).sum()),
            mean_kl=float(kl.mean()),
            max_kl=float(kl.max()),
            bit_identical=reference.tobytes() == other.tobytes(),
            kl=[float(x) for x in kl],
        )
