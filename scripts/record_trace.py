#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record the queries, keys and values of a Hugging Face causal language model as a trace.

The model runs once over the first tokens of a text, in one pass with a causal mask; what its
attention layers are handed (after the rotary embedding, before grouped heads are repeated) is
written to a safetensors file that `nybble replay` reads. docs/trace-format.md describes the file.

    python scripts/record_trace.py MODEL --text FILE --output FILE

needs torch and transformers 5. MODEL is a local folder or a name that transformers resolves.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # imported where it is used: reading and writing a trace do without
    import torch

FORMAT = "nybble-trace"
VERSION = "1"
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
PARTS = ("query", "key", "value")
LAYER_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]*)\.(query|key|value)")
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library allows
HOOK = "nybble_record"


class TraceError(Exception):
    """What keeps a trace from being recorded or read, told in a sentence for the user."""


@dataclass
class Layer:
    """One layer's tensors as little-endian bytes: [heads, tokens, dim], rows contiguous."""

    shapes: dict[str, tuple[int, int, int]]
    data: dict[str, bytes]
    extra: dict[str, str] = field(default_factory=dict)  # optional metadata: window, softcap


def write_trace(path: Path, layers: dict[int, Layer], dtype: str, metadata: dict[str, str]) -> None:
    """Write a trace of version 1. The same input gives the same bytes; a failure leaves no file."""
    info = {"format": FORMAT, "version": VERSION, **metadata}
    header: dict[str, Any] = {"__metadata__": info}
    chunks: list[bytes] = []
    offset = 0
    for index in sorted(layers):
        layer = layers[index]
        info.update({f"layers.{index}.{key}": text for key, text in sorted(layer.extra.items())})
        for part in PARTS:
            name, shape, data = f"layers.{index}.{part}", layer.shapes[part], layer.data[part]
            expected = math.prod(shape) * DTYPE_BYTES[dtype]
            if len(data) != expected:
                raise TraceError(f"{name} has {len(data)} bytes, but {shape} takes {expected}.")
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [offset, offset + len(data)],
            }
            chunks.append(data)
            offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors then begin on a multiple of 64 bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.writelines(chunks)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass
class Trace:
    """A trace read back: metadata, and per layer and part a float32 array [heads, tokens, dim]."""

    dtype: str
    metadata: dict[str, str]
    layers: dict[int, dict[str, np.ndarray]]
    prompt_tokens: int
    scale: float


def read_trace(path: Path) -> Trace:
    """Read a trace, or raise TraceError for each thing docs/trace-format.md says to reject."""
    header, data = _read_container(path)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise TraceError(f"{path} is not a trace: its metadata has no format {FORMAT!r}.")
    if metadata.get("version") != VERSION:
        raise TraceError(
            f"{path}: version is {metadata.get('version')!r}, but must be {VERSION!r}."
        )
    for key in ("model", "prompt_tokens", "scale", "text", "recorded_by"):
        if not isinstance(metadata.get(key), str):
            raise TraceError(f"{path}: the metadata lacks {key}.")

    layers: dict[int, dict[str, np.ndarray]] = {}
    dtypes: set[str] = set()
    for name, entry in header.items():
        match = LAYER_TENSOR.fullmatch(name)
        if match:
            dtypes.add(entry["dtype"])
            values = _to_float32(path, name, entry, data)
            layers.setdefault(int(match[1]), {})[match[2]] = values
        elif name.startswith("layers."):
            raise TraceError(f"{path}: {name} is not the name of a tensor of version {VERSION}.")
    if not layers:
        raise TraceError(f"{path} has no layer.")
    if len(dtypes) != 1:
        raise TraceError(f"{path}: the dtypes {sorted(dtypes)} are mixed, but must be one.")
    for index, parts in layers.items():
        _check_layer(path, index, parts)
    counts = {parts["key"].shape[1] for parts in layers.values()}
    if len(counts) != 1:
        raise TraceError(f"{path}: the layers have {sorted(counts)} tokens, but must agree.")

    prompt, tokens = metadata["prompt_tokens"], counts.pop()
    if not re.fullmatch("[1-9][0-9]{0,17}", prompt) or int(prompt) > tokens:
        raise TraceError(
            f"{path}: prompt_tokens is {prompt!r}, but must be a number from 1 to {tokens}."
        )
    number = r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"
    scale = float(metadata["scale"]) if re.fullmatch(number, metadata["scale"]) else math.nan
    if not 0 < scale < math.inf:
        raise TraceError(
            f"{path}: scale is {metadata['scale']!r}, but must be a number greater than 0."
        )
    return Trace(dtypes.pop(), metadata, layers, int(prompt), scale)


