# SPDX-License-Identifier: Apache-2.0
"""What the gates found: verdicts, a table, JSON, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .compare import Comparison
from .geglu import GegluRuns
from .torch_engine import Run

# Of 64 tokens that the text forces, so many must have the same likeliest next one on both paths.
AGREEING, OF = 63, 64
MEAN_KL = 1e-4  # nats


@dataclass(frozen=True)
class Verdict:
    """One gate."""

    name: str
    passed: bool
    found: str


@dataclass
class Pair:
    """A run held to another one over the same tokens."""

    run: Run
    against: Run
    result: Comparison

    @classmethod
    def of(cls, run: Run, against: Run) -> Pair:
        return cls(run, against, Comparison.of(against.logits, run.logits))


@dataclass
class Report:
    about: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    geglu: GegluRuns | None = None

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)


# ---- Verdicts -----------------------------------------------------------------------------------


def _calls_verdict(name: str, counters: dict[str, int], path: str, calls: int) -> Verdict:
    """Did so many calls take that path, no more and no less?"""
    ran = counters.get(path, 0)
    return Verdict(f"{name}: {path} ran", ran == calls, f"{ran} calls of {calls}")


def judge_cache(fused: Run, result: Comparison, layers: int) -> list[Verdict]:
    """The fused path against the compat path over one cache. What is not a number fails."""
    name = f"{fused.cache}, {fused.prompt_tokens} tokens"
    steps = layers * fused.forced_tokens
    return [
        # The fused path reads the prompt as well.
        _calls_verdict(name, fused.counters, "attention_fused", layers + steps),
        _calls_verdict(name, fused.counters, "attention_compat", steps),
        Verdict(
            f"{name}: next tokens agree (at least {AGREEING} of {OF})",
            result.agreeing * OF >= AGREEING * result.tokens,
            f"{result.agreeing} of {result.tokens}",
        ),
        Verdict(
            f"{name}: mean KL (below {MEAN_KL:g})",
            result.mean_kl < MEAN_KL,
            f"{result.mean_kl:.2g}",
        ),
    ]


def judge_geglu(runs: GegluRuns) -> list[Verdict]:
    name, calls = "GeGLU", runs.layers * runs.forwards
    result = runs.fused_against_compat
    return [
        _calls_verdict(f"{name} fused", runs.fused_counters, "geglu_fused", calls),
        _calls_verdict(f"{name} fused", runs.fused_counters, "geglu_compat", 0),
        _calls_verdict(f"{name} compat", runs.compat_counters, "geglu_compat", calls),
        _calls_verdict(f"{name} compat", runs.compat_counters, "geglu_fused", 0),
        Verdict(f"{name}: KL is 0", result.max_kl == 0, f"{result.max_kl:.2g} at most"),
        Verdict(
            f"{name}: logits have the same bits",
            result.bit_identical,
            "the same" if result.bit_identical else "different",
        ),
    ]


# ---- Words --------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def words(report: Report) -> str:
    """The report as a person reads it; tables are Markdown."""
    runs = [
        [
            run.cache,
            run.path,
            str(run.prompt_tokens),
            f"{run.perplexity:.3f}",
            f"{run.tokens_per_second:.1f}",
            f"{run.prefill_seconds:.2f}",
            _mib(run.cache_bytes),
            _mib(run.peak_bytes),
        ]
        for run in report.runs
    ]
    pairs = [
        [
            f"{pair.run.cache} {pair.run.path}",
            f"{pair.against.cache} {pair.against.path}",
            str(pair.run.prompt_tokens),
            f"{pair.result.agreeing}/{pair.result.tokens}",
            f"{pair.result.mean_kl:.2g}",
            f"{pair.result.max_kl:.2g}",
        ]
        for pair in report.pairs
    ]
    parts = [", ".join(f"{key}: {value}" for key, value in report.about.items())]
    if runs:
        header = ["cache", "path", "prompt", "perplexity", "tokens/s", "prefill s", "cache MiB"]
        parts.append(_table([*header, "peak MiB"], runs))
        header = ["run", "against", "prompt", "next token agrees", "mean KL", "max KL"]
        parts.append(_table(header, pairs))
    if report.geglu is not None:
        own = report.geglu.fused_against_own
        parts.append(
            f"GeGLU against the model's own activation: {own.agreeing} of {own.tokens} next "
            f"tokens agree, mean KL {own.mean_kl:.2g}, at most {own.max_kl:.2g}"
        )
    failed = sum(not verdict.passed for verdict in report.verdicts)
    lines = [
        f"{'ok    ' if verdict.passed else 'FAILED'} {verdict.name}: {verdict.found}"
        for verdict in report.verdicts
    ]
    lines.append(f"{len(report.verdicts) - failed} passed, {failed} failed")
    return "\n\n".join([*parts, "\n".join(lines)])


# ---- JSON ---------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    def run(item: Run) -> dict[str, Any]:
        return {key: value for key, value in vars(item).items() if key != "logits"}

    def pair(item: Pair) -> dict[str, Any]:
        return {
            "cache": item.run.cache,
            "path": item.run.path,
            "against_cache": item.against.cache,
            "against_path": item.against.path,
            "prompt_tokens": item.run.prompt_tokens,
            **asdict(item.result),
        }

    found = {
        "command": "gate",
        **report.about,
        "passed": report.passed,
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
        "runs": [run(item) for item in report.runs],
        "comparisons": [pair(item) for item in report.pairs],
        "geglu": None if report.geglu is None else asdict(report.geglu),
    }
    return json.dumps(found, indent=1)


# ---- The picture --------------------------------------------------------------------------------

# Readable for the colour-blind; one for each width, dark and light for fused and compat.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
_FULL_COLOUR = "#3b3b3b"
_LEAST_KL = 1e-12  # where 0 is drawn on the logarithmic axis


def plot(report: Report, path: Path) -> None:
    """KL of each token above; perplexity, speed and memory of each run below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts = list(dict.fromkeys(run.prompt_tokens for run in report.runs))
    caches = list(dict.fromkeys(run.cache for run in report.runs if run.path != "full"))
    colours = dict(zip(caches, _COLOURS * (1 + len(caches) // len(_COLOURS))))
    figure, axes = pyplot.subplots(
        2, len(prompts), figsize=(6.2 * len(prompts), 8.4), squeeze=False, layout="constrained"
    )
    for column, prompt in enumerate(prompts):
        _plot_divergence(axes[0][column], report, prompt, colours)
        _plot_runs(axes[1][column], [r for r in report.runs if r.prompt_tokens == prompt], colours)
    figure.suptitle(str(report.about["model"]))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_divergence(axis: Any, report: Report, prompt: int, colours: dict[str, str]) -> None:
    for pair in report.pairs:
        if pair.run.prompt_tokens != prompt or pair.run.path != "fused":
            continue
        kl = [max(value, _LEAST_KL) for value in pair.result.kl]
        own = pair.against.path == "compat"
        axis.plot(
            range(1, len(kl) + 1),
            kl,
            color=colours[pair.run.cache],
            linestyle="-" if own else ":",
            linewidth=1.3,
            label=f"{pair.run.cache} fused against {'compat' if own else pair.against.cache}",
        )
    axis.axhline(MEAN_KL, color=_FULL_COLOUR, linewidth=0.8, linestyle="--")
    axis.annotate(
        "gate for the mean, fused against compat",
        (1, MEAN_KL),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
    axis.set_yscale("log")
    axis.set_title(f"after {prompt:,} tokens")
    axis.set_xlabel("forced token")
    axis.set_ylabel("KL divergence, nats")
    axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    axis.grid(alpha=0.25)


def _plot_runs(axis: Any, runs: list[Run], colours: dict[str, str]) -> None:
    """Bars of tokens per second; beside each its perplexity and cache."""
    for place, run in enumerate(runs):
        colour = colours.get(run.cache, _FULL_COLOUR)
        axis.barh(
            place, run.tokens_per_second, color=colour, alpha=0.45 if run.path == "compat" else 1
        )
        peak = "" if run.peak_bytes is None else f", peak {_mib(run.peak_bytes)} MiB"
        axis.annotate(
            f"perplexity {run.perplexity:.2f}, cache {_mib(run.cache_bytes)} MiB{peak}",
            (0, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
        )
    axis.set_yticks(range(len(runs)), [f"{run.cache}\n{run.path}" for run in runs], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second, decode")
