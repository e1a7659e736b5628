#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the JSON of `nybble bench attention` and of `nybble replay` as one picture.

    build/nybble bench attention --shapes bench/shapes/attention-length.txt --json > bench.json
    build/nybble replay examples/smollm2-135m.safetensors --json > replay.json
    python bench/plot.py bench.json replay.json --output picture.png

Benchmarks become time against the number of tokens, one panel for each shape of heads; replays
become error against bytes per token, one panel for each trace. Files may be mixed. The ending of
--output chooses the kind of file: .png, .svg, .pdf. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour for each width, the same in every picture; readable for the colour-blind.
COLOURS = {
    "16-bit": "#3b3b3b",
    "8-bit": "#0072b2",
    "K8V4": "#009e73",
    "6-bit": "#56b4e9",
    "5-bit": "#8a6fb8",
    "4-bit": "#d55e00",
    "3-bit": "#cc79a7",
    "2-bit": "#b8860b",
}
OTHER_COLOUR = "#808080"
MARKERS = "os^Dv"  # one for each setting other than the width
PANEL_INCHES = (5.4, 4.4)
MAX_COLUMNS = 3


class PlotError(Exception):
    """What keeps a picture from being drawn, told in a sentence for the user."""


@dataclass
class Series:
    """One line of a benchmark panel: what stayed the same while N grew."""

    cache: str
    temperature: str
    other: tuple[tuple[str, Any], ...]  # what else could tell lines apart: threads, isa, ...
    median_us: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)


@dataclass
class BenchPanel:
    heads: tuple[int, int, int, int]  # batch, query heads, KV heads, head_dim
    series: dict[tuple[Any, ...], Series] = field(default_factory=dict)
    read_gb_per_s: float = 0.0


def read_reports(paths: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    reports = []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlotError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise PlotError(f"{path} is not JSON: {error}") from None
        if not isinstance(report, dict) or not isinstance(report.get("results"), list):
            raise PlotError(f"{path} is no report of nybble bench or nybble replay")
        reports.append((path, report))
    return reports


# ---- Time against the number of tokens ----------------------------------------------------------

TOLD_APART = ("query_len", "threads", "isa", "path", "group_size", "dtype", "rounding")


def collect_benchmarks(reports: list[tuple[Path, dict[str, Any]]]) -> list[BenchPanel]:
    """Attention results of all files, by the shape of their heads. A later file's result replaces
    an earlier one's of the same setting."""
    panels: dict[tuple[int, ...], BenchPanel] = {}
    for _, report in reports:
        for result in report["results"]:
            if report.get("command") != "bench" or result.get("operation") != "attention":
                continue
            *heads, tokens = result["shape"]
            panel = panels.setdefault(tuple(heads), BenchPanel(tuple(heads)))
            other = tuple((name, result.get(name)) for name in TOLD_APART)
            key = (result["cache"], result["temperature"], other)
            series = panel.series.setdefault(key, Series(*key))
            series.median_us[tokens] = result["median_us"]
            series.bytes[tokens] = result["bytes"]
            panel.read_gb_per_s = max(panel.read_gb_per_s, result["read_gb_per_s"])
    return list(panels.values())


def varying(panel: BenchPanel) -> list[str]:
    """Which settings differ between the lines of a panel, and so belong into their names."""
    values: dict[str, set[Any]] = {}
    for series in panel.series.values():
        for name, value in series.other:
            values.setdefault(name, set()).add(value)
    return [name for name, seen in values.items() if len(seen) > 1]


def setting(name: str, value: Any) -> str:
    if name == "threads" and value == 1:
        return "1 thread"
    units = {"threads": "{} threads", "query_len": "query length {}", "group_size": "groups of {}"}
    return units.get(name, "{}").format(value)


def time_text(microseconds: float, _: int | None = None) -> str:
    if microseconds < 1e3:
        return f"{microseconds:g} µs"
    return f"{microseconds / 1e3:g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:g} s"


def tokens_text(tokens: float, _: int | None = None) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"


def spread_labels(positions: list[float], gap: float) -> list[float]:
    """Positions moved apart to at least `gap`, in the same order, as little as need be."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    placed = [positions[i] for i in order]
    for _ in range(200):
        moved = False
        for i in range(len(placed) - 1):
            lack = gap - (placed[i + 1] - placed[i])
            if lack > 1e-9:
                placed[i] -= lack / 2
                placed[i + 1] += lack / 2
                moved = True
        if not moved:
            break
    result = [0.0] * len(positions)
    for place, i in enumerate(order):
        result[i] = placed[place]
    return result


def label_line_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each line's name behind its last point, moved apart where they would collide."""
    bottom, top = (math.log10(limit) for limit in axes.get_ylim())
    heights = [(math.log10(y) - bottom) / (top - bottom) for _, y, _, _ in ends]
    for (x, y, text, colour), height in zip(ends, spread_labels(heights, 0.052), strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "shrinkA": 0, "shrinkB": 4},
        )


