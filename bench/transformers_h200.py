#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding in transformers: tokens per second and memory, for several caches and contexts.

    bench/transformers_h200.py                                     all of it, on a GPU
    bench/transformers_h200.py --seconds 60                        as much as fits into a minute
    bench/transformers_h200.py --models llama-3-8b --contexts 32768 --batches 1,16 --json out.json
    bench/transformers_h200.py --models tiny --contexts 64 --batches 2 --device cpu

Models have the shapes of known ones and random weights. Prompts are not computed: caches are filled
with random keys and values, as long as the context, so that each line takes seconds. What is timed
are decode steps (the embedding, every layer, the logits, the argmax), each until its token is
there; their median and the least, after some that are not counted. What matters most comes first.

    dynamic     transformers' DynamicCache in the model's dtype, with the SDPA kernel that PyTorch
                chooses by itself
    dynamic-flash   the same without cuDNN's kernel, which is planned anew for every length
    quanto4, hqq4, fp8    its QuantizedCache by that backend, with SDPA without cuDNN; the first two
                are packages to install
    nybble8, nybble4, k8v4    NybbleCache with nybble's attention: 8 bits, 4, and keys 8, values 4
    static+graph, nybble8+graph, ...    the same steps as one captured CUDA graph; static is
                transformers' StaticCache with SDPA
    nybble4+generate, dynamic+generate, ...    steps of model.generate(), its own work included;
                with nybble after `patch_decode`
    nybble4+graph+compiled, quanto4+compiled, ...    the same with the model's layers compiled by
                torch.compile (`patch_decode(model, compile=True)`); what compiling takes is not
                counted

