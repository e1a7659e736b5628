# SPDX-License-Identifier: Apache-2.0
"""The gates: they pass on a real model, they fail where they must, and they measure rightly."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nybble
import nybble.transformers
from nybble.gate import __main__ as command
from nybble.gate import compare, geglu, report, torch_engine
from nybble.gate.compare import Comparison
from nybble.gate.memory import PeakMemory

ROOT = Path(__file__).resolve().parents[3]
FORCED = 64
PROMPTS = [600, 2000]


# ---- The real model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `python -m nybble.gate` says of SmolLM2, as people run it."""
    folder = tmp_path_factory.mktemp("gate")
    done = subprocess.run(
        [sys.executable, "-m", "nybble.gate", "--model", "smollm2", "--bits", "8,4"]
        + ["--json", str(folder / "gate.json"), "--plot", str(folder / "gate.png")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # others may want the processors
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "gate.json").read_text())
    found["words"] = done.stdout
    found["picture"] = (folder / "gate.png").read_bytes()
    return found


def test_every_gate_passes(gate: dict[str, Any]) -> None:
    assert gate["passed"]
    # For each prompt and width: two paths ran, agreement, KL. And six of GeGLU.
    assert len(gate["verdicts"]) == len(PROMPTS) * 2 * 4 + 6
    assert all(verdict["passed"] for verdict in gate["verdicts"])
    assert f"{len(gate['verdicts'])} passed, 0 failed" in gate["words"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("cache", ["8-bit", "4-bit"])
def test_fused_agrees_with_compat(gate: dict[str, Any], prompt: int, cache: str) -> None:
    (found,) = (
        pair
        for pair in gate["comparisons"]
        if pair["prompt_tokens"] == prompt
        and (pair["cache"], pair["path"], pair["against_path"]) == (cache, "fused", "compat")
    )
    assert found["tokens"] == len(found["kl"]) == FORCED
    assert found["agreeing"] >= 63
    assert found["mean_kl"] < 1e-4
    # Another path it is: with the same bits throughout nothing would have been compared.
    assert not found["bit_identical"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_fused_path_ran(gate: dict[str, Any], prompt: int) -> None:
    runs = [run for run in gate["runs"] if run["prompt_tokens"] == prompt]
    assert [run["path"] for run in runs] == ["full", "compat", "fused", "compat", "fused"]
    for run in runs[1:]:  # the fused path reads the prompt for both
        assert run["counters"]["attention_fused"] == 30 * (1 + FORCED)
        assert run["counters"]["attention_compat"] == 30 * FORCED


@pytest.mark.parametrize("prompt", PROMPTS)
def test_quantizing_costs_what_a_model_of_this_kind_pays(gate: dict[str, Any], prompt: int) -> None:
    """The model reads English, 8 bits change next to nothing, and 4 bits change more."""
    runs = {
        (run["cache"], run["path"]): run for run in gate["runs"] if run["prompt_tokens"] == prompt
    }
    kl = {
        pair["cache"]: pair["mean_kl"]
        for pair in gate["comparisons"]
        if pair["prompt_tokens"] == prompt
        and (pair["path"], pair["against_path"]) == ("fused", "full")
    }
    full = runs["16-bit", "full"]["perplexity"]
    # It reads English: of 49,152 tokens few seem possible.
    assert 1 < full < 20
    assert abs(runs["8-bit", "fused"]["perplexity"] / full - 1) < 0.05
    assert 0 < kl["8-bit"] < 0.02
    assert kl["8-bit"] < kl["4-bit"]
    # Codes of 8 and 4 bits with two floats of 32 bits for 64 of them, and some room.
    kv = 2 * 3 * 64 * 30 * (prompt + FORCED)
    for cache, bits in (("8-bit", 9), ("4-bit", 5)):
        assert kv * bits / 8 <= runs[cache, "fused"]["cache_bytes"] <= 1.2 * kv * bits / 8
    assert runs["16-bit", "full"]["cache_bytes"] == 2 * kv
    for run in runs.values():
        assert run["tokens_per_second"] > 0 and run["prefill_seconds"] > 0
        if run["peak_bytes"] is not None:
            assert run["peak_bytes"] >= run["cache_bytes"] / 2


def test_picture(gate: dict[str, Any]) -> None:
    assert gate["picture"].startswith(b"\x89PNG")
    assert len(gate["picture"]) > 20_000


# ---- Where a gate must fail ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> torch_engine.Subject:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    return torch_engine.Subject("small", model, lambda text: list(text.encode()))


@pytest.fixture
def without_weights(
    small: torch_engine.Subject, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Arguments for the command, over the small model."""
    monkeypatch.setattr(torch_engine, "load_smollm2", lambda path, dtype: small)
    arguments = ["--bits", "4", "--prompt-tokens", "40", "--forced-tokens", "16"]
    yield [*arguments, "--gates", "cache", "--threads", "1"]


def test_exit_code_0(without_weights: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(without_weights) == 0
    assert "4 passed, 0 failed" in capsys.readouterr().out


def test_two_widths(
    without_weights: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gate.json"
    arguments = [*without_weights, "--k-bits", "8", "--v-bits", "4", "--json", str(file)]
    assert command.main(arguments) == 0
    assert "K8V4" in capsys.readouterr().out
    assert {run["cache"] for run in json.loads(file.read_text())["runs"]} == {"16-bit", "K8V4"}


def test_the_other_path_fails_the_gate(
    without_weights: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Equal logits do not help where the fused path did not run."""
    attention = nybble.transformers.attention
    monkeypatch.setattr(
        nybble.transformers, "attention", lambda *a, **k: attention(*a, **{**k, "path": "compat"})
    )
    assert command.main(without_weights) == 1
    out = capsys.readouterr().out
    assert "FAILED 4-bit, 40 tokens: attention_fused ran: 0 calls of 34" in out
    assert "FAILED 4-bit, 40 tokens: attention_compat ran: 66 calls of 32" in out
    assert "2 passed, 2 failed" in out


def test_a_wrong_fused_path_fails_the_gate(
    without_weights: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attention = nybble.transformers.attention

    def wrong(query: Any, *rows: Any, **options: Any) -> Any:
        made = attention(query, *rows, **options)
        if options.get("path") == "fused" and query.shape[2] == 1:
            options["out"][..., 0] += 0.5
        return made

    monkeypatch.setattr(nybble.transformers, "attention", wrong)
    assert command.main(without_weights) == 1
    assert "FAILED 4-bit, 40 tokens: mean KL" in capsys.readouterr().out


def test_logits_that_are_no_numbers_fail(small: torch_engine.Subject) -> None:
    tokens = list(b"what is not a number is no small number".ljust(64))
    bench = torch_engine.Bench(small, tokens, 8)
    compat, fused = bench.quantized(32, 4, 4)
    layers = small.layers
    right = report.judge_cache(fused, Comparison.of(compat.logits, fused.logits), layers)
    assert [verdict.passed for verdict in right] == [True] * 4
    broken = fused.logits.copy()
    broken[3] = np.nan
    found = Comparison.of(compat.logits, broken)
    assert math.isnan(found.mean_kl)
    assert not report.judge_cache(fused, found, layers)[3].passed


def test_path_of_a_cache(small: torch_engine.Subject) -> None:
    small.model.set_attn_implementation("nybble")
    cache = nybble.transformers.NybbleCache(small.model.config)
    assert cache.path == "auto"
    cache.path = "compat"
    assert [layer.path for layer in cache.layers] == ["compat"] * 2
    with pytest.raises(nybble.NybbleError, match="path is 'quick'; it must be one of"):
        cache.path = "quick"
    assert cache.path == "compat"


def test_a_report_without_verdicts_has_not_passed() -> None:
    assert not report.Report({}).passed


@pytest.mark.parametrize("agreeing, passed", [(64, True), (63, True), (62, False)])
def test_agreement(small: torch_engine.Subject, agreeing: int, passed: bool) -> None:
    tokens = list(b"x" * 42)
    fused = torch_engine.Bench(small, tokens, 1).quantized(40, 4, 4)[1]
    found = replace(Comparison.of(fused.logits, fused.logits), tokens=64, agreeing=agreeing)
    assert report.judge_cache(fused, found, 2)[2].passed == passed


# ---- GeGLU --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16])
def geglu_runs(request: pytest.FixtureRequest) -> geglu.GegluRuns:
    return geglu.run(request.param)


def test_geglu_has_the_same_bits(geglu_runs: geglu.GegluRuns) -> None:
    runs = geglu_runs
    verdicts = report.judge_geglu(runs)
    assert [verdict.passed for verdict in verdicts] == [True] * 6, verdicts
    assert runs.fused_against_compat.kl == [0.0] * (geglu.PROMPT_TOKENS + geglu.FORCED_TOKENS)
    assert runs.fused_counters["geglu_fused"] == 4 * (1 + geglu.FORCED_TOKENS)
    # The model's own activation rounds once where MLX's steps round nine times.
    assert not runs.fused_against_own.bit_identical
    assert runs.fused_against_own.mean_kl < 0.05


def test_geglu_that_differs_fails(geglu_runs: geglu.GegluRuns) -> None:
    runs = geglu_runs
    other = replace(runs.fused_against_compat, max_kl=1e-9, bit_identical=False)
    passed = [v.passed for v in report.judge_geglu(replace(runs, fused_against_compat=other))]
    assert passed == [True] * 4 + [False] * 2
    counters = {**runs.fused_counters, "geglu_fused": 0, "geglu_compat": 260}
    passed = [v.passed for v in report.judge_geglu(replace(runs, fused_counters=counters))]
    assert passed == [False] * 2 + [True] * 4


# ---- Arithmetic ---------------------------------------------------------------------------------


def test_divergences() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 1e-30]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.9, 0.1, 1e-30]], np.float32)) + 3
    kl = compare.divergences(reference, other)
    assert kl[0] == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert kl[1] == pytest.approx(0, abs=1e-6)
    assert compare.divergences(reference, reference).tolist() == [0, 0]
    found = Comparison.of(reference, other)
    assert (found.tokens, found.agreeing, found.bit_identical) == (2, 1, False)
    assert found.max_kl == kl[0] and found.mean_kl == pytest.approx(kl.mean())
    hidden = np.array([[0.0, -np.inf], [0.0, 0.0]])
    assert compare.divergences(hidden, hidden).tolist() == [0, 0]


