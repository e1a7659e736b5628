# SPDX-License-Identifier: Apache-2.0
"""The last step of gpu-check.sh: its results as one report in Markdown, for docs/performance.md, and
as JSON. Exit code 1 where a check failed, a sanitizer found something, or nothing was checked."""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Json = dict[str, Any]

OUT_OF_TIME = 124  # what `timeout` exits with

# Issue 3: the least share of the read bandwidth, or the most microseconds, at 4 and at 8 bits.
GOALS: dict[tuple[int, ...], tuple[str, float, float]] = {
    (32, 32, 8, 128, 8192): ("share", 0.85, 0.92),
    (8, 32, 8, 128, 32768): ("share", 0.85, 0.92),
    (8, 32, 32, 128, 8192): ("share", 0.85, 0.92),
    (1, 32, 8, 128, 131072): ("share", 0.78, 0.88),
    (1, 64, 8, 128, 131072): ("share", 0.78, 0.88),
    (1, 16, 8, 256, 131072): ("share", 0.78, 0.88),
    (1, 16, 1, 512, 131072): ("share", 0.70, 0.80),
    (1, 32, 8, 128, 8192): ("us", 8, 9),
    (1, 16, 8, 256, 8192): ("us", 10, 12),
    (1, 16, 1, 512, 8192): ("us", 10, 12),
}


# The lengths that gpu-check.sh measures features at.
FEATURE_TOKENS = (8192, 131072)


def read(path: Path) -> Json | None:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None


def read_all(work: Path, pattern: str) -> list[tuple[str, Json | None]]:
    return [(path.stem, read(path)) for path in sorted(work.glob(pattern))]


def table(headings: str, rows: list[list[str]]) -> list[str]:
    names = headings.split("|")
    lines = ["| " + " | ".join(name.lstrip("<>") for name in names) + " |"]
    lines.append("|" + "|".join("---:" if name[0] == ">" else "---" for name in names) + "|")
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


# ---- Verify -------------------------------------------------------------------------------------


def merge_kernels(reports: list[tuple[str, Json | None]]) -> dict[str, Json]:
    """Each process saw one format and operation; a kernel is skipped where all of them say so."""
    merged: dict[str, Json] = {}
    counts = ("passed", "failed")
    errors = ("worst_error_of_tolerance", "relative_rms_error")
    for _, report in reports:
        for kernel in report["kernels"] if report else []:
            into = merged.setdefault(kernel["name"], dict.fromkeys((*counts, *errors), 0))
            for name in counts:
                into[name] += kernel[name]
            for name in errors:
                into[name] = max(into[name], kernel[name] or 0)
    return merged


def verify_section(work: Path) -> tuple[list[str], Json, bool]:
    reports = read_all(work, "verify-*.json")
    if not reports:
        return [], {}, True
    broken = [name for name, report in reports if report is None]
    kernels = merge_kernels(reports)
    rows, passed, failed, unreached = [], 0, 0, []
    for name, kernel in sorted(kernels.items()):
        passed += kernel["passed"]
        failed += kernel["failed"]
        if kernel["passed"] + kernel["failed"] == 0:
            unreached.append(name)
        error = kernel["worst_error_of_tolerance"]
        rms = kernel["relative_rms_error"]
        rows.append(
            [
                f"`{name}`",
                str(kernel["passed"]),
                str(kernel["failed"]),
                f"{error:.2f}" if error else "bit for bit" if kernel["passed"] else "-",
                f"{rms:.1e}" if rms else "",
            ]
        )
    failures = [text for _, report in reports if report for text in report["failures"]]
    lines = ["### Verified", ""]
    lines += table("kernel|>passed|>failed|>error / tolerance|>relative RMS error", rows)
    lines += [f"{passed} passed, {failed} failed.", ""]
    lines += [f"Never reached: {', '.join(unreached)}.", ""] if unreached else []
    lines += [f"No report from: {', '.join(broken)}.", ""] if broken else []
    lines += [f"- {text}" for text in failures[:60]] + ([""] if failures else [])
    good = failed == 0 and passed > 0 and not broken
    report = {"passed": passed, "failed": failed, "kernels": kernels, "failures": failures}
    return lines, report, good


# ---- Sanitizers ---------------------------------------------------------------------------------


