# SPDX-License-Identifier: Apache-2.0
"""The command `nybble` as a person meets it: exit codes, help, JSON, sentences for bad input.

NYBBLE_COMMAND names the program; build/nybble where that is not set.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(os.environ.get("NYBBLE_COMMAND", ROOT / "build" / "nybble"))
TRACE = ROOT / "examples" / "smollm2-135m.safetensors"
SHAPES = ROOT / "bench" / "shapes"
SUBCOMMANDS = ("info", "verify", "replay", "bench", "quantize", "cache")
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I64": 8}

if not COMMAND.exists():
    pytest.skip(f"{COMMAND} is not built", allow_module_level=True)


def nybble(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NYBBLE_")}
    return subprocess.run(
        [str(COMMAND), *map(str, arguments)],
        check=False,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def good(*arguments: Any, **environment: str) -> str:
    """Runs what must succeed: exit code 0, nothing on stderr, no terminal codes in a pipe."""
    run = nybble(*arguments, **environment)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "\x1b" not in run.stdout and "\r" not in run.stdout
    return run.stdout


def good_json(*arguments: Any, **environment: str) -> Any:
    return json.loads(good(*arguments, "--json", **environment))


# ---- safetensors without help from others -------------------------------------------------------


def write_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: Any) -> Path:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def read_file(path: Path) -> tuple[dict[str, tuple[str, list[int], bytes]], Any]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", None)
    data = content[8 + length :]
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors, metadata


def floats(*shape: int, start: float = -1.0) -> tuple[str, list[int], bytes]:
    """An F32 tensor of different, finite numbers."""
    count = math.prod(shape)
    numbers = [start + math.sin(7 * i) + i / (count + 1) for i in range(count)]
    return "F32", list(shape), struct.pack(f"<{count}f", *numbers)


# ---- The command line ---------------------------------------------------------------------------


def test_help_names_every_subcommand() -> None:
    text = good("--help")
    for name in SUBCOMMANDS:
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_subcommands(name: str) -> None:
    text = good(name, "--help")
    assert text.startswith(f"Usage: nybble {name} ") or name == "verify"
    assert "--json" in text


def test_version() -> None:
    header = (ROOT / "include" / "nybble.h").read_text()
    numbers = [
        re.search(rf"NYB_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")
    ]
    assert good("--version") == f"nybble {'.'.join(numbers)}\n"


USAGE_FAULTS = [
    ([], "subcommand is missing"),
    (["frobnicate"], '"frobnicate" is no subcommand'),
    (["--frobnicate"], "unrecognized option"),
    (["info", "more"], "too much"),
    (["info", "--frobnicate"], "unrecognized option"),
    (["replay"], "FILE must be given"),
    (["replay", "a", "b"], "too much"),
    (["replay", "a", "--bits", "7"], '"7"; a width is'),
    (["replay", "a", "--bits", "4,"], "empty"),
    (["replay", "a", "--bits", "4:"], "a width is"),
    (["replay", "a", "--k-bits", "8"], "go together"),
    (["replay", "a", "--bits", "4", "--k-bits", "8", "--v-bits", "4"], "either --bits or"),
    (["replay", "a", "--group-size", "48"], "32, 64 or 128"),
    (["replay", "a", "--path", "quick"], "auto, fused or compat"),
    (["replay", "a", "--rounding", "up"], "exact or mlx"),
    (["replay", "a", "--threads", "-1"], "whole number from 0"),
    (["replay", "a", "--threads", "2x"], "whole number from 0"),
    (["replay", "a", "--steps", "0"], "whole number from 1"),
    (["replay", "a", "--output-dtype", "f8"], "bf16, f16 or f32"),
    (["bench"], "operation must be given"),
    (["bench", "softmax"], '"softmax" is no operation'),
    (["bench", "geglu", "attention"], "one operation at a time"),
    (["bench", "features", "--query-len", "2"], "--query-len does not go with features"),
    (["bench", "attention", "--shape", "1,32,8,128"], "B,Hq,Hkv,D,N"),
    (["bench", "attention", "--shape", "1,32,8,128,0"], "B,Hq,Hkv,D,N"),
    (["bench", "attention", "--shape", "1,32,8,128,9,9"], "B,Hq,Hkv,D,N"),
    (["bench", "attention", "--shape", "1,32,8,128,99999999999999999999"], "B,Hq,Hkv,D,N"),
    (["bench", "attention", "--shape", "1,33,2,128,64"], "Hkv does not divide Hq"),
    (["bench", "attention", "--shape", "1,1,1,64,4294967296"], "N is more"),
    (["bench", "attention", "--elements", "5"], "--elements does not go with attention"),
    (["bench", "attention", "--isa", "sse"], "avx512 or neon"),
    (["bench", "attention", "--seconds", "0"], "greater than 0"),
    (["bench", "attention", "--seconds", "nan"], "greater than 0"),
    (["bench", "attention", "--repeats", "0"], "whole number from 1"),
    (["bench", "geglu", "--bits", "4"], "--bits does not go with geglu"),
    (["bench", "overhead", "--shape", "1,2"], "--shape does not go with overhead"),
    (["bench", "quantize", "--bits", "16"], "one width of 2"),
    (["bench", "quantize", "--query-len", "2"], "--query-len does not go with quantize"),
    (["bench", "attention", "--shape", "1,2,1,64,9", "--lengths", "10"], "--lengths has 10"),
    (
        ["bench", "attention", "--shape", "1,2,1,64,9", "--lengths", "1,2"],
        "--lengths has more items",
    ),
    (["quantize", "a"], "both IN and OUT"),
    (["quantize", "a", "b"], "either --tensor NAME"),
    (["quantize", "a", "b", "--all", "--tensor", "c"], "either --tensor NAME"),
    (["quantize", "a", "b", "c", "--all"], "too much"),
    (["quantize", "a", "b", "--all", "--bits", "16"], "5, 6 or 8 bits"),
    (["quantize", "a", "b", "--all", "--rule", "mlx"], "mlx_cpu or mlx_gpu"),
]


@pytest.mark.parametrize("arguments, sentence", USAGE_FAULTS)
def test_bad_usage(arguments: list[str], sentence: str) -> None:
    run = nybble(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    assert sentence in run.stderr.replace("\n", " ")


def test_unknown_subcommand_lists_the_known() -> None:
    assert all(f"  {name} " in nybble("frobnicate").stderr for name in SUBCOMMANDS)


FAILURES = [
    (["replay", "/nonexistent"], "/nonexistent"),
    (["replay", str(ROOT)], str(ROOT)),
    (["replay", str(TRACE), "--group-size", "128"], "128"),
    (["bench", "attention", "--shape", "1024,8,8,128,1000000"], "of memory"),
    (["bench", "attention", "--shapes", "/nonexistent"], "/nonexistent"),
    (["bench", "attention", "--shapes", "/"], "/: Is a directory"),
    (["bench", "attention", "--shapes", "/dev/null"], "/dev/null: no shape stands in it"),
    (["quantize", "/nonexistent", "/tmp/none", "--all"], "/nonexistent"),
]


LATE_MISUSES = [
    (["replay", str(TRACE), "--steps", "129"], "128 tokens behind the prompt"),
    (["replay", str(TRACE), "--prompt-tokens", "1088"], "at least one step"),
    (["bench", "attention", "--shape", "1,8,8,96,64", "--bits", "4"], "96"),
    (["bench", "quantize", "--shape", "8,96", "--bits", "4"], "96"),
    (["bench", "features", "--shape", "1,8,8,64,100"], "N is 100"),
    (["bench", "geglu", "--shape", "4000000000000,4000000000000"], "too large"),
]


@pytest.mark.parametrize("arguments, sentence", LATE_MISUSES)
def test_misuse_found_late(arguments: list[str], sentence: str) -> None:
    """What only the trace, or the library, can say of the arguments."""
    run = nybble(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    assert sentence in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments, sentence", FAILURES)
def test_failed_operation(arguments: list[str], sentence: str) -> None:
    run = nybble(*arguments)
    assert run.returncode == 1
    assert run.stdout == ""
    assert sentence in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
def test_output_that_cannot_be_written_is_a_failure() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [str(COMMAND), "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert run.returncode == 1
    assert "could not be written" in run.stderr


def test_progress_only_on_a_terminal() -> None:
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
    ours, theirs = pty.openpty()
    arguments = [str(COMMAND), "replay", str(TRACE), "--steps", "2", "--bits", "4"]
    run = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=theirs, timeout=600, check=False)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert run.returncode == 0 and b"\x1b" not in run.stdout
    assert "in double precision" in shown
    assert shown.endswith("\r\x1b[K")  # the line is taken away at the end


# ---- info ---------------------------------------------------------------------------------------


def test_info_json() -> None:
    report = good_json("info")
    names = [kernel["name"] for kernel in report["kernels"]]
    assert len(names) == len(set(names)) > 0
    for kernel in report["kernels"]:
        assert kernel["name"] == f"{kernel['operation']}_{kernel['format']}_{kernel['isa']}"
        assert kernel["runs_here"] == (kernel["reason"] == "")
        assert kernel["runs_here"] or kernel["isa"] != "scalar"
    assert report["threads"] >= 1
    assert set(report["environment"]) == {
        "NYBBLE_ISA",
        "NYBBLE_THREADS",
        "NYBBLE_PATH",
        "NYBBLE_GEGLU",
        "NYBBLE_LIBCUDA",
        "NYBBLE_NVRTC",
        "NYBBLE_CACHE_DIR",
    }


def test_info_text_shows_every_kernel() -> None:
    text = good("info")
    for kernel in good_json("info")["kernels"]:
        state = "yes" if kernel["runs_here"] else f"no: {kernel['isa']} {kernel['reason']}"
        if kernel["isa"] == "cuda" and not kernel["runs_here"]:
            state = "no: see cuda above"
        assert re.search(rf"^{kernel['name']} .* {re.escape(state)}$", text, re.MULTILINE)


def test_levers() -> None:
    report = good_json("info", NYBBLE_ISA="scalar", NYBBLE_THREADS="3")
    assert (report["isa"], report["threads"]) == ("scalar", 3)
    assert report["environment"]["NYBBLE_ISA"] == "scalar"


@pytest.mark.parametrize("lever", ["NYBBLE_ISA", "NYBBLE_THREADS", "NYBBLE_PATH", "NYBBLE_GEGLU"])
def test_lever_that_means_nothing(lever: str) -> None:
    run = nybble("info", **{lever: "bogus"})
    assert run.returncode == 1
    assert lever in run.stderr and "bogus" in run.stderr
    assert re.search(rf"^{lever} +bogus$", run.stdout, re.MULTILINE)  # info still informs


# ---- replay -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison() -> Any:
    return good_json("replay", TRACE, "--steps", "8")


def test_replay_compares_five_caches(comparison: Any) -> None:
    results = comparison["results"]
    assert [r["cache"] for r in results] == ["16-bit", "8-bit", "K8V4", "4-bit", "2-bit"]
    assert [layer["layer"] for layer in comparison["trace"]["layers"]] == [0, 15, 29]
    errors = [r["relative_l2"] for r in results]
    assert errors == sorted(errors)
    # bf16 outputs: half a unit in the last place is at most 2^-9 of each number.
    assert 0 < errors[0] < 2**-9 and 0 < errors[1] < 0.1
    for r in results:
        # Per layer: 3 KV heads of 64, and for each a scale and a bias of 2 bytes where quantized.
        sides = [
            3 * (64 * bits // 8 + (4 if bits < 16 else 0)) for bits in (r["k_bits"], r["v_bits"])
        ]
        assert r["bytes_per_token"] == 3 * sum(sides)
        assert r["bytes_per_token_16bit"] == 3 * 3 * 64 * 2 * 2
        assert r["path"] == "fused" and r["agreement"]["with"] == "compat"
        assert r["agreement"]["outputs"] == 8 * 9 * 64 * 3
        assert r["agreement"]["bit_equal"] > 0.9 * r["agreement"]["outputs"]
        assert r["agreement"]["max_row_ulps"] <= 2
        assert r["median_us"] > 0 and r["gb_per_s"] > 0 and len(r["layers"]) == 3
        assert sum(layer["bytes_per_token"] for layer in r["layers"]) == r["bytes_per_token"]


def test_replay_does_not_depend_on_threads(comparison: Any) -> None:
    alone = good_json("replay", TRACE, "--steps", "8", "--threads", "1")
    for a, b in zip(alone["results"], comparison["results"], strict=True):
        for name in ("relative_l2", "max_abs_error", "one_minus_min_cosine"):
            assert a[name] == b[name]


def test_replay_compares_the_paths_in_some_steps() -> None:
    arguments = ("replay", TRACE, "--steps", "7", "--bits", "4", "--compared-steps", "3")
    report = good_json(*arguments)
    assert report["compared_steps"] == 3
    assert report["results"][0]["agreement"]["outputs"] == 3 * 9 * 64 * 3
    # In f32 the two orders of summing show: the paths really are two.
    report = good_json(*arguments, "--output-dtype", "f32")
    agreement = report["results"][0]["agreement"]
    assert agreement["bit_equal"] < agreement["outputs"]
    assert 0 < agreement["max_abs"] < 1e-2


def test_replay_of_one_cache() -> None:
    by_parts = good_json("replay", TRACE, "--steps", "2", "--k-bits", "8", "--v-bits", "4")
    by_pair = good_json("replay", TRACE, "--steps", "2", "--bits", "8:4")
    assert [r["cache"] for r in by_parts["results"]] == ["K8V4"]
    assert by_parts["results"][0]["relative_l2"] == by_pair["results"][0]["relative_l2"]
    text = good("replay", TRACE, "--steps", "2", "--bits", "4")
    assert re.search(r"^4-bit +29 ", text, re.MULTILINE)
    assert re.search(r"^4-bit +all ", text, re.MULTILINE)


@pytest.mark.parametrize("path", ["fused", "compat"])
def test_replay_path(path: str) -> None:
    arguments = ("replay", TRACE, "--steps", "2", "--bits", "4")
    for report in (
        good_json(*arguments, "--path", path),
        good_json(*arguments, NYBBLE_PATH=path),
    ):
        assert report["results"][0]["path"] == path


def test_replay_from_an_empty_cache() -> None:
    report = good_json("replay", TRACE, "--prompt-tokens", "0", "--steps", "3", "--bits", "16")
    # The first step attends over one token: its value, exactly, was it not for the sum of others.
    assert report["prompt_tokens"] == 0
    assert report["results"][0]["relative_l2"] < 2**-9


@pytest.mark.parametrize("bits", [4, 8])
def test_replay_error_against_numpy(bits: int) -> None:
    """The whole computation anew: quantize by the rule, attend in double precision, compare."""
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    tensors, metadata = read_file(TRACE)
    scale, first, steps, group = float(metadata["scale"]), 960, 4, 64

    def load(name: str) -> Any:
        _, shape, data = tensors[name]
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)

    def to_bf16(x: Any) -> Any:
        raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((raw + 0x7FFF + ((raw >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    def quantized(x: Any) -> Any:
        groups = x.reshape(*x.shape[:-1], -1, group)
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        top = np.float32(2**bits - 1)
        negative = abs(low) > abs(high)
        step = np.maximum((high - low) / top, np.float32(1e-7))
        step = np.where(negative, step, -step)
        edge = np.where(negative, low, high)
        zero = np.rint(edge / step)
        bias = np.where(zero == 0, np.float32(0), edge)
        step = np.where(zero == 0, step, edge / np.where(zero == 0, np.float32(1), zero))
        codes = np.clip(np.rint((groups - bias) / step), 0, top)
        # The attention takes scale * code + bias unrounded: EXACT.
        values = to_bf16(step).astype(np.float64) * codes + to_bf16(bias)
        return values.reshape(x.shape)

    def attend(query: Any, key: Any, value: Any) -> Any:
        rows = []
        for token in range(first, first + steps):
            for head in range(9):
                scores = key[head // 3, : token + 1] @ query[head, token] * scale
                weights = np.exp(scores - scores.max())
                rows.append(weights @ value[head // 3, : token + 1] / weights.sum())
        return np.array(rows)

    report = good_json("replay", TRACE, "--bits", bits, "--steps", steps, "--output-dtype", "f32")
    for index, layer in enumerate((0, 15, 29)):
        query, key, value = (load(f"layers.{layer}.{part}") for part in ("query", "key", "value"))
        query = query.astype(np.float64)
        right = attend(query, key.astype(np.float64), value.astype(np.float64))
        error = attend(query, quantized(key), quantized(value)) - right
        expected = np.linalg.norm(error) / np.linalg.norm(right)
        measured = report["results"][0]["layers"][index]
        # What the fused path adds (some 1e-4 of the output) is small beside 0.5 % and more.
        assert measured["relative_l2"] == pytest.approx(expected, rel=0.02)
        assert measured["max_abs_error"] == pytest.approx(abs(error).max(), rel=0.05)


def trace_parts(
    heads: int = 2, kv_heads: int = 1, tokens: int = 6, dim: int = 64
) -> dict[str, Any]:
    return {
        "layers.3.query": floats(heads, tokens, dim),
        "layers.3.key": floats(kv_heads, tokens, dim, start=0.0),
        "layers.3.value": floats(kv_heads, tokens, dim, start=0.5),
    }


def trace_metadata(**changes: str | None) -> dict[str, str]:
    metadata: dict[str, str | None] = {
        "format": "nybble-trace",
        "version": "1",
        "model": "m",
        "prompt_tokens": "4",
        "scale": "0.125",
        "text": "t",
        "recorded_by": "r",
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def test_small_trace(tmp_path: Path) -> None:
    path = write_file(tmp_path / "t", trace_parts(), trace_metadata())
    report = good_json("replay", path)
    assert (report["prompt_tokens"], report["steps"]) == (4, 2)
    assert report["trace"]["dtype"] == "f32"


@pytest.mark.parametrize(("dim", "group_size", "caches"), [(64, 64, 5), (96, 32, 5), (80, 64, 1)])
def test_replay_chooses_the_group_size(
    tmp_path: Path, dim: int, group_size: int, caches: int
) -> None:
    path = write_file(tmp_path / "t", trace_parts(dim=dim), trace_metadata())
    results = good_json("replay", path)["results"]
    assert results[-1]["group_size"] == group_size and len(results) == caches
    assert ("only the 16-bit cache" in good("replay", path)) == (caches == 1)
    asked = nybble("replay", path, "--bits", "4")
    assert asked.returncode == (1 if caches == 1 else 0)


def test_replay_takes_window_and_softcap(tmp_path: Path) -> None:
    plain = write_file(tmp_path / "plain", trace_parts(), trace_metadata())
    metadata = trace_metadata(**{"layers.3.window": "3", "layers.3.softcap": "0.5"})
    path = write_file(tmp_path / "t", trace_parts(), metadata)
    assert "layer 3: a window of 3 tokens, softcap 0.5" in good("replay", path)
    arguments = ("--bits", "16", "--output-dtype", "f32")
    report = good_json("replay", path, *arguments)
    layer = report["trace"]["layers"][0]
    assert (layer["window_tokens"], layer["softcap"]) == (3, 0.5)
    # The library and the reference agree; without the two fields either would be off by far more.
    without_them = good_json("replay", plain, *arguments)
    for one in (report, without_them):
        assert one["results"][0]["relative_l2"] < 4e-3  # bf16 keys and values
        assert one["results"][0]["agreement"]["max_abs"] < 1e-4
    assert report["results"][0]["relative_l2"] != without_them["results"][0]["relative_l2"]


@pytest.mark.parametrize("value", ["", "x", "0", "-1", "nan"])
@pytest.mark.parametrize("name", ["window", "softcap"])
def test_bad_window_or_softcap(tmp_path: Path, name: str, value: str) -> None:
    metadata = trace_metadata(**{f"layers.3.{name}": value})
    refused = nybble("replay", write_file(tmp_path / "t", trace_parts(), metadata))
    assert refused.returncode == 1 and f'layers.3.{name} is "{value}"' in refused.stderr


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in trace_parts().items() if key != name}


def not_finite() -> dict[str, Any]:
    dtype, shape, data = floats(1, 6, 64)
    position = 4 * (2 * 64 + 7)
    data = data[:position] + struct.pack("<f", math.nan) + data[position + 4 :]
    return {**trace_parts(), "layers.3.value": (dtype, shape, data)}


TRACE_FAULTS = [
    (trace_parts(), None, "format is missing"),
    (trace_parts(), trace_metadata(format="pt"), '"pt"'),
    (trace_parts(), trace_metadata(version="2"), "version is 2"),
    (trace_parts(), trace_metadata(model=None), "lacks model"),
    (trace_parts(), trace_metadata(prompt_tokens="0"), "from 1 to 6"),
    (trace_parts(), trace_metadata(prompt_tokens="7"), "from 1 to 6"),
    (trace_parts(), trace_metadata(prompt_tokens="+4"), "from 1 to 6"),
    (trace_parts(), trace_metadata(prompt_tokens="04"), "from 1 to 6"),
    (trace_parts(), trace_metadata(scale="0"), "greater than 0"),
    (trace_parts(), trace_metadata(scale="inf"), "greater than 0"),
    (trace_parts(), trace_metadata(scale="0x1p-3"), "greater than 0"),
    (trace_parts(), trace_metadata(scale=""), "greater than 0"),
    ({"other": floats(2, 2)}, trace_metadata(), "has no layer"),
    ({**trace_parts(), "layers.3.bias": floats(1, 6, 64)}, trace_metadata(), "layers.3.bias"),
    ({**trace_parts(), "layers.04.key": floats(1, 6, 64)}, trace_metadata(), "layers.04.key"),
    (without("layers.3.value"), trace_metadata(), "layers.3.value is missing"),
    (
        {**trace_parts(), "layers.3.key": ("I64", [1, 6, 64], bytes(6 * 64 * 8))},
        trace_metadata(),
        "is I64",
    ),
    (
        {**trace_parts(), "layers.3.key": ("BF16", [1, 6, 64], bytes(6 * 64 * 2))},
        trace_metadata(),
        "one dtype",
    ),
    ({**trace_parts(), "layers.3.key": floats(6, 64)}, trace_metadata(), "2 axes"),
    ({**trace_parts(), "layers.3.key": ("F32", [1, 0, 64], b"")}, trace_metadata(), "0 bytes"),
    ({**trace_parts(), "layers.3.key": floats(1, 5, 64)}, trace_metadata(), "must agree"),
    ({**trace_parts(), "layers.3.key": floats(2, 6, 64)}, trace_metadata(), "heads"),
    (trace_parts(heads=3, kv_heads=2), trace_metadata(), "divide the query heads"),
    ({**trace_parts(), "layers.3.key": floats(1, 6, 32)}, trace_metadata(), "keys of 32"),
    (not_finite(), trace_metadata(), "layers.3.value[0, 2, 7] is not finite"),
]


@pytest.mark.parametrize("tensors, metadata, sentence", TRACE_FAULTS)
def test_bad_trace(tmp_path: Path, tensors: Any, metadata: Any, sentence: str) -> None:
    run = nybble("replay", write_file(tmp_path / "bad", tensors, metadata))
    assert run.returncode == 1
    assert run.stdout == ""
    assert sentence in run.stderr
    assert str(tmp_path / "bad") in run.stderr


def test_truncated_trace(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(TRACE.read_bytes()[:100_000])
    run = nybble("replay", path)
    assert run.returncode == 1 and str(path) in run.stderr


# ---- bench --------------------------------------------------------------------------------------

QUICK = ("--repeats", "5", "--seconds", "0.01")


def check_times(result: dict[str, Any]) -> None:
    assert result["repeats"] == 5
    assert 0 < result["min_us"] <= result["p10_us"] <= result["median_us"] <= result["p90_us"]
    rate = result["bytes"] * 1e-3 / result["median_us"]
    assert result["gb_per_s"] == pytest.approx(rate, rel=1e-3)


def test_bench_attention() -> None:
    report = good_json(
        *(
            "bench",
            "attention",
            "--shape",
            "2,6,3,64,100",
            "--bits",
            "4",
            "--bits",
            "16,8:4",
            *QUICK,
        )
    )
    assert report["read_gb_per_s"] > 0
    expected = [(bits, temperature) for bits in (4, 16, None) for temperature in ("cold", "warm")]
    assert [(r["bits"], r["temperature"]) for r in report["results"]] == expected
    row_bytes = {4: 64 // 2 + 4, 8: 64 + 4, 16: 128}
    for result in report["results"]:
        check_times(result)
        assert result["operation"] == "attention" and result["shape"] == [2, 6, 3, 64, 100]
        sides = row_bytes[result["k_bits"]] + row_bytes[result["v_bits"]]
        assert result["bytes"] == 2 * 3 * 100 * sides
        assert result["path"] == "fused" and result["isa"] and result["threads"] >= 1
        share = result["gb_per_s"] / report["read_gb_per_s"]
        assert result["share_of_read"] == pytest.approx(share, rel=1e-3)


def test_bench_lists_of_isas_and_threads() -> None:
    report = good_json(
        *("bench", "attention", "--shape", "1,2,1,64,64", "--bits", "4", "--isa", "scalar,auto"),
        *("--threads", "1,2", "--path", "compat", "--query-len", "3", *QUICK),
    )
    best = good_json("info")["isa"]
    seen = [(r["isa"], r["threads"]) for r in report["results"] if r["temperature"] == "warm"]
    assert seen == [("scalar", 1), ("scalar", 2), (best, 1), (best, 2)]
    assert {(r["path"], r["query_len"], r["mask"]) for r in report["results"]} == {
        ("compat", 3, "causal")
    }


def test_bench_geglu_and_quantize() -> None:
    geglu = good_json("bench", "geglu", "--elements", "1000", "--shape", "3,50", *QUICK)
    assert [r["shape"] for r in geglu["results"]] == [[3, 50], [3, 50], [1, 1000], [1, 1000]]
    assert [r["bytes"] for r in geglu["results"]] == [900, 900, 6000, 6000]
    quantize = good_json("bench", "quantize", "--shape", "10,128", "--bits", "3", *QUICK)
    assert {r["operation"] for r in quantize["results"]} == {"quantize", "dequantize"}
    for result in geglu["results"] + quantize["results"]:
        check_times(result)
        assert result["share_of_copy"] > 0
    for result in quantize["results"]:
        assert result["bytes"] == 10 * (256 + 128 * 3 // 8 + 2 * 2 * 2)


def check_features(report: dict[str, Any]) -> None:
    names = [r["feature"] for r in report["results"]]
    assert len(names) == len(set(names)) == 18
    assert names[-1] == "window of 1,024 over 131,072"
    for result in report["results"]:
        assert "refused" not in result, result["refused"]
        assert result["shape"][:4] == [2, 4, 2, 64] and result["cache"] == "4-bit"
        assert 0 < result["plain_min_us"] <= result["plain_median_us"]
        assert 0 < result["min_us"] <= result["median_us"] and result["ratio"] > 0
    assert {r["goal"] for r in report["results"]} == {1.1, 1.08, 1.3, None}


def test_bench_features() -> None:
    check_features(
        good_json("bench", "features", "--shape", "2,4,2,64,512", "--repeats", "2", *QUICK)
    )


FAKES = COMMAND.parent / "fake_cuda"
WITHOUT_GPU = {
    "NYBBLE_LIBCUDA": str(FAKES / "libfake_cuda.so"),
    "NYBBLE_NVRTC": str(FAKES / "libfake_nvrtc.so"),
    "NYBBLE_CACHE_DIR": "",
}
needs_fakes = pytest.mark.skipif(not FAKES.exists(), reason=f"{FAKES} is not built")


@needs_fakes
def test_bench_features_on_cuda() -> None:
    arguments = ("bench", "features", "--backend", "cuda", "--shape", "2,4,2,64,512", *QUICK)
    # The fake driver's kernels write nothing, which is found out where outputs can be poisoned.
    run = nybble(*arguments, **WITHOUT_GPU)
    assert run.returncode == 1 and "numbers that are not finite, or none" in run.stderr
    report = good_json(*arguments, **WITHOUT_GPU, FAKE_CUDA_WITHOUT_FILLS="1")
    check_features(report)
    assert report["backend"] == "cuda" and report["machine"]["device"]
    for result in report["results"]:
        assert (result["isa"], result["temperature"], result["threads"]) == ("cuda", "cold", 1)
        # The fake driver says that all takes a millisecond, and both graphs are of as many calls.
        assert result["ratio"] == 1
        assert result["key_kernel"] and result["plain_key_kernel"]


def test_bench_overhead() -> None:
    report = good_json("bench", "overhead", "--bits", "4", "--threads", "1", *QUICK)
    assert [r["operation"] for r in report["results"]] == ["attention", "append", "geglu"]
    assert all(r["median_ns"] > 0 for r in report["results"])


def test_bench_cache_file(tmp_path: Path) -> None:
    shape = ("--shape", "3,2,64,300")
    report = good_json(
        *("bench", "cache-file", *shape, "--bits", "4,8:4", "--threads", "1", *QUICK),
        TMPDIR=str(tmp_path),
    )
    results = report["results"]
    assert [(r["v_bits"], r["memory"]) for r in results] == [
        (4, "held"), (4, "fresh"), (4, "held"), (4, "fresh")
    ]  # fmt: skip
    rows = 3 * 2 * 300
    for result, row_bytes in zip(results, (72, 72, 36 + 68, 36 + 68), strict=True):
        header_bytes = result["bytes"] - rows * row_bytes
        assert 0 < header_bytes < 8192
        assert all(result[f"{name}_median_us"] > 0 for name in ("read", "load"))
    assert list(tmp_path.iterdir()) == []


def test_verify_leaves_out_what_was_not_asked_for() -> None:
    asked = ("verify", "--quick", "--isa", "scalar", "--operation", "attention")
    lines = good(*asked).splitlines()
    kernels = [line.split()[0] for line in lines[1:-2]]
    assert kernels and all(
        re.match(r"attention_(\w+_scalar|(\w+_)?compat|merge)$", name) for name in kernels
    )
    assert re.match(r"not asked for: \d+ kernels of another backend, \d+ kernels of ", lines[-2])
    assert re.match(r"\d+ passed, 0 failed, 0 skipped$", lines[-1])
    report = good_json(*asked)
    assert (report["failed"], report["skipped"]) == (0, 0)
    checked = [kernel for kernel in report["kernels"] if "left_out" not in kernel]
    assert sorted(kernel["name"] for kernel in checked) == sorted(kernels)
    assert {kernel.get("left_out") for kernel in report["kernels"]} == {None, "ISA", "operation"}
    for kernel in checked:  # within the tolerance, and no NaN or infinity (null in JSON)
        assert 0 <= kernel["worst_error_of_tolerance"] <= 1


def test_bench_table() -> None:
    text = good("bench", "attention", "--shape", "1,2,1,64,64", "--bits", "4", *QUICK)
    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("B,Hq,Hkv,D,N"))
    rows = lines[header : header + 3]
    assert len({len(row) for row in rows}) == 1  # aligned
    assert all(row.startswith("1,2,1,64,64  ") for row in rows[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--quick"],
        ["bench", "attention"],
        ["bench", "geglu"],
        ["bench", "quantize"],
        ["bench", "append"],
        ["bench", "features"],
        ["replay", TRACE],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_cuda_without_a_gpu(arguments: list[Any], tmp_path: Path) -> None:
    run = nybble(*arguments, "--backend", "cuda", NYBBLE_LIBCUDA=str(tmp_path / "none.so"))
    assert (run.returncode, run.stdout) == (1, "")
    assert re.match(r"nybble: error: libcuda could not be loaded: .*none\.so", run.stderr)
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["verify", "--backend", "metal"], "must be cpu or cuda"),
        (["verify", "--backend", "cuda", "--isa", "avx2"], "--isa does not go with"),
        (["verify", "--sanitizer"], "--sanitizer goes with --backend cuda"),
        (["bench", "append"], "append is not measured on the backend cpu"),
        (["bench", "overhead", "--backend", "cuda"], "overhead is not measured on the backend"),
        (["bench", "geglu", "--backend", "cuda", "--threads", "2"], "do not go with"),
        (["replay", "--backend", "gpu", "x"], "must be cpu or cuda"),
    ],
)
def test_bad_backends(arguments: list[str], sentence: str) -> None:
    run = nybble(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert sentence in run.stderr


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.txt")), ids=lambda path: path.name)
def test_shape_files(path: Path) -> None:
    fields = {"attention": 5, "append": 3}.get(path.stem.split("-")[0], 2)
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    shapes = [tuple(map(int, line.split(","))) for line in lines if line]
    assert shapes and len(set(shapes)) == len(shapes)
    assert all(len(shape) == fields for shape in shapes)
    sources = {
        "attention-short": "attention",
        "append": "append",
        "geglu": "geglu",
        "quantize": "quantize",
    }
    if path.stem in sources:  # the file says what the command measures without --shape
        source = (ROOT / "tools" / "nybble" / f"bench_{sources[path.stem]}.c").read_text()
        table = re.search(r"default_shapes\[\] = \{(.*?)^\};", source, re.DOTALL | re.MULTILINE)[1]
        built_in = [
            tuple(map(int, text.split(","))) for text in re.findall(r"\{\{(.*?)\}\}", table)
        ]
        assert shapes == built_in


def test_shapes_option(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    path.write_text("# a comment\n\n1,64  # behind a shape\n2,32\n")
    report = good_json("bench", "geglu", "--shapes", path, *QUICK)
    assert [r["shape"] for r in report["results"][::2]] == [[1, 64], [2, 32]]


# ---- quantize -----------------------------------------------------------------------------------


def model_tensors() -> dict[str, tuple[str, list[int], bytes]]:
    return {
        "block.weight": floats(3, 128),
        "stack": floats(2, 2, 64),
        "norm.weight": floats(128),
        "odd.weight": floats(2, 48),
        "ids": ("I64", [2, 64], bytes(range(256)) * 4),
    }


def test_quantize_file(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in", model_tensors(), {"kind": "ü", "format": "mlx"})
    report = good_json("quantize", source, tmp_path / "out", "--all", "--bits", "3")
    assert {t["name"] for t in report["tensors"] if t["quantized"]} == {"block.weight", "stack"}
    tensors, metadata = read_file(tmp_path / "out")
    assert metadata == {"kind": "ü", "format": "mlx"}
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    assert shapes == {
        "block.weight": ("U32", [3, 12]),
        "block.scales": ("F32", [3, 2]),
        "block.biases": ("F32", [3, 2]),
        "stack": ("U32", [2, 2, 6]),
        "stack.scales": ("F32", [2, 2, 1]),
        "stack.biases": ("F32", [2, 2, 1]),
        "norm.weight": ("F32", [128]),
        "odd.weight": ("F32", [2, 48]),
        "ids": ("I64", [2, 64]),
    }
    for name in ("norm.weight", "odd.weight", "ids"):
        assert tensors[name] == model_tensors()[name]
    for dtype, shape, data in tensors.values():
        assert len(data) == math.prod(shape) * DTYPE_BYTES[dtype]


def test_names_do_not_drive_the_terminal(tmp_path: Path) -> None:
    tensors = {"\x1b[2J\u009bx\n": floats(2, 64), "\x1bodd": floats(2, 48)}
    source = write_file(tmp_path / "in", tensors, None)
    control = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
    shown = good("quantize", source, tmp_path / "out", "--all")
    assert "?[2J??x?" in shown and not control.search(shown)
    failed = nybble("quantize", source, tmp_path / "out2", "--tensor", "\x1bodd")
    assert failed.returncode == 2 and "?odd" in failed.stderr and not control.search(failed.stderr)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_reads_what_quantize_wrote(
    tmp_path: Path, bits: int, group_size: int, dtype: str
) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'mlx[cpu]'")
    mx.random.seed(bits * group_size)
    weights = {
        "block.weight": mx.random.normal((17, 256)).astype(getattr(mx, dtype)),
        "stack": mx.random.normal((2, 3, 128)).astype(getattr(mx, dtype)),
        "norm.weight": mx.random.normal((256,)).astype(getattr(mx, dtype)),
    }
    mx.save_safetensors(str(tmp_path / "in.safetensors"), weights, metadata={"a": "b"})
    good(
        *("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--all"),
        *("--bits", bits, "--group-size", group_size),
    )
    read, metadata = mx.load(str(tmp_path / "out.safetensors"), return_metadata=True)
    assert metadata["a"] == "b"
    assert mx.array_equal(read["norm.weight"], weights["norm.weight"]).item()
    for name, stem in (("block.weight", "block"), ("stack", "stack")):
        ours = read[name], read[f"{stem}.scales"], read[f"{stem}.biases"]
        theirs = mx.quantize(weights[name], group_size=group_size, bits=bits)
        for mine, right in zip(ours, theirs, strict=True):
            assert mine.dtype == right.dtype and mx.array_equal(mine, right).item()
        assert mx.array_equal(
            mx.dequantize(*ours, group_size=group_size, bits=bits),
            mx.dequantize(*theirs, group_size=group_size, bits=bits),
        ).item()


def test_quantize_chooses_by_name_and_pattern(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in", {**model_tensors(), "a[0]": floats(2, 64)}, None)

    def chosen(*patterns: str) -> set[str]:
        options = [word for pattern in patterns for word in ("--tensor", pattern)]
        report = good_json("quantize", source, tmp_path / "out", *options)
        return {t["name"] for t in report["tensors"] if t["quantized"]}

    assert chosen("stack") == {"stack"}
    assert chosen("*.weight", "s*") == {"block.weight", "stack"}
    assert chosen("a[0]") == {"a[0]"}


def test_quantize_rules_differ(tmp_path: Path) -> None:
    # All negative: the GPU's rule takes 0 for the maximum.
    numbers = struct.pack("<64f", *(-5 + i / 64 for i in range(64)))
    source = write_file(tmp_path / "in", {"w": ("F32", [1, 64], numbers)}, None)
    scales = {}
    for rule in ("mlx_cpu", "mlx_gpu"):
        good("quantize", source, tmp_path / rule, "--all", "--rule", rule)
        tensors, _ = read_file(tmp_path / rule)
        scales[rule] = abs(struct.unpack("<f", tensors["w.scales"][2])[0])
    assert scales["mlx_cpu"] < 0.1
    assert scales["mlx_gpu"] > 0.3


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--tensor", "none"], 'no tensor "none"'),
        (["--tensor", "n*e"], 'no tensor "n*e"'),
        (["--tensor", "ids"], "dtype"),
        (["--tensor", "norm.weight"], "fewer than two axes"),
        (["--tensor", "odd.weight"], "does not divide"),
        (["--tensor", "bad"], "bad: "),
        (["--tensor", "block.weight"], "block.scales"),
    ],
)
def test_quantize_failure_leaves_the_output(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    infinite = struct.pack("<64f", *([1.0] * 63 + [math.inf]))
    tensors = {**model_tensors(), "bad": ("F32", [1, 64], infinite), "block.scales": floats(3, 2)}
    source = write_file(tmp_path / "in", tensors, None)
    output = tmp_path / "out"
    output.write_text("precious")
    run = nybble("quantize", source, output, *options)
    assert run.returncode == (1 if sentence in ("bad: ", "block.scales") else 2)
    assert sentence in run.stderr
    assert output.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_quantize_in_place(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model", model_tensors(), None)
    good("quantize", path, path, "--tensor", "stack")
    assert read_file(path)[0]["stack"][0] == "U32"


# ---- cache --------------------------------------------------------------------------------------


def saved_cache(path: Path, metadata: dict[str, str] | None = None) -> Path:
    """Two plain layers as mlx-lm saves them: [2, 3, 5, 64] of K and [2, 3, 5, 128] of V."""
    tensors = {}
    scalars = {"2.0": ""}
    for layer in range(2):
        tensors[f"{layer}.0"] = floats(2, 3, 5, 64)
        tensors[f"{layer}.1"] = floats(2, 3, 5, 128)
        tensors[f"{layer}.2"] = ("I32", [], struct.pack("<i", 5))
        scalars |= {f"1.{layer}": "KVCache", f"2.{layer + 1}.0": f"{layer}.2"}
        scalars[f"2.{layer + 1}.1"] = "scalar"
    own = {f"0.{key}": value for key, value in (metadata or {}).items()}
    return write_file(path, tensors, {**own, **scalars})


def error_at_8_bits(numbers: tuple[float, ...]) -> float:
    """How far quantized numbers may be off: half a step of 1/255 of the range; and half a step more
    at one end, since the step is stretched or shrunk (by 1/2 in 127 at most, over 255 steps) for
    the number of largest magnitude to be met."""
    return 1.02 * (max(numbers) - min(numbers)) / 255


def test_cache_info(tmp_path: Path) -> None:
    source = saved_cache(
        tmp_path / "in", {"model": "a model", "bell": "\a\x1b[2J\u009b" + 400 * "x"}
    )
    report = good_json("cache", "info", source)
    assert report["bytes"] == 2 * (2 * 3 * 5 * 192 * 4 + 4)
    assert report["metadata"]["model"] == "a model"
    layer = {
        "kind": "contiguous", "batch": 2, "kv_heads": 3, "shortest_tokens": 5, "longest_tokens": 5,
        "keys": {"scheme": "plain", "dtype": "f32", "dim": 64},
        "values": {"scheme": "plain", "dtype": "f32", "dim": 128},
        "bytes": 2 * 3 * 5 * 192 * 4 + 4,
    }  # fmt: skip
    assert report["layers"] == [{"layer": index, **layer} for index in range(2)]
    text = good("cache", "info", source)
    assert re.search(r"^0-1 +contiguous +f32 +f32 +2 +3 +64/128 +5 +23044$", text, re.MULTILINE)
    assert "model: a model\n" in text
    assert "bell: ??[2J??xxx" in text and "\x1b" not in text and len(text.splitlines()[-2]) < 200


def test_cache_convert_quantizes_as_quantize_does(tmp_path: Path) -> None:
    source = saved_cache(tmp_path / "in", {"model": "a model"})
    options = ("--bits", "4", "--group-size", "32", "--layers", "1:8:3")
    report = good_json("cache", "convert", source, tmp_path / "out", *options)
    assert [layer["keys"]["bits"] for layer in report["layers"]] == [4, 8]
    assert [layer["values"]["bits"] for layer in report["layers"]] == [4, 3]
    assert report["metadata"] == {"model": "a model"}
    assert report == good_json("cache", "info", tmp_path / "out") | {"file": str(tmp_path / "out")}
    quantized, _ = read_file(tmp_path / "out")
    names = {
        "0.0": (4, ["0.0.0", "0.0.1", "0.0.2"]),
        "0.1": (4, ["0.1.0", "0.1.1", "0.1.2"]),
        "1.0": (8, ["1.key.codes", "1.key.scales", "1.key.biases"]),
        "1.1": (3, ["1.value.codes", "1.value.scales", "1.value.biases"]),
    }
    for name, (bits, found) in names.items():
        width = ("--tensor", name, "--bits", bits, "--group-size", "32")
        good("quantize", source, tmp_path / "wanted", *width)
        wanted, _ = read_file(tmp_path / "wanted")
        for suffix, tensor in zip(("", ".scales", ".biases"), found, strict=True):
            assert quantized[tensor][2] == wanted[name + suffix][2], tensor


def test_cache_convert_there_and_back(tmp_path: Path) -> None:
    source = saved_cache(tmp_path / "in")
    good("cache", "convert", source, tmp_path / "8", "--bits", "8")
    good("cache", "convert", tmp_path / "8", tmp_path / "plain", "--bits", "plain")
    before, _ = read_file(source)
    after, metadata = read_file(tmp_path / "plain")
    assert metadata["1.0"] == metadata["1.1"] == "KVCache"
    assert after.keys() == before.keys()
    for name, (dtype, shape, data) in before.items():
        assert after[name][:2] == (dtype, shape)
        if shape:
            numbers, back = (
                struct.unpack(f"<{len(data) // 4}f", d) for d in (data, after[name][2])
            )
            tolerance = error_at_8_bits(numbers)
            assert all(abs(a - b) <= tolerance for a, b in zip(numbers, back, strict=True))
    # What stays as it is, is copied bit by bit.
    good("cache", "convert", tmp_path / "8", tmp_path / "same", "--layers", "0-1:8")
    assert (tmp_path / "same").read_bytes() == (tmp_path / "8").read_bytes()


def test_cache_convert_keeps_what_a_window_dropped(tmp_path: Path) -> None:
    tensors = {"0.0": floats(2, 3, 8, 64), "0.1": floats(2, 3, 8, 64)}
    for index, number in enumerate((21, 2, 8, 5)):  # offset, keep, max_size, index
        tensors[f"0.{index + 2}"] = ("I32", [], struct.pack("<i", number))
    source = write_file(tmp_path / "in", tensors, {"1.0": "RotatingKVCache", "2.0": ""})
    report = good_json("cache", "convert", source, tmp_path / "out", "--bits", "8")
    (layer,) = report["layers"]
    assert (layer["kind"], layer["window_tokens"], layer["window_keep_tokens"]) == (
        "rotating",
        8,
        2,
    )
    assert layer["longest_tokens"] == 21
    good("cache", "convert", tmp_path / "out", tmp_path / "back", "--bits", "plain")
    back, _ = read_file(tmp_path / "back")
    assert back["0.2"][2] == struct.pack("<i", 21)
    in_order = [0, 1, 5, 6, 7, 2, 3, 4]  # behind the kept ones the ring begins at the index
    for name in ("0.0", "0.1"):
        before = struct.unpack(f"<{2 * 3 * 8 * 64}f", tensors[name][2])
        after = struct.unpack(f"<{2 * 3 * 8 * 64}f", back[name][2])
        tolerance = error_at_8_bits(before)
        for plane in range(6):
            for row, source_row in enumerate(in_order):
                for i in range(64):
                    difference = (
                        after[(plane * 8 + row) * 64 + i]
                        - before[(plane * 8 + source_row) * 64 + i]
                    )
                    assert abs(difference) <= tolerance


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], '"" is no action'),
        (["show", "x"], '"show" is no action'),
        (["info"], "FILE must be given"),
        (["info", "a", "b"], "info takes one FILE"),
        (["info", "a", "--bits", "4"], "the widths are convert's"),
        (["convert", "a", "b"], "say what to convert to"),
        (["convert", "a", "--bits", "4"], "OUT must be given"),
        (["convert", "a", "b", "c", "--bits", "4"], '"c" is too much'),
        (["convert", "a", "b", "--bits", "7"], '--bits has "7"'),
        (["convert", "a", "b", "--layers", "4"], '--layers is "4"'),
        (["convert", "a", "b", "--layers", "3-1:4"], '--layers is "1"'),
        (["convert", "a", "b", "--layers", "0:x"], '--layers has "x"'),
        (["convert", "a", "b", "--group-size", "48"], "--group-size is 48"),
    ],
)
def test_cache_usage(arguments: list[str], sentence: str) -> None:
    run = nybble("cache", *arguments)
    assert run.returncode == 2
    assert sentence in run.stderr and run.stdout == ""


def test_cache_failure_leaves_the_output(tmp_path: Path) -> None:
    source = saved_cache(tmp_path / "in")
    trace = write_file(tmp_path / "none", {"x": floats(2, 64)}, None)
    output = tmp_path / "out"
    output.write_text("precious")
    for file, options, sentence in (
        (source, ["--layers", "1-2:4"], "--layers names layer 2; "),
        (source, ["--bits", "4", "--group-size", "128"], "layer 0: options.key_format.group_size"),
        (trace, ["--bits", "4"], "is no saved cache"),
        (tmp_path / "missing", ["--bits", "4"], "missing cannot be opened"),
    ):
        run = nybble("cache", "convert", file, output, *options)
        assert run.returncode == (2 if "--layers" in options else 1), run.stderr
        assert sentence in run.stderr
        assert output.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "none", "out"]


# ---- bench/plot.py ------------------------------------------------------------------------------


def plot(*arguments: Any) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "bench" / "plot.py"), *map(str, arguments)]
    return subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)


def test_plot(tmp_path: Path, comparison: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    bench = good_json(
        *("bench", "attention", "--shape", "1,2,1,64,64", "--shape", "1,2,1,64,128", *QUICK)
    )
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "replay.json").write_text(json.dumps(comparison))
    for name, magic in (("p.png", b"\x89PNG"), ("p.svg", b"<?xml")):
        run = plot(tmp_path / "bench.json", tmp_path / "replay.json", "--output", tmp_path / name)
        assert run.returncode == 0, run.stderr
        assert (tmp_path / name).read_bytes().startswith(magic)


def test_plot_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "empty").write_text('{"results": []}')
    for name, sentence in (
        ("text", "is not JSON"),
        ("empty", "nothing to draw"),
        ("none", "No such"),
    ):
        run = plot(tmp_path / name, "--output", tmp_path / "p.png")
        assert run.returncode == 1 and sentence in run.stderr
        assert not (tmp_path / "p.png").exists()