def test_perplexity() -> None:
    logits = np.log(np.array([[0.5, 0.5], [0.125, 0.875]]))
    assert compare.perplexity(logits, np.array([0, 0])) == pytest.approx(4)


def test_peak_memory_sees_what_was_given_back() -> None:
    memory = PeakMemory()
    if memory.read() is None:
        pytest.skip("this system does not count, or does not let its count be set back")
    block = np.ones(200 * 2**20, np.uint8)
    del block
    peak = memory.read()
    assert peak is not None and 190 * 2**20 < peak < 300 * 2**20
    again = PeakMemory().read()
    assert again is not None and again < 50 * 2**20


# ---- Bad arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--bits", "4,x"], "'4,x' is no list of numbers such as 4,8"),
        (["--bits", "0"], "each must be at least 1"),
        (["--k-bits", "8"], "--k-bits and --v-bits go together"),
        (["--forced-tokens", "0"], "--forced-tokens is 0; it must be at least 1"),
        (["--gates", "cash"], "'cash' is none of cache, geglu"),
        (["--threads", "-1"], "--threads is -1; it must be at least 0"),
    ],
)
def test_bad_arguments(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_short_text(
    without_weights: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    assert command.main([*without_weights, "--text", str(text)]) == 2
    assert "has 9 tokens; the longest prompt and the forced tokens take 57" in (
        capsys.readouterr().err
    )


def test_width_that_does_not_exist(
    without_weights: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*without_weights, "--bits", "7"]) == 2
    assert "bits" in capsys.readouterr().err


def test_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.gguf"
    file.write_bytes(b"no weights" * 100)
    assert command.main(["--model", str(file), "--gates", "cache"]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err


# ---- mlx-lm -------------------------------------------------------------------------------------


def test_decoding_with_mlx_lm(tmp_path: Path) -> None:
    """bench/mlx_lm_decode.py measures each cache. Its times are not judged here."""
    file = tmp_path / "decode.json"
    command = [sys.executable, str(ROOT / "bench" / "mlx_lm_decode.py"), "--bits", "4"]
    command += ["--layers", "2", "--prompt-tokens", "256", "--tokens", "4"]
    command += ["--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["cache"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["mlx-lm unquantized", "mlx-lm 4-bit", "nybble 4-bit"]
    unquantized, own = rows["mlx-lm unquantized"], rows["nybble 4-bit"]
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert own["cache_bytes"] < 0.4 * unquantized["cache_bytes"]
    if own["peak_bytes"] is not None:
        assert own["peak_bytes"] < unquantized["peak_bytes"]