def sanitizer_section(work: Path, results: Path) -> tuple[list[str], Json, bool]:
    rows, report, good = [], {}, True
    for tool in ("memcheck", "racecheck", "initcheck"):
        status_file = work / f"sanitizer-{tool}.status"
        if not status_file.exists():
            continue
        status = int(status_file.read_text())
        log = results / f"sanitizer-{tool}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        checks = read(work / f"sanitizer-{tool}.json") or {}
        verdict = summary[-1] if summary else "no summary"
        if status == OUT_OF_TIME:
            verdict += ", out of time"
        clean = status == 0 and bool(summary)
        good = good and clean
        cases = f"{checks.get('passed', 0)} passed, {checks.get('failed', 0)} failed"
        rows.append([tool, verdict, cases, "clean" if clean else f"exit code {status}"])
        report[tool] = {"status": status, "summary": verdict, "passed": checks.get("passed", 0)}
    if not rows:
        return [], {}, True
    return (
        ["### compute-sanitizer", "", *table("tool|says|checks under it|verdict", rows)],
        report,
        good,
    )


# ---- Speed --------------------------------------------------------------------------------------


def bench_results(work: Path) -> list[Json]:
    results: list[Json] = []
    for _, report in read_all(work, "bench-*.json"):
        results += report["results"] if report else []
    return [result for result in results if result["temperature"] == "cold"]


def find(results: list[Json], **wanted: Any) -> Json | None:
    for result in results:
        if all(result.get(name) == value for name, value in wanted.items()):
            return result
    return None


def cell(result: Json | None, goal: tuple[str, float] | None) -> list[str]:
    if result is None or result.get("median_us") is None:
        return ["-", "-", "-"]
    share = result.get("share_of_read", 0)
    text = [f"{result['median_us']:.1f}", f"{result['gb_per_s']:.0f}", f"{100 * share:.0f} %"]
    if goal is not None:
        kind, limit = goal
        met = share >= limit if kind == "share" else result["median_us"] <= limit
        at = 2 if kind == "share" else 0
        text[at] += (
            ""
            if met
            else " (goal {})".format(f"{100 * limit:.0f} %" if kind == "share" else f"{limit:.0f}")
        )
    return text


def attention_rows(results: list[Json], peers: list[Json]) -> list[list[str]]:
    rows = []
    for shape, (kind, four, eight) in GOALS.items():
        of_shape = {"operation": "attention", "shape": list(shape), "query_len": 1}
        bits4 = find(results, **of_shape, bits=4)
        bits8 = find(results, **of_shape, bits=8)
        peer = {
            name: find(peers, peer=name, shape=list(shape), query_len=1)
            for name in ("flash", "cudnn", "math", "flashinfer")
        }
        times = [p["median_us"] if p and p.get("median_us") else None for p in peer.values()]
        fused = [time for time in (*times[:2], times[3]) if time]
        other = min(fused) if fused else times[2]
        ratio = f"{other / bits4['median_us']:.1f}x" if other and bits4 else "-"
        shown = [f"{time:.1f}" if time else "-" for time in times[:3]]
        rows.append(
            [
                "({})".format(",".join(map(str, shape))),
                *cell(bits4, (kind, four)),
                *cell(bits8, (kind, eight)),
                *shown,
                ratio,
            ]
        )
    return rows


def other_rows(results: list[Json], peers: list[Json]) -> list[list[str]]:
    rows = []
    for result in results:
        operation = result["operation"]
        if operation == "attention" and result["query_len"] > 1:
            peer = find(peers, peer="cudnn", query_len=result["query_len"])
            beside = ""
            if peer and peer.get("median_us"):
                ratio = result["median_us"] / peer["median_us"]
                beside = f"cuDNN bf16, no mask: {peer['median_us']:.0f} us; {ratio:.2f}x its time"
            name = f"prefill of {result['query_len']}, {result['cache']}"
        elif operation == "geglu":
            name = f"GeGLU, {result['shape'][1]} elements"
            beside = f"{100 * result['share_of_copy']:.0f} % of a copy's pace"
            for peer in peers:
                if peer["peer"].startswith("geglu") and peer.get("median_us"):
                    beside += f"; {peer['peer'][6:]}: {peer['median_us']:.0f} us"
        elif operation in ("append", "quantize", "dequantize"):
            width = result.get("cache", "{}-bit".format(result.get("bits")))
            name, beside = f"{operation}, {width}", ""
        else:
            continue
        shape = ",".join(map(str, result["shape"]))
        rows.append(
            [name, f"({shape})", f"{result['median_us']:.1f}", f"{result['gb_per_s']:.0f}", beside]
        )
    return rows