def draw_benchmark(axes: Axes, panel: BenchPanel, machine: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    apart = varying(panel)
    settings = list(dict.fromkeys(series.other for series in panel.series.values()))
    has_cold = any(series.temperature == "cold" for series in panel.series.values())
    ends = []
    all_tokens: set[int] = set()
    for series in panel.series.values():
        tokens = sorted(series.median_us)
        all_tokens.update(tokens)
        times = [series.median_us[n] for n in tokens]
        colour = COLOURS.get(series.cache, OTHER_COLOUR)
        leads = series.temperature == "cold" or not has_cold
        axes.plot(
            tokens,
            times,
            color=colour,
            lw=1.8 if leads else 1.0,
            ls="-" if leads else (0, (4, 2)),
            marker=MARKERS[settings.index(series.other) % len(MARKERS)] if leads else None,
            ms=4,
            alpha=1 if leads else 0.7,
            zorder=3 if leads else 2,
        )
        if leads:
            words = [setting(name, value) for name, value in series.other if name in apart]
            ends.append((tokens[-1], times[-1], ", ".join([series.cache, *words]), colour))
            floor = [series.bytes[n] * 1e-3 / panel.read_gb_per_s for n in tokens]
            axes.plot(tokens, floor, color=colour, lw=0.8, ls=":", alpha=0.8, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(tokens_text))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(all_tokens) <= 12:
        axes.set_xticks(sorted(all_tokens))
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(time_text))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("time of one attention call, median")
    label_line_ends(axes, ends)
    batch, query_heads, kv_heads, dim = panel.heads
    title = f"{query_heads} query heads, {kv_heads} KV, head_dim {dim}"
    axes.set_title(f"{title}, batch {batch}" if batch > 1 else title, loc="left", fontsize=10.5)
    common = [setting(name, value) for name, value in series.other if name not in apart and value]
    drawn = [
        "solid: cold, dashed: warm" if has_cold else "warm",
        f"dotted: reading at {panel.read_gb_per_s:.3g} GB/s",
    ]
    note(axes, machine, ", ".join(common), "; ".join(drawn))


# ---- Error against bytes per token --------------------------------------------------------------


def draw_replay(axes: Axes, report: dict[str, Any], machine: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, StrMethodFormatter

    trace = report["trace"]
    results = sorted(report["results"], key=lambda result: result["bytes_per_token"])
    layers = trace["layers"]
    for index, layer in enumerate(layers):  # each layer's bytes as if all layers were like it
        shares = [r["layers"][index]["share_of_16bit"] for r in results]
        errors = [r["layers"][index]["relative_l2"] for r in results]
        axes.plot(shares, errors, color="#b0b0b0", lw=0.8, zorder=1)
        axes.annotate(
            f"layer {layer['layer']}",
            (shares[0], errors[0]),
            textcoords="offset points",
            xytext=(-5, 0),
            ha="right",
            va="center",
            fontsize=8,
            color="#808080",
        )
    shares = [result["share_of_16bit"] for result in results]
    errors = [result["relative_l2"] for result in results]
    axes.plot(shares, errors, color="#3b3b3b", lw=1.2, zorder=2)
    for result, share, error in zip(results, shares, errors, strict=True):
        colour = COLOURS.get(result["cache"], OTHER_COLOUR)
        axes.plot(share, error, "o", ms=8, color=colour, zorder=3)
        axes.annotate(
            f"{result['cache']}  {result['bytes_per_token']:,} B",
            (share, error),
            textcoords="offset points",
            xytext=(9, 5),
            fontsize=9,
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([share for share in (1 / 8, 1 / 4, 1 / 2, 1) if share >= min(shares) / 1.6])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{error:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(shares) / 1.6, max(shares) * 1.75)  # room for the names
    axes.set_xlabel("bytes per token, as a share of a 16-bit cache")
    axes.set_ylabel("relative error of the attention's output (L2)")
    axes.set_title(trace["model"].split(",")[0], loc="left", fontsize=10.5)
    note(
        axes,
        machine,
        f"{report['steps']} steps behind {report['prompt_tokens']} tokens, "
        f"groups of {results[0]['group_size']}, {report['rounding']} rounding",
        f"outputs in {report['output_dtype']}; against double precision over the tensors as "
        "recorded",
    )


# ---- The picture --------------------------------------------------------------------------------


def note(axes: Axes, *lines: str) -> None:
    axes.text(
        0,
        -0.16,
        "\n".join(line for line in lines if line),
        transform=axes.transAxes,
        va="top",
        fontsize=7.5,
        color="#606060",
    )


def finish_axes(axes: Axes) -> None:
    axes.grid(True, which="major", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, which="both", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#a0a0a0")


def draw(reports: list[tuple[Path, dict[str, Any]]], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = collect_benchmarks(reports)
    replays = [report for _, report in reports if report.get("command") == "replay"]
    count = len(panels) + len(replays)
    if count == 0:
        raise PlotError("There is nothing to draw: no file has results of attention or of replay")
    machines = {report.get("machine", {}).get("cpu", "") for _, report in reports}
    machine = machines.pop() if len(machines) == 1 else "several machines"

    columns = min(count, MAX_COLUMNS)
    rows = -(-count // columns)
    width, height = PANEL_INCHES
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(columns * width, rows * height),
        squeeze=False,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = list(grid.flat)
    for place, panel in zip(axes, panels, strict=False):
        draw_benchmark(place, panel, machine)
    for place, report in zip(axes[len(panels) :], replays, strict=False):
        draw_replay(place, report, report["machine"]["cpu"])
    for place in axes[:count]:
        finish_axes(place)
    for place in axes[count:]:
        place.set_visible(False)
    try:
        figure.savefig(output, dpi=160, metadata={"Date": None} if output.suffix == ".svg" else {})
    except (OSError, ValueError) as error:
        raise PlotError(f"{output}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of bench, replay")
    parser.add_argument(
        "--output", type=Path, default=Path("nybble.png"), help="the picture (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        draw(read_reports(options.files), options.output)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError) as error:
        print(f"error: a report lacks what this script draws: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
