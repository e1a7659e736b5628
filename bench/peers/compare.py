#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures nybble's CPU attention beside its peers, in turn, on the same shapes.

Every round runs each peer and nybble once, one after the other, so that a change in the
machine's load meets both. A ratio is taken per round; the table shows the median of the
ratios and their range. Peers are built by build.sh.

Both sides wait for all their threads many times a second, so other busy processes distort
the figures far beyond their share. Each run therefore starts when the CPUs are idle, as far
as --wait allows, and is repeated when others took more than --max-others of the CPUs
meanwhile. On a machine that is never quiet, root can prefix this with: chrt --fifo 1"""

import argparse
import datetime
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

SHAPES = [
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 32768),
    (1, 16, 1, 512, 8192),
    (1, 64, 8, 128, 8192),
    (1, 16, 8, 256, 8192),
    (1, 32, 8, 128, 131072),
]

BEST_ISA = "best"
ISA_OF_VARIANT = {"avx2": "avx2", "native": BEST_ISA, "ik-avx2": "avx2", "ik-native": BEST_ISA}

PEER_TYPES = ["f16", "q8_0", "q4_0"]
NYBBLE_BITS = [4, 8, 16]
TEMPERATURES = ["cold", "warm"]

# Both sides of a ratio: nybble's bits, and the peer's type or nybble's own bits.
PEER_PAIRS = [(4, "q4_0"), (8, "q8_0"), (4, "f16"), (8, "f16"), (16, "f16")]
OWN_PAIRS = [(4, 16), (8, 16)]


class Failure(Exception):
    pass


def parse_shape(text):
    try:
        shape = tuple(int(field) for field in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 5 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f'a shape is B,Hq,Hkv,D,N, five positive integers, not "{text}"'
        )
    return shape


def shape_text(shape):
    return ",".join(str(field) for field in shape)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_peers = os.environ.get("NYBBLE_PEERS_DIR") or Path.home() / ".cache" / "nybble-peers"
    parser.add_argument(
        "--nybble",
        type=Path,
        default=REPOSITORY / "build" / "nybble",
        help="nybble's command (default: %(default)s)",
    )
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=Path(default_peers),
        help="where build.sh built the peers (default: %(default)s)",
    )
    parser.add_argument(
        "--variant",
        action="append",
        choices=list(ISA_OF_VARIANT),
        help="a peer to measure, repeatable (default: avx2 native)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        metavar="B,Hq,Hkv,D,N",
        help="repeatable (default: the six shapes of docs/performance.md)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="time of each timing and round (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--layout",
        choices=["heads-first", "tokens-first"],
        default="heads-first",
        help="the peer's cache layout (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=30,
        metavar="SECONDS",
        help="longest wait for idle CPUs before a run (default: %(default)s)",
    )
    parser.add_argument(
        "--max-others",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the CPUs that others may take during a run (default: %(default)s)",
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=3,
        help="runs to try for an undisturbed one; the least disturbed counts (default: %(default)s)",
    )
    parser.add_argument("--peers-only", action="store_true", help="leave nybble out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to FILE")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.threads < 1:
        parser.error("--threads must be at least 1")
    if arguments.attempts < 1:
        parser.error("--attempts must be at least 1")
    arguments.variant = list(dict.fromkeys(arguments.variant or ["avx2", "native"]))
    arguments.shape = list(dict.fromkeys(arguments.shape or SHAPES))
    return arguments


def peer_program(arguments, variant):
    return arguments.peers_dir / "bin" / f"ggml_attention-{variant}"


def require_programs(arguments):
    for variant in arguments.variant:
        if not os.access(peer_program(arguments, variant), os.X_OK):
            raise Failure(
                f"{peer_program(arguments, variant)} is missing; build it with: bench/peers/build.sh {variant}"
            )
    if not arguments.peers_only and not os.access(arguments.nybble, os.X_OK):
        raise Failure(
            f"{arguments.nybble} is missing; build nybble first (make), name another with --nybble, "
            "or measure the peers alone with --peers-only"
        )


def busy_cpu_seconds():
    """CPU seconds spent by anyone, the hypervisor's other guests included; None where unknown."""
    try:
        first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
        fields = [int(field) for field in first_line.split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def children_cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class CpuWatch:
    """The share of all CPUs that processes other than our children took since it was made."""

    def __init__(self):
        self.start = time.monotonic(), busy_cpu_seconds(), children_cpu_seconds()

    def others(self):
        start_time, start_busy, start_children = self.start
        busy = busy_cpu_seconds()
        if busy is None or start_busy is None:
            return None
        available = (time.monotonic() - start_time) * os.cpu_count()
        used_by_others = busy - start_busy - (children_cpu_seconds() - start_children)
        return max(0.0, used_by_others / available)


def wait_for_idle_cpus(arguments):
    deadline = time.monotonic() + arguments.wait
    while time.monotonic() < deadline:
        watch = CpuWatch()
        time.sleep(0.5)
        others = watch.others()
        if others is None or others <= arguments.max_others:
            return


def run_once(command, extra_environment):
    environment = {key: value for key, value in os.environ.items() if key != "NYBBLE_ISA"}
    environment.update(extra_environment)
    words = [str(word) for word in command]
    settings = [f"{key}={value}" for key, value in extra_environment.items()]
    shown = " ".join([*settings, shlex.join(words)])
    watch = CpuWatch()
    finished = subprocess.run(words, check=False, env=environment, capture_output=True, text=True)
    others = watch.others()
    if finished.returncode != 0:
        raise Failure(f"exit status {finished.returncode} from: {shown}\n{finished.stderr.strip()}")
    try:
        report = json.loads(finished.stdout)
    except json.JSONDecodeError as error:
        raise Failure(f"no valid JSON ({error}) from: {shown}") from error
    report["others_share_of_cpus"] = others
    return report


def run_json(arguments, command, extra_environment):
    """The report of the least disturbed of a few runs; an undisturbed one ends the tries."""
    best = None
    for _ in range(arguments.attempts):
        wait_for_idle_cpus(arguments)
        report = run_once(command, extra_environment)
        others = report["others_share_of_cpus"]
        if others is None or others <= arguments.max_others:
            return report
        if best is None or others < best["others_share_of_cpus"]:
            best = report
    return best


def run_peer(arguments, variant, shape, check):
    command = [
        peer_program(arguments, variant),
        "--shape",
        shape_text(shape),
        "--threads",
        arguments.threads,
    ]
    command += ["--layout", arguments.layout, "--seconds", arguments.seconds, "--json"]
    return run_json(arguments, command if check else [*command, "--no-check"], {})


def run_nybble(arguments, isa, shape):
    command = [arguments.nybble, "bench", "attention", "--shape", shape_text(shape)]
    for bits in NYBBLE_BITS:
        command += ["--bits", bits]
    command += ["--threads", arguments.threads, "--seconds", arguments.seconds, "--json"]
    return run_json(arguments, command, {} if isa == BEST_ISA else {"NYBBLE_ISA": isa})


def medians(report, shape, key, wanted):
    """{(wanted value, temperature): result} of one program's report for one shape."""
    found = {}
    for result in report.get("results", []):
        if tuple(result.get("shape", ())) == shape and result.get(key) in wanted:
            found[result[key], result.get("temperature")] = result
    for value in wanted:
        for temperature in TEMPERATURES:
            if not found.get((value, temperature), {}).get("median_us", 0) > 0:
                raise Failure(
                    f"no {temperature} median_us for shape {shape_text(shape)}, {key} {value} in a report"
                )
    return found


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def measure(arguments):
    """One entry per (round, shape): what each program reported, in the order they ran."""
    isas = list(dict.fromkeys(ISA_OF_VARIANT[variant] for variant in arguments.variant))
    rounds = []
    for shape in arguments.shape:
        for number in range(arguments.rounds):
            entry = {"shape": list(shape), "round": number, "peers": {}, "nybble": {}}
            for isa in isas:
                for variant in (v for v in arguments.variant if ISA_OF_VARIANT[v] == isa):
                    progress(
                        f"{shape_text(shape)}, round {number + 1} of {arguments.rounds}: {variant}"
                    )
                    entry["peers"][variant] = run_peer(arguments, variant, shape, check=number == 0)
                    medians(entry["peers"][variant], shape, "type", PEER_TYPES)
                if not arguments.peers_only:
                    progress(
                        f"{shape_text(shape)}, round {number + 1} of {arguments.rounds}: nybble ({isa})"
                    )
                    entry["nybble"][isa] = run_nybble(arguments, isa, shape)
                    medians(entry["nybble"][isa], shape, "bits", NYBBLE_BITS)
            rounds.append(entry)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return rounds


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(arguments, rounds):
    """One record per (variant, temperature, shape): times in microseconds, and ratios."""
    records = []
    for variant in arguments.variant:
        isa = ISA_OF_VARIANT[variant]
        for temperature in TEMPERATURES:
            for shape in arguments.shape:
                samples, ratios = {}, {}
                for entry in (e for e in rounds if tuple(e["shape"]) == shape):
                    peer = medians(entry["peers"][variant], shape, "type", PEER_TYPES)
                    times = {name: peer[name, temperature]["median_us"] for name in PEER_TYPES}
                    if not arguments.peers_only:
                        own = medians(entry["nybble"][isa], shape, "bits", NYBBLE_BITS)
                        times.update(
                            {bits: own[bits, temperature]["median_us"] for bits in NYBBLE_BITS}
                        )
                        for bits, other in PEER_PAIRS + OWN_PAIRS:
                            name = f"{bits}-bit / {other if other in PEER_TYPES else f'own {other}-bit'}"
                            ratios.setdefault(name, []).append(times[other] / times[bits])
                    for name, value in times.items():
                        samples.setdefault(
                            name if name in PEER_TYPES else f"{name}-bit", []
                        ).append(value)
                records.append(
                    {
                        "variant": variant,
                        "nybble_isa": isa,
                        "temperature": temperature,
                        "shape": list(shape),
                        "median_us": {name: spread(values) for name, values in samples.items()},
                        "times_faster": {name: spread(values) for name, values in ratios.items()},
                    }
                )
    return records


def milliseconds(microseconds):
    return f"{microseconds / 1000:.3g}" if microseconds < 1e6 else f"{microseconds / 1000:.0f}"


def markdown_table(header, rows):
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|",
    ]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cpu_model():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def real_time_scheduling():
    if not hasattr(os, "sched_getscheduler"):
        return False
    return os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)


