# SPDX-License-Identifier: Apache-2.0
"""The examples run, and the fused path ran in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize("name", ["generate_transformers.py", "generate_mlx.py"])
def test_example(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = re.search(r"^\[([\d, ]+)\]$", done.stdout, re.MULTILINE)
    assert made is not None and made[1].count(",") == 39
    fused = re.search(r"attention_fused=(\d+), attention_compat=0", done.stdout)
    assert fused is not None and int(fused[1]) >= 2 * 40