def _read_container(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file whose tensors cover the data exactly once."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(len(content) - 8, MAX_HEADER_BYTES):
        raise TraceError(f"{path} is not a safetensors file, or is cut off in its header.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    try:
        header = json.loads(content[8 : 8 + size].decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: the header is not valid JSON ({error}).") from None
    if not isinstance(header, dict):
        raise TraceError(f"{path}: the header is not a JSON object.")
    data = content[8 + size :]
    ranges = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            sound = isinstance(entry["dtype"], str) and all(
                type(number) is int and number >= 0 for number in (begin, end, *entry["shape"])
            )
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise TraceError(f"{path}: the header's entry of {name} is malformed.")
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position or end < begin:
            raise TraceError(
                f"{path}: the data of {name} is at {begin} to {end}, but must begin at {position}."
            )
        position = end
    if position != len(data):
        raise TraceError(f"{path} has {len(data)} bytes of data, but its header says {position}.")
    return header, data


def _to_float32(path: Path, name: str, entry: dict[str, Any], data: bytes) -> np.ndarray:
    dtype, shape = entry["dtype"], entry["shape"]
    if dtype not in DTYPE_BYTES:
        raise TraceError(f"{path}: {name} is {dtype}, but must be BF16, F16 or F32.")
    if len(shape) != 3 or 0 in shape:
        raise TraceError(f"{path}: {name} has shape {shape}, but must be [heads, tokens, dim].")
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise TraceError(f"{path}: {name} has {end - begin} bytes, which {shape} does not take.")
    raw = data[begin:end]
    if dtype == "BF16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise TraceError(f"{path}: {name} holds values that are not finite.")
    return values.reshape(shape)


def _check_layer(path: Path, index: int, parts: dict[str, np.ndarray]) -> None:
    """The three parts of a layer must be there and fit each other."""
    for part in PARTS:
        if part not in parts:
            raise TraceError(f"{path}: layers.{index}.{part} is missing.")
    query, key, value = (parts[part].shape for part in PARTS)
    if not query[1] == key[1] == value[1]:
        raise TraceError(
            f"{path}: layer {index} has {query[1]} query, {key[1]} key and {value[1]} value "
            "tokens, but they must agree."
        )
    if key[0] != value[0] or query[0] % key[0]:
        raise TraceError(
            f"{path}: layer {index} has {query[0]} query, {key[0]} key and {value[0]} value "
            "heads, but key and value heads must agree and divide the query heads."
        )
    if query[2] != key[2]:
        raise TraceError(
            f"{path}: layer {index} has queries of {query[2]} and keys of {key[2]}, "
            "but they must agree."
        )


def progress(message: str) -> None:
    """Say what is going on, but only to a person."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text: {error}.") from None


def quiet_libraries() -> None:
    """Keep the libraries' progress bars off a standard error that nobody watches."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def layer_list(text: str) -> list[int]:
    """Parse --layers: decimal layer numbers with commas between."""
    try:
        layers = [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of layer numbers such as 0,15,29"
        ) from None
    if min(layers) < 0 or len(set(layers)) != len(layers):
        raise argparse.ArgumentTypeError(
            f"{text!r} must name each layer once, by a number of 0 or more"
        )
    return sorted(layers)


def positive(text: str) -> int:
    """Parse a count of 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@dataclass
class Call:
    """What one attention layer was handed and gave, in the run's own dtype, batch removed."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor  # [tokens, query_heads, value_dim]
    scale: float
    window: int | None
    softcap: float | None


def capture(model: Any, tokens: list[int], layers: list[int]) -> dict[int, Call]:
    """Run a transformers causal LM once over the tokens; what the given layers attended over."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    calls: dict[int, Call] = {}

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = _own_attention(module)(
            module, query, key, value, attention_mask, **options
        )
        index = getattr(module, "layer_idx", None)
        if index in layers:
            if index in calls:
                raise TraceError(f"Layer {index} attends more than once; a trace holds one only.")
            if options.get("s_aux") is not None:
                raise TraceError(f"Layer {index} has attention sinks; a trace cannot hold them.")
            scale = options.get("scaling")
            calls[index] = Call(
                query=query[0].clone(),
                key=key[0].clone(),
                value=value[0].clone(),
                output=output[0].clone(),
                scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
                window=options.get("sliding_window"),
                softcap=options.get("softcap"),
            )
        return output, weights

    AttentionInterface.register(HOOK, attend)
    AttentionMaskInterface.register(HOOK, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(HOOK)
    # The logits are not wanted, and may take more memory than all the rest.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    try:
        with torch.inference_mode():
            model.eval()(
                input_ids=torch.tensor([tokens], device=model.device),
                use_cache=False,
                **({"logits_to_keep": 1} if keeps else {}),
            )
    finally:
        model.set_attn_implementation(before)
    for index in layers:
        if index not in calls:
            seen = f"layers {sorted(calls)}" if calls else "none of the layers named"
            raise TraceError(
                f"Layer {index} did not attend: the model has no such attention layer, or does "
                f"not use transformers' AttentionInterface ({seen} did)."
            )
    return calls


def _own_attention(module: Any) -> Callable[..., Any]:
    """The eager attention of the module's own model, which knows its softcap, mask and so on."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise TraceError(
        f"{type(module).__name__} has no eager attention to record from; "
        "is it a model of the transformers library?"
    )


def check_call(index: int, call: Call) -> None:
    """Raise unless the captured tensors give the layer's output, computed anew in double.

    This keeps out of a trace whatever it cannot express: other masks, biases, chunks, sinks.
    """
    import torch

    tokens = call.query.shape[1]
    rows = torch.linspace(0, tokens - 1, min(tokens, 16)).long().unique()
    group = call.query.shape[0] // call.key.shape[0]
    query = call.query[:, rows].cpu().double()
    key = call.key.cpu().double().repeat_interleave(group, dim=0)
    value = call.value.cpu().double().repeat_interleave(group, dim=0)
    scores = query @ key.transpose(1, 2) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    behind = rows[:, None] - torch.arange(tokens)
    hidden = behind < 0
    if call.window is not None:
        hidden |= behind >= call.window
    expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
    actual = call.output[rows].cpu().double().transpose(0, 1)
    error = (actual - expected).abs().max().item()
    # The model rounds scores and weights to its dtype: some units in the last place of values.
    bound = 64 * torch.finfo(call.query.dtype).eps * value.abs().max().item()
    if not error <= bound:
        raise TraceError(
            f"Layer {index} does more than causal softmax(q k^T scale) v: its output differs "
            f"from that by {error:.3g}, where {bound:.3g} is allowed; a trace cannot hold it."
        )


def to_layer(index: int, call: Call, dtype: str) -> Layer:
    """Round a capture to the trace's dtype."""
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    layer = Layer(shapes={}, data={})
    for part in PARTS:
        tensor = getattr(call, part).to(kinds[dtype]).contiguous().cpu()
        if not torch.isfinite(tensor).all():
            raise TraceError(f"layers.{index}.{part} has values that are not finite in {dtype}.")
        layer.shapes[part] = tuple(tensor.shape)
        layer.data[part] = tensor.view(torch.uint8).numpy().tobytes()
    if call.window is not None:
        layer.extra["window"] = str(call.window)
    if call.softcap is not None:
        layer.extra["softcap"] = repr(float(call.softcap))
    return layer


def record(
    model: Any, tokens: list[int], layers: list[int], prompt_tokens: int, dtype: str
) -> tuple[dict[int, Layer], dict[str, str]]:
    """Run the model; the layers of a trace, and the metadata that follows from the run."""
    calls = capture(model, tokens, layers)
    for index, call in calls.items():
        progress(f"checking layer {index}")
        check_call(index, call)
    scales = {call.scale for call in calls.values()}
    if len(scales) != 1:
        raise TraceError(
            f"The layers {layers} have the scales {sorted(scales)}, but a trace holds one: "
            "record them into files of their own."
        )
    metadata = {"prompt_tokens": str(prompt_tokens), "scale": repr(scales.pop())}
    return {index: to_layer(index, call, dtype) for index, call in calls.items()}, metadata


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("model", help="a local folder, or a name that transformers resolves")
    add("--text", type=Path, required=True, help="UTF-8 text to run the model over")
    add("--output", type=Path, required=True, help="trace file to write")
    add("--layers", type=layer_list, help="layer numbers: 0,15,29 (default: first, middle, last)")
    add("--tokens", type=positive, default=1088, help="tokens to run (default: %(default)s)")
    add("--prompt-tokens", type=positive, help="the prompt (default: all but an eighth)")
    add("--dtype", choices=list(DTYPE_BYTES), default="BF16", help="default: %(default)s")
    add(
        "--run-dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="the model's dtype while it runs (default: auto, as its weights are stored)",
    )
    add("--device", default="cpu", help="torch device to run on (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.prompt_tokens is None:
        options.prompt_tokens = options.tokens - options.tokens // 8
    if options.prompt_tokens > options.tokens:
        parser.error(
            f"--prompt-tokens is {options.prompt_tokens}, but must be at most --tokens, "
            f"{options.tokens}"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    quiet_libraries()
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        text = read_text(options.text)
        tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
        if len(tokens) < options.tokens:
            raise TraceError(
                f"--tokens is {options.tokens}, but {options.text} has {len(tokens)} tokens only."
            )
        progress(f"loading {options.model}")
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.run_dtype)
        count = model.config.get_text_config().num_hidden_layers
        wanted = options.layers or sorted({0, count // 2, count - 1})
        if wanted[-1] >= count:
            raise TraceError(
                f"--layers names layer {wanted[-1]}, but the model's last layer is {count - 1}."
            )
        progress(f"running {options.tokens} tokens")
        layers, metadata = record(
            model.to(options.device),
            tokens[: options.tokens],
            wanted,
            options.prompt_tokens,
            options.dtype,
        )
        metadata = {
            "model": options.model,
            **metadata,
            "text": f"{options.text.name}, its first {options.tokens} tokens",
            "recorded_by": "scripts/record_trace.py",
        }
        write_trace(options.output, layers, options.dtype, metadata)
        progress(f"wrote {options.output}")
    except ImportError as error:
        print(f"error: {error}; run 'pip install torch \"transformers>=5\"'.", file=sys.stderr)
        return 1
    except (TraceError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