def describe_peer(rounds, variant):
    report = rounds[0]["peers"][variant]
    return f"{report['peer']} ({report['package']}, {report['variant']}, {report['layout']}, mask {report['mask']})"


def read_bandwidth(rounds):
    values = [
        peer["read_bandwidth"]["median_gb_per_s"]
        for entry in rounds
        for peer in entry["peers"].values()
        if "read_bandwidth" in peer
    ]
    return spread(values) if values else None


def others_shares(rounds):
    reports = [
        report
        for entry in rounds
        for side in ("peers", "nybble")
        for report in entry[side].values()
    ]
    shares = [report["others_share_of_cpus"] for report in reports]
    return [share for share in shares if share is not None]


def markdown(arguments, rounds, records, about):
    parts = [
        f"Measured {about['date']} on {about['cpu']}, {about['cpus']} CPUs, {arguments.threads} threads, {arguments.rounds} rounds."
    ]
    bandwidth = about["read_bandwidth_gb_per_s"]
    if bandwidth:
        parts.append(
            f"Reading 512 MiB: {bandwidth['median']:.1f} GB/s ({bandwidth['min']:.1f} to {bandwidth['max']:.1f})."
        )
    shares = others_shares(rounds)
    if shares:
        disturbed = sum(share > arguments.max_others for share in shares)
        parts.append(
            f"Other processes took {statistics.median(shares):.0%} of the CPUs in the median run and "
            f"{max(shares):.0%} at most; more than {arguments.max_others:.0%} in {disturbed} of {len(shares)} runs."
        )
    if about["real_time_scheduling"]:
        parts.append("Run with real-time scheduling.")
    text = [" ".join(parts), f"Command: `{about['command']}`"]
    for variant in arguments.variant:
        for temperature in TEMPERATURES:
            selected = [
                r for r in records if r["variant"] == variant and r["temperature"] == temperature
            ]
            names, pairs = list(selected[0]["median_us"]), list(selected[0]["times_faster"])
            against = "" if arguments.peers_only else f", nybble's ISA: {ISA_OF_VARIANT[variant]}"
            text.append(
                f"**{describe_peer(rounds, variant)}, {temperature}{against}.** Median over the rounds in ms; range of the rounds."
            )
            rows = []
            for record in selected:
                cells = [f"({shape_text(record['shape'])})"]
                for name in names:
                    time = record["median_us"][name]
                    cells.append(
                        f"{milliseconds(time['median'])} ({milliseconds(time['min'])}-{milliseconds(time['max'])})"
                    )
                rows.append(cells)
            text.append(markdown_table(["(B,Hq,Hkv,D,N)", *names], rows))
            if pairs:
                rows = []
                for record in selected:
                    cells = [f"({shape_text(record['shape'])})"]
                    for pair in pairs:
                        ratio = record["times_faster"][pair]
                        cells.append(
                            f"{ratio['median']:.1f}x ({ratio['min']:.1f}-{ratio['max']:.1f})"
                        )
                    rows.append(cells)
                text.append(
                    "Times faster (nybble's bits / the other side; median of the rounds' ratios and their range):"
                )
                text.append(markdown_table(["(B,Hq,Hkv,D,N)", *pairs], rows))
    return "\n\n".join(text)


def main():
    arguments = parse_arguments()
    try:
        require_programs(arguments)
        rounds = measure(arguments)
        records = summarize(arguments, rounds)
    except Failure as failure:
        print(f"compare.py: error: {failure}", file=sys.stderr)
        return 1
    about = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "command": shlex.join(["bench/peers/compare.py", *sys.argv[1:]]),
        "threads": arguments.threads,
        "real_time_scheduling": real_time_scheduling(),
        "read_bandwidth_gb_per_s": read_bandwidth(rounds),
    }
    print(markdown(arguments, rounds, records, about))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**about, "summary": records, "rounds": rounds}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
