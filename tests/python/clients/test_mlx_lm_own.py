# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's own tests of its caches, with nybble's in place of its quantized ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAME = "tests/test_prompt_cache.py"

# Their model is downloaded; a tiny one does. Its tokenizer is asked for the tokens of one sentence.
RUN = f"""
import json, sys, unittest
from types import SimpleNamespace
sys.path.insert(0, {str(HERE)!r})
import mlx_lm.utils
from test_mlx_lm import tiny, tokens
import nybble, nybble.mlx_lm

tokenizer = SimpleNamespace(encode=lambda text, return_tensors: tokens(1, 12))
mlx_lm.utils.load = lambda path: (tiny("llama"), tokenizer)
nybble.mlx_lm.install()
import test_prompt_cache
assert test_prompt_cache.QuantizedKVCache is nybble.mlx_lm.QuantizedKVCache
suite = unittest.defaultTestLoader.loadTestsFromModule(test_prompt_cache)
result = unittest.TextTestRunner(sys.stderr).run(suite)
counters = nybble.default_context().counters()
print(json.dumps([result.testsRun, result.wasSuccessful(), len(result.skipped),
                  counters.cache_append, counters.attention_fused]))
"""


def fetch(folder: Path) -> Path:
    """Their file, of the version that is installed: wheels have no tests."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=mlx-lm",
    ]
    command += [f"mlx-lm=={version('mlx-lm')}", "--dest", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("pip took more than two minutes for mlx-lm's source")
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode != 0 or not archives:
        pytest.skip(f"pip could not fetch mlx-lm's source: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        member = next((m for m in archive.getmembers() if m.name.endswith(NAME)), None)
        if member is None:
            pytest.skip(f"{archives[0].name} has no {NAME}")
        source = archive.extractfile(member)
        assert source is not None
        (folder / Path(NAME).name).write_bytes(source.read())
    return folder


def test_their_tests_of_caches(tmp_path: Path) -> None:
    folder = fetch(tmp_path)
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    ran, successful, skipped, appends, attentions = json.loads(done.stdout.splitlines()[-1])
    assert successful and ran >= 25 and skipped == 0, done.stderr
    assert appends > 20 and attentions > 0, "ours were not asked"