Beside the time: `cache`, the bytes that hold keys and values, what they would be by arithmetic
(codes, scales and biases of every token that a layer keeps), and `peak`, the most that PyTorch held
while it decoded beside the model (on the CPU: the process's peak, model and all). What does not fit
or is not supported says why.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

import nybble.transformers
from nybble._decode_graph import compiled_layers

TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
}
EIGHT_KV_HEADS = {"num_key_value_heads": 8}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-3-8b": (
        LlamaConfig,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            **EIGHT_KV_HEADS,
        },
    ),
    "qwen3-8b": (
        Qwen3Config,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "head_dim": 128,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            **EIGHT_KV_HEADS,
        },
    ),
    "gemma-3-12b": (
        Gemma3TextConfig,
        {
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "head_dim": 256,
            "intermediate_size": 15360,
            "vocab_size": 262208,
            "sliding_window": 1024,
            **EIGHT_KV_HEADS,
        },
    ),
    "tiny": (LlamaConfig, TINY),
    "tiny-gemma": (
        Gemma3TextConfig,
        {
            **TINY,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
WIDTHS = {"nybble8": (8, 8), "nybble4": (4, 4), "k8v4": (8, 4)}
FLASH, GRAPH, GENERATE, COMPILED = "-flash", "+graph", "+generate", "+compiled"
OTHERS = ("dynamic", "dynamic" + FLASH, "static", "quanto4", "hqq4", "fp8")
USUAL = (
    "dynamic" + FLASH,
    *(w + GRAPH + way for way in (COMPILED, "") for w in WIDTHS),
    "quanto4",
    "static" + GRAPH,
    "dynamic",
    *WIDTHS,
    "nybble4" + GENERATE + COMPILED,
    "nybble4" + GENERATE,
    "dynamic" + GENERATE,
    "hqq4",
    "fp8",
)
GROUP_SIZE = 64
FILL_TOKENS = 4096  # appended at once; to a window fewer, which else has room for them beside it
WINDOW_FILL_TOKENS = 16
WAKING_STEPS = 10
FEWEST_STEPS = 3
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Line:
    """One measurement, or why there is none."""

    model: str
    cache: str
    context: int
    batch: int
    tokens_per_second: float | None = None
    step_ms: float | None = None
    least_ms: float | None = None
    steps: int | None = None
    cache_bytes: int | None = None
    arithmetic_bytes: int | None = None
    peak_bytes: int | None = None
    model_bytes: int | None = None  # of peak_bytes, where they count
    reason: str = ""


# ---- Models and caches ---------------------------------------------------------------------------


def make_config(name: str) -> PreTrainedConfig:
    kind, options = MODELS[name]
    made: PreTrainedConfig = kind(
        **options,
        max_position_embeddings=1 << 18,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return made


def make_model(name: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            make_config(name), dtype=dtype, attn_implementation="sdpa"
        )
    model.eval()
    # The first steps of a process load libraries and wake the clocks: none of the lines pays.
    token = torch.ones(1, 8, dtype=torch.long, device=device)
    for _ in range(WAKING_STEPS):
        model(token)
    return model


def layer_sizes(config: PreTrainedConfig) -> Iterator[tuple[int, int, int | None]]:
    """KV heads, head_dim and window of each layer."""
    full = ["full_attention"] * config.num_hidden_layers
    for i, kind in enumerate(getattr(config, "layer_types", None) or full):
        layer = config.per_layer_config[i]
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        window = layer.sliding_window if kind == "sliding_attention" else None
        yield layer.num_key_value_heads, dim, window


def arithmetic_bytes(
    config: PreTrainedConfig, cache: str, context: int, batch: int, dtype: torch.dtype
) -> int | None:
    """Keys and values of every token that a layer keeps, scales and biases included."""
    sixteen = {"dynamic", "dynamic" + FLASH, "static"}
    bits = (16, 16) if cache in sixteen else WIDTHS.get(cache)
    if bits is None:
        return None
    total = 0
    for heads, dim, window in layer_sizes(config):
        tokens = context if window is None else min(context, window)
        for width in bits:
            row = dim * torch.finfo(dtype).bits // 8
            if width < 16:
                row = dim * width // 8 + 2 * (dim // GROUP_SIZE) * torch.finfo(dtype).bits // 8
            total += batch * heads * tokens * row
    return total


def random_rows(batch: int, heads: int, tokens: int, dim: int, like: Any) -> list[torch.Tensor]:
    shape = (batch, heads, tokens, dim)
    return [torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(2)]


def fill_by_updates(cache: Any, config: PreTrainedConfig, context: int, batch: int, w: Any) -> None:
    """A whole prompt at once, as the model's own prefill would."""
    for i, (heads, dim, window) in enumerate(layer_sizes(config)):
        cache.update(*random_rows(batch, heads, context, dim, w), i)
        if window is not None and isinstance(cache, DynamicCache):
            # A slice, which would keep the whole prompt alive until the next update.
            layer = cache.layers[i]
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def fill_nybble(cache: Any, config: PreTrainedConfig, context: int, batch: int, w: Any) -> None:
    for layer, (heads, dim, window) in zip(cache.layers, layer_sizes(config)):
        held = context if window is None else min(context, window)
        at_once = min(held, FILL_TOKENS if window is None else WINDOW_FILL_TOKENS)
        rows = random_rows(batch, heads, at_once, dim, w)
        layer.lazy_initialization(*rows)
        for start in range(0, held, at_once):
            tokens = min(at_once, held - start)
            layer.stored.append(*(x[:, :, :tokens] for x in rows))
        layer.cumulative_length = context


def make_cache(name: str, model: Any, context: int, batch: int, room: int) -> Any:
    """The cache, filled; the model attends as it needs."""
    model.set_attn_implementation("nybble" if name in WIDTHS else "sdpa")
    config, weight = model.config, model.lm_head.weight
    cache: Any
    if name in WIDTHS:
        keys, values = WIDTHS[name]
        cache = nybble.transformers.NybbleCache(config, keys, values, GROUP_SIZE)
        cache.reserve(context + room)
        fill_nybble(cache, config, context, batch, weight)
        return cache
    if name.startswith("dynamic"):
        cache = DynamicCache(config=config)
    elif name == "static":
        cache = StaticCache(config=config, max_cache_len=context + room)
    elif name == "fp8":
        cache = QuantizedCache("fp8", config)
    else:
        axis = 1 if name == "hqq4" else 0
        cache = QuantizedCache(name[:-1], config, nbits=4, axis_key=axis, axis_value=axis)
    fill_by_updates(cache, config, context, batch, weight)
    return cache


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        inner = [getattr(value, name, None) for name in ("_data", "_scale", "_shift")]
        if type(value) is torch.Tensor or not any(isinstance(x, torch.Tensor) for x in inner):
            yield value
            return
        value = inner
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth:
        for item in value:
            yield from tensors_in(item, depth - 1)


def bytes_of(cache: Any) -> int:
    if isinstance(cache, nybble.transformers.NybbleCache):
        return cache.nbytes()
    found = {x.data_ptr(): x.nbytes for layer in cache.layers for x in tensors_in(vars(layer))}
    return sum(found.values())


# ---- Measuring -----------------------------------------------------------------------------------


@contextmanager
def made_ready(model: Any, cache: Any, ways: str) -> Iterator[None]:
    """What a line's ways ask of the model, until it has been measured."""
    is_ours = isinstance(cache, nybble.transformers.NybbleCache)
    compiled = COMPILED in ways
    if is_ours and (compiled or GENERATE in ways):
        nybble.transformers.patch_decode(model, compile=compiled)
    if compiled and not is_ours:
        cache.update = torch.compiler.disable(cache.update)  # for every length and layer the same
    try:
        with compiled_layers(model) if compiled and not is_ours else nullcontext():
            yield
    finally:
        nybble.transformers.unpatch_decode(model)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def eager_step(model: Any, cache: Any, batch: int) -> Callable[[], Any]:
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)

    def step() -> None:
        token.copy_(model(token, cache=cache).logits.argmax(-1))

    return step


def static_graph(model: Any, cache: Any, batch: int, context: int) -> Callable[[], Any]:
    """A step over a StaticCache, captured: positions and the cache's length are on the device."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    position = torch.full((batch, 1), context, device=model.device)

    def step() -> None:
        token.copy_(model(token, position_ids=position, cache=cache).logits.argmax(-1))
        position.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def generate_times(model: Any, cache: Any, line: Line, steps: int, warmup: int) -> list[float]:
    """Seconds of generate()'s steps, behind a prompt that the cache holds but for its last token."""
    ids = torch.ones(line.batch, line.context + 1, dtype=torch.long, device=model.device)
    ends: list[float] = []

    def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        wait(model.device.type)
        ends.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    model.generate(
        ids,
        cache=cache,
        max_new_tokens=warmup + steps + 1,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([note]),
    )
    return [end - start for start, end in zip(ends, ends[1:])][warmup:]


def step_times(
    step: Callable[[], Any], device: str, steps: int, warmup: int, seconds: float
) -> list[float]:
    for _ in range(warmup):
        step()
    wait(device)
    begin = time.perf_counter()
    times: list[float] = []
    while len(times) < steps:
        if len(times) >= FEWEST_STEPS and time.perf_counter() - begin > seconds:
            break
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
    return times


def split_name(cache: str) -> tuple[str, str]:
    """A cache, and how its steps are taken."""
    name, plus, ways = cache.partition("+")
    return name, plus + ways


def measure(line: Line, model: Any, options: argparse.Namespace) -> None:
    device, steps, warmup = model.device.type, options.steps, options.warmup
    name, ways = split_name(line.cache)
    room = warmup + steps + 8
    line.arithmetic_bytes = arithmetic_bytes(
        model.config, name, line.context, line.batch, model.dtype
    )
    if device != "cpu":
        line.model_bytes = torch.cuda.memory_allocated()
    cache = make_cache(name, model, line.context, line.batch, room)
    line.cache_bytes = bytes_of(cache)
    with made_ready(model, cache, ways):
        if name == "static" and GRAPH in ways:
            step = static_graph(model, cache, line.batch, line.context)
        elif GRAPH in ways:
            eager_step(model, cache, line.batch)()  # compiles what the graph will hold
            step = nybble.transformers.DecodeGraph(model, cache).greedy
        else:
            step = eager_step(model, cache, line.batch)
        wait(device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        if GENERATE in ways:
            times = generate_times(model, cache, line, steps, warmup)
        else:
            times = step_times(step, device, steps, warmup, options.line_seconds)
    seconds = statistics.median(times)
    line.steps, line.least_ms = len(times), min(times) * 1e3
    line.step_ms, line.tokens_per_second = seconds * 1e3, line.batch / seconds
    if device != "cpu":
        line.peak_bytes = torch.cuda.max_memory_allocated()
    else:
        line.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def too_large(line: Line, model: Any) -> str:
    """Why a line cannot fit into the GPU's memory; "" where it may."""
    if model.device.type == "cpu":
        return ""
    name = split_name(line.cache)[0]
    kind = "nybble4" if name in ("quanto4", "hqq4") else "nybble8" if name == "fp8" else name
    needed = arithmetic_bytes(model.config, kind, line.context, line.batch, model.dtype) or 0
    free_bytes = torch.cuda.mem_get_info()[0]
    if needed <= free_bytes:
        return ""
    gib = 2.0**30
    return f"does not fit: {needed / gib:.0f} GiB of keys and values, {free_bytes / gib:.0f} free"


def free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def measure_or_say_why(line: Line, model: Any, options: argparse.Namespace) -> None:
    line.reason = too_large(line, model)
    if line.reason:
        return
    chooses = split_name(line.cache)[0] == "dynamic"
    try:
        with nullcontext() if chooses else sdpa_kernel(WITHOUT_CUDNN):
            measure(line, model, options)
    except torch.OutOfMemoryError:
        line.reason = "out of memory"
    except Exception as error:
        line.reason = f"{type(error).__name__}: {error}".split("\n")[0]


def lines(options: argparse.Namespace) -> Iterator[Line]:
    dtype = getattr(torch, options.dtype)
    end = time.monotonic() + options.seconds
    for name in options.models:
        model = None
        for context, batch, cache in itertools.product(
            options.contexts, options.batches, options.caches
        ):
            line = Line(name, cache, context, batch)
            if time.monotonic() > end:
                line.reason = f"not begun within --seconds {options.seconds}"
                yield line
                continue
            if model is None:
                model = make_model(name, options.device, dtype)
            measure_or_say_why(line, model, options)
            free(options.device)
            yield line
        del model
        free(options.device)


# ---- The table -----------------------------------------------------------------------------------

HEAD = (
    f"{'model':<12} {'context':>7} {'batch':>5} {'cache':<25} {'tokens/s':>9} {'ms/step':>8} {'least':>7} "
    f"{'cache GiB':>9} {'arithm.':>8} {'peak GiB':>8}"
)


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, form)


def row(line: Line) -> str:
    gib = 2.0**30
    start = f"{line.model:<12} {line.context:>7} {line.batch:>5} {line.cache:<25} "
    if line.tokens_per_second is None:
        return f"{start} {line.reason}"
    assert line.peak_bytes is not None
    beside_model = line.peak_bytes - (line.model_bytes or 0)
    return (
        f"{start}{number(line.tokens_per_second, '9.1f')} {number(line.step_ms, '8.2f')} "
        f"{number(line.least_ms, '7.2f')} "
        f"{number(line.cache_bytes, '9.3f', gib)} {number(line.arithmetic_bytes, '.3f', gib):>8} "
        f"{number(beside_model, '8.3f', gib)}"
    )


def listed(text: str, kind: Callable[[str], Any], allowed: Any = None) -> list[Any]:
    found = [kind(word) for word in text.split(",")]
    for word in found:
        if allowed is not None and word not in allowed:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shipped = [name for name in MODELS if not name.startswith("tiny")]
    own = [width + way for width in WIDTHS for way in (GRAPH, GENERATE)]
    others = [*OTHERS, "static" + GRAPH, "dynamic" + GENERATE, "quanto4" + GENERATE]
    caches = [name + way for name in (*own, *others) for way in ("", COMPILED)] + list(WIDTHS)
    parser.add_argument("--models", type=lambda t: listed(t, str, MODELS), default=shipped)
    parser.add_argument("--contexts", type=lambda t: listed(t, int), default=[32768, 131072, 8192])
    parser.add_argument("--batches", type=lambda t: listed(t, int), default=[1, 16])
    parser.add_argument("--caches", type=lambda t: listed(t, str, caches), default=list(USUAL))
    parser.add_argument("--steps", type=int, default=16, help="decode steps that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="and before them")
    parser.add_argument(
        "--line-seconds", type=float, default=2, help="time no further step of a line after so many"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no line after so many")
    parser.add_argument("--json", help="also write the lines to this file")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    where = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    print(f"{where}, PyTorch {torch.__version__}, {options.dtype}, {options.steps} steps")
    print(HEAD, flush=True)
    made = []
    for line in lines(options):
        made.append(asdict(line))
        print(row(line), flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(
                    {"device": where, "torch": torch.__version__, "lines": made}, file, indent=1
                )
    return 0 if any(line["tokens_per_second"] is not None for line in made) else 1


if __name__ == "__main__":
    sys.exit(main())
