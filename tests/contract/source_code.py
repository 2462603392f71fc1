"""What the contract tests know of the source tree: which files belong to what, and what each imports.

Owns: the walk over the sources.
Never: judges (the tests do).
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "oarlock"
RUNTIME_PARTS = ("oarlock.runtime", "oarlock.backend_api.runtime", "oarlock.conformance")  # all else is the control plane


@dataclass(frozen=True)
class Import:
    """One import statement, wherever in the file it stands."""

    name: str  # "oarlock.kv.manager"; for `from a import b` both "a" and "a.b" are listed
    line: int


def python_files(folder: Path) -> list[Path]:
    """The Python sources below a folder that belong to the repository."""
    return sorted(p for p in folder.rglob("*.py") if not {".venv", "build", "__pycache__"} & set(p.parts))


def module_name(path: Path, top: Path) -> str:
    """The dotted name of a file below `top`, the folder that holds the package."""
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def core_modules() -> dict[str, Path]:
    """Every module of core by its dotted name."""
    return {module_name(p, CORE.parent): p for p in python_files(CORE)}


def control_plane_modules() -> dict[str, Path]:
    """Core without the parts that may use torch."""
    return {name: path for name, path in core_modules().items() if not is_within(name, *RUNTIME_PARTS)}


def is_within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or lies in one."""
    return any(name == p or name.startswith(p + ".") for p in packages)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(node: ast.AST) -> Iterator[Import]:
    """Every import in a tree, inside functions too, but not those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for otherwise in child.orelse:
                yield from imports(otherwise)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield Import(child.module or "", child.lineno)
            yield from (Import(f"{child.module}.{alias.name}", child.lineno) for alias in child.names)
        else:
            yield from imports(child)


def relative_imports(node: ast.AST) -> list[int]:
    """Lines with `from . import x`; the layer test reads absolute names only, so there are none."""
    return [n.lineno for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.level]


def packages_outside_core() -> dict[str, Path]:
    """The package folders of backends and plugins, by import name."""
    found = (
        p for group in ("backends", "plugins") for p in (ROOT / group).glob("*/oarlock_*") if p.is_dir() and (p / "__init__.py").exists()
    )
    return {p.name: p for p in found}


@cache
def tracked_files() -> list[Path]:
    """Files under version control, or that would be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
