"""The package as it is built: what is compiled again, what is not, and what a wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from oarlock_cpu import plugin

SOURCE = Path(plugin.__file__).parents[1]
IGNORED = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info", "tests")

# A compiler that notes what it is asked for, and makes files without content.
COMPILER = """#!/bin/sh
case "$*" in *--version) echo "$VERSION"; exit;; esac
echo "$@" >>"$LOG"
while [ $# -gt 1 ]; do [ "$1" = -o ] && : >"$2"; shift; done
"""


@pytest.fixture
def source(tmp_path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "source", ignore=IGNORED))


def wheel(source: Path, out: Path, **variables: str) -> list[str]:
    """Build one; the names in it."""
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=source, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    assert "-cp311-abi3-" in made.name
    return zipfile.ZipFile(made).namelist()


def test_kernels_are_compiled_again_only_when_what_they_are_made_of_changed(source, tmp_path):
    compiler, log, out = tmp_path / "compiler", tmp_path / "log", tmp_path / "out"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    variables = {"CC": str(compiler), "CXX": str(compiler), "LOG": str(log), "VERSION": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def compiled(**changed: str) -> int:
        """How many sources one more build compiles. As in a fresh clone: nothing is left of earlier ones but the cache."""
        log.write_text("")
        shutil.rmtree(source / "build", ignore_errors=True)
        assert "oarlock_cpu/_C.abi3.so" in wheel(source, out, **{**variables, **changed})
        return sum("-c csrc/" in line for line in log.read_text().splitlines())

    total = compiled()
    assert total > 5 and compiled() == 0
    for changed in ("csrc/vec.h", "csrc/pool.cpp", "setup.py"):
        (source / changed).write_text((source / changed).read_text() + "\n")
        assert [compiled(), compiled()] == [total, 0], changed
    assert [compiled(VERSION="2"), compiled()] == [total, 0], "another compiler's library is another one"


@pytest.mark.kernels
def test_an_installed_wheel_loads_its_kernels(source, tmp_path):
    """Compiles nothing where these sources were compiled before."""
    wheel(source, tmp_path / "out", OARLOCK_CPU_KERNELS="1")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path / "site"), *tmp_path.glob("out/*.whl")]
    subprocess.run(install, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    code = "from oarlock_cpu import native; print(native.problem() or native.isa(), native.LIBRARY)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [done.stdout.split()[0], str(tmp_path / "site/oarlock_cpu/_C.abi3.so")]
