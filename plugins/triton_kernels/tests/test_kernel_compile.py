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


def test_what_is_compiled_for_each_chip_is_what_the_page_says(tmp_path):
    """All launches were compiled when the page was made of these sources, see test_kernels_doc.py; here are a few again."""
    made = compiled(tmp_path, "--sample")
    assert not made["problems"] and {row["chip"] for row in made["rows"]} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    page = (HERE.parents[2] / "docs/kernels.md").read_text(encoding="utf-8")
    for row in made["rows"]:
        if row["kernel"] == row["chapter"]:
            chapter = page.partition(f"### {row['kernel'].removesuffix('_kernel')}\n")[2].partition("\n##")[0]
            line = next(line for line in chapter.splitlines() if line.startswith(f"| {row['model']} | {row['text']} |"))
            assert f" {row['registers']} · {row['shared']} · {row['warps']} · " in line, row


@pytest.mark.full
def test_every_launch_compiles_for_every_chip_within_its_limits(tmp_path):
    made = compiled(tmp_path)
    assert not made["problems"] and made["rows"]
