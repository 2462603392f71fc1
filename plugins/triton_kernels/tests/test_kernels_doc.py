"""docs/kernels.md is of these sources, and every kernel says what a chapter needs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from oarlock_triton_kernels import registry

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "plugins/triton_kernels/oarlock_triton_kernels"


def kernels() -> dict[str, ast.FunctionDef]:
    """Every `@triton.jit` function that is launched, by "module:name"."""
    found = {}
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[f"{path.stem}:{node.name}"] = node
    return found


def test_every_kernel_has_a_chapter():
    assert sorted(kernels()) == sorted(chapter.kernel for chapter in registry.CHAPTERS)


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_fits_a_page_and_says_what_it_is(name):
    node = kernels()[name]
    assert node.end_lineno - node.lineno + 1 <= 80
    doc = ast.get_docstring(node) or ""
    assert re.match(r"Grid: \(.+?\)\. \S", doc)
    notes = {part: re.search(rf"^{part}: (\S.*?)(?=^\w+: |\Z)", doc, re.MULTILINE | re.DOTALL) for part in ("Reference", "Cost", "Bound")}
    assert all(notes.values()), notes
    assert re.search(r"FLOP|operations", notes["Cost"][1]) and re.search(r"bytes|numbers|values", notes["Cost"][1]), "operations and what is moved"
    assert re.search(r"memory|matrix units|latency|arithmetic|as `", notes["Bound"][1]), "which limit binds"
    for pointer in (arg.arg for arg in node.args.args if arg.arg.endswith(("_ptr", "_desc"))):
        assert re.search(rf"\b{pointer}\b[^:]*: +\[", doc), f"{pointer} has no shape"
    legend = ast.get_docstring(ast.parse((PACKAGE / f"{name.partition(':')[0]}.py").read_text(encoding="utf-8"))) or ""
    for letter in set(re.findall(r"\b[A-Z]+\b", " ".join(re.findall(r"(?:_ptr|_desc)\b[^:\n]*: +\[(.*?)\]", doc)))):
        assert re.search(rf"\b{letter}\b", legend) or re.search(rf"^[\w, ]*\b{letter}\b[\w, ]*:", doc, re.MULTILINE), f"{letter} is in no legend"


def test_a_letter_that_stands_for_inputs_stands_for_nothing_else():
    legends = [re.search(r"^Legend: (.*?)$\n\n", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL) for path in PACKAGE.glob("*.py")]
    assert {word for legend in legends if legend for word in re.findall(r"\bK (\w+)", legend[1])} == {"inputs"}


def test_the_page_is_made_of_these_sources():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, ROOT / "tools/gen_kernels_doc.py", "--check"], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
