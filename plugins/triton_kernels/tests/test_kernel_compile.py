"""Kernels at the shapes of real models, compiled for chips that are not here: they fit, use the matrix units, and spill only where listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def compiled(tmp_path: Path, *options: str) -> dict:
    """In a process of its own: kernels of this one are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, HERE / "kernel_compile.py", "--json", tmp_path / "made.json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "made.json").is_file(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((tmp_path / "made.json").read_text(encoding="utf-8"))


def test_the_quick_launches_compile_for_every_chip_within_its_limits(tmp_path):
    made = compiled(tmp_path, "--quick")
    assert not made["problems"]


@pytest.mark.full
def test_every_launch_compiles_for_every_chip_within_its_limits(tmp_path):
    made = compiled(tmp_path)
    assert not made["problems"] and made["rows"]
