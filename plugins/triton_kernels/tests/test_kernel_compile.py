"""Kernels at the shapes of real models, compiled for chips that are not here: they fit, use the matrix units, and spill only where listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kernel_compile
import pytest
from oarlock_triton_kernels import registry
from oarlock_triton_kernels.launches import CHIPS, MODELS, QWEN

HERE = Path(__file__).parent


def compiled(tmp_path: Path, *options: str) -> dict:
    """In a process of its own: kernels of this one are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, HERE / "kernel_compile.py", "--json", tmp_path / "made.json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "made.json").is_file(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((tmp_path / "made.json").read_text(encoding="utf-8"))


def line_of(page: str, row: dict) -> str:
    """The line of a call in its kernel's table: models and calls whose code takes the same share one."""
    chapter = page.partition(f"\n### {row['kernel'].removesuffix('_kernel')}\n")[2].partition("\n##")[0]
    cells = [line[2:].split(" | ") for line in chapter.splitlines() if line.count(" | ") == 1 + len(CHIPS)]
    return " | ".join(next(found for found in cells if row["model"] in found[0].split(", ") and row["text"] in found[1].split("; ")))


def test_what_is_compiled_for_each_chip_is_what_the_page_says(tmp_path):
    """All launches were compiled when the page was made of these sources, see test_kernels_doc.py; here are a few again."""
    made = compiled(tmp_path, "--sample")
    assert not made["problems"] and {row["chip"] for row in made["rows"]} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    page = (HERE.parents[2] / "docs/kernels.md").read_text(encoding="utf-8")
    for row in made["rows"]:
        if row["kernel"] == row["chapter"]:
            assert f" {row['registers']} · {row['shared']} · {row['warps']} · " in line_of(page, row), row


def test_every_kernel_is_compiled_at_the_shapes_of_each_model_that_has_it():
    models, of = {model.name for model in MODELS}, {}
    for chapter, launch, _ in kernel_compile.launches():
        of.setdefault(chapter.kernel, set()).add(launch.model)
    assert of.keys() == {chapter.kernel for chapter in registry.CHAPTERS}
    assert {kernel: found for kernel, found in of.items() if found != models} == {kernel: {QWEN.name} for kernel in of if kernel.startswith("moe:")}


@pytest.mark.full
def test_every_launch_compiles_for_every_chip_within_its_limits(tmp_path):
    made = compiled(tmp_path)
    assert not made["problems"] and made["rows"]
