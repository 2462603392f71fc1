"""What is imported is declared: an install from the repository's own files is enough to run, and to test."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from source_code import CORE, ROOT, Import, imports, packages_outside_core, python_files, shown, tree

# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"google": "protobuf", "lmformatenforcer": "lm-format-enforcer", "opentelemetry": "opentelemetry-sdk", "sentencepiece": "sentencepiece", "yaml": "pyyaml", "zmq": "pyzmq"}
# torch is the device package's affair (a requirement of ours would bring the wrong build).
FROM_THE_DEVICE = {"torch"}
# So is triton, which comes with it, and flashinfer, which is built for it; kernels may import them, core never.
KERNELS_TOO = FROM_THE_DEVICE | {"triton", "flashinfer"}
# Each client's tests have an environment of their own (make test-clients).
CLIENTS = ROOT / "tests" / "clients"
# Imported only where a user asks for them: a family without a native file, the kit's pytest plugin.
OPTIONAL = {"pytest", "transformers"}


def declared(pyproject: Path, extra: str | None = None) -> set[str]:
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found = project.get("dependencies", []) + (project.get("optional-dependencies", {}).get(extra, []) if extra else [])
    return {re.split(r"[\s\[<>=!~;]", name, maxsplit=1)[0].lower().replace("_", "-") for name in found}


def imported(folder: Path, but: Path | None = None) -> dict[str, str]:
    """Third-party distributions that a folder's sources import, with one place each. `but`: a folder in it that is left out."""
    neighbours = {p.stem for p in python_files(folder)} | {p.stem for p in python_files(ROOT / "tests")}
    found: dict[str, str] = {}
    for path in python_files(folder):
        if but is not None and path.is_relative_to(but):
            continue
        for one in (*imports(tree(path)), *imported_or_skipped(tree(path))):
            top = one.name.split(".")[0]
            if top and top not in sys.stdlib_module_names and not top.startswith("oarlock") and top not in neighbours:
                found.setdefault(DISTRIBUTIONS.get(top, top).lower().replace("_", "-"), f"{shown(path)}:{one.line}")
    return found


def imported_or_skipped(node: ast.AST) -> list[Import]:
    """`pytest.importorskip("x")`: a package that is not declared would make the skip permanent."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("importorskip")]
    return [Import(n.args[0].value, n.lineno) for n in calls if isinstance(n.args[0], ast.Constant)]


def missing(folder: Path, available: set[str], but: Path | None = None) -> dict[str, str]:
    return {name: where for name, where in imported(folder, but).items() if name not in available}


def test_core_declares_what_it_imports():
    # starlette comes with fastapi, of which it is the half that we use directly.
    available = declared(ROOT / "pyproject.toml", "conformance") | FROM_THE_DEVICE | OPTIONAL
    assert not missing(CORE, available | ({"starlette"} if "fastapi" in available else set()))


@pytest.mark.parametrize("package", sorted(packages_outside_core()))
def test_backends_and_plugins_declare_what_they_import(package):
    folder = packages_outside_core()[package]
    assert not missing(folder, declared(folder.parent / "pyproject.toml") | KERNELS_TOO)


@pytest.mark.parametrize("folder", sorted(path.parent for path in CLIENTS.glob("*/requirements.txt")), ids=lambda folder: folder.name)
def test_clients_environments_hold_what_their_tests_import(folder):
    pinned = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[a-z-]+(\[[a-z]+\])?==[0-9.]+", line) for line in pinned), "a report names its versions"
    # The clients' records are pydantic's, which comes with them.
    assert not missing(folder, {re.split(r"[\[=]", line, maxsplit=1)[0] for line in pinned} | {"pydantic"})


def test_tests_declare_what_they_import():
    available = declared(ROOT / "pyproject.toml", "test") | FROM_THE_DEVICE | {"starlette", "triton"}
    tools = {path.stem.replace("_", "-") for path in (ROOT / "tools").glob("*.py")}
    assert not missing(ROOT / "tests", available | tools, but=CLIENTS)
    for package in packages_outside_core().values():  # what the package itself needs, its tests have
        assert not missing(package.parent / "tests", available | declared(package.parent / "pyproject.toml") | KERNELS_TOO)
