# SPDX-License-Identifier: Apache-2.0
"""bench/transformers_h200.py on the CPU, with small models."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nybble import _decode_graph

torch.set_num_threads(1)  # the models are tiny
BENCH = Path(__file__).resolve().parents[3] / "bench" / "transformers_h200.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("transformers_h200", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_table_and_json(
    bench: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_decode_graph, "_compile", lambda layer: layer)  # seconds a line
    file = tmp_path / "lines.json"
    caches = "dynamic,dynamic-flash,static,fp8,quanto4,nybble8,nybble4,k8v4,nybble4+graph"
    caches += ",nybble4+generate,dynamic+generate,dynamic+compiled,nybble4+generate+compiled"
    words = ["--models", "tiny,tiny-gemma", "--contexts", "192", "--batches", "1,3"]
    words += ["--caches", caches, "--device", "cpu", "--steps", "3", "--warmup", "1"]
    assert bench.main([*words, "--json", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = json.loads(file.read_text())["lines"]
    assert len(lines) == 2 * 2 * 13 == len(printed) - 2
    for line, text in zip(lines, printed[2:]):
        assert text.split()[:4] == [line[k] if k in ("model", "cache") else str(line[k])
                                    for k in ("model", "context", "batch", "cache")]  # fmt: skip
        refused = line["cache"] in ("quanto4", "nybble4+graph") or (
            line["cache"] == "fp8" and line["model"] == "tiny-gemma"  # windows
        )
        assert bool(line["reason"]) == refused, line
        if refused:
            assert line["tokens_per_second"] is None and line["reason"] in text
            continue
        assert line["tokens_per_second"] > 0 and line["peak_bytes"] > line["cache_bytes"]
        if line["cache"] != "fp8":
            # Some have room for the steps, or for a few tokens beside a window of 32; others let
            # the last token of a window go.
            wanted = line["arithmetic_bytes"]
            assert 0.95 * wanted <= line["cache_bytes"] <= 1.2 * wanted, line


def test_arithmetic(bench: Any) -> None:
    """By hand: of 4 bits a row of 128 takes 64 bytes, and 8 of scales and biases."""
    config = bench.make_config("llama-3-8b")
    found = bench.arithmetic_bytes(config, "nybble4", 32768, 16, bench.torch.bfloat16)
    assert found == 16 * 32 * 8 * 2 * 32768 * 72
    config = bench.make_config("gemma-3-12b")
    found = bench.arithmetic_bytes(config, "dynamic", 32768, 1, bench.torch.bfloat16)
    assert found == 8 * 2 * 256 * 2 * (40 * 1024 + 8 * 32768)


def test_time_limit(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "tiny", "--contexts", "16", "--batches", "1", "--caches", "dynamic"]
    assert bench.main([*words, "--device", "cpu", "--seconds", "0"]) == 1
    assert "not begun within --seconds 0.0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--models", "gpt-2"])
    assert "'gpt-2' is none of llama-3-8b" in capsys.readouterr().err