def feature_rows(results: list[Json]) -> list[list[str]]:
    """A row for each feature and cache, a pair of columns for each length in FEATURE_TOKENS."""
    measured: dict[tuple[str, str], dict[int, Json]] = {}
    for result in results:
        if result["operation"] == "features":
            by_tokens = measured.setdefault((result["feature"], result["cache"]), {})
            by_tokens.setdefault(result["shape"][-1], result)  # the long window is in each run
    rows = []
    for (feature, cache), by_tokens in measured.items():
        cells, refusals = [], []
        for tokens in FEATURE_TOKENS:
            result = by_tokens.get(tokens)
            if result is None or result["ratio"] is None:
                cells += ["-", "-"]
                refusals += [result["refused"]] if result else []
                continue
            least = result["min_us"] / result["plain_min_us"]
            missed = result["goal"] is not None and result["ratio"] > result["goal"]
            ratios = f"{result['ratio']:.2f} ({least:.2f}){' missed' if missed else ''}"
            cells += [f"{result['median_us']:.1f}", ratios]
        any_result = next(iter(by_tokens.values()))
        goal = f"{any_result['goal']:.2f}" if any_result["goal"] else "-"
        rows.append([feature, any_result["beside"], cache, *cells, goal, "; ".join(refusals[:1])])
    return rows


def speed_section(work: Path) -> tuple[list[str], Json]:
    results = bench_results(work)
    torch = read(work / "torch.json") or {"results": []}
    peers = torch["results"]
    if not results and not peers:
        return [], {}
    lines = ["### Speed", ""]
    ceilings = [r for r in results if r.get("read_gb_per_s")]
    if ceilings:
        rates = sorted(r["read_gb_per_s"] for r in ceilings)
        copies = sorted(r["copy_gb_per_s"] for r in results if r.get("copy_gb_per_s"))
        lines.append(
            f"Reading in the same runs: {rates[0]:.0f} to {rates[-1]:.0f} GB/s"
            + (f", copying {copies[0]:.0f} to {copies[-1]:.0f} GB/s." if copies else ".")
        )
    if peers:
        lines.append(f"PyTorch {torch['torch']}, cuDNN {torch['cudnn']}.")
    lines += ["Cold L2, graph replay, medians; share: of the read bandwidth of the same run.", ""]
    lines += table(
        "(B,Hq,Hkv,D,N)|>4-bit us|>GB/s|>share|>8-bit us|>GB/s|>share|>flash bf16 us|>cuDNN|>math|"
        ">4-bit against the best",
        attention_rows(results, peers),
    )
    lines += table("call|shape|>us|>GB/s|beside it", other_rows(results, peers))
    features = feature_rows(results)
    if features:
        lengths = "|".join(f">us at {tokens:,}|>ratio" for tokens in FEATURE_TOKENS)
        lines += [
            "What features cost: (1,32,8,128,N), beside the plain call that reads as many bytes; "
            "the ratio of medians (of minima).",
            "",
        ]
        lines += table(f"feature|beside|cache|{lengths}|>goal|not taken because", features)
    return lines, {"results": results, "peers": torch}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    verify, verify_json, verified = verify_section(given.work)
    sanitizer, sanitizer_json, clean = sanitizer_section(given.work, given.json.parent)
    speed, speed_json = speed_section(given.work)
    device = next(
        (r["machine"]["device"] for _, r in read_all(given.work, "bench-*.json") if r),
        next((r["device"] for _, r in read_all(given.work, "verify-*.json") if r), "no GPU"),
    )
    today = datetime.now(tz=UTC).date()
    lines = ["## CUDA", "", f"`scripts/gpu-check.sh`, {today}, {device}.", ""]
    print("\n".join([*lines, *verify, *sanitizer, *speed]))
    given.json.write_text(
        json.dumps(
            {
                "device": device,
                "date": str(today),
                "verify": verify_json,
                "sanitizer": sanitizer_json,
                "speed": speed_json,
            },
            indent=1,
        )
    )
    return 0 if verified and clean else 1


if __name__ == "__main__":
    sys.exit(main())
