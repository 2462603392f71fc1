"""Where a report comes from: the sources of the package under test and of the kit, and the commit.

Owns: the source hash.
Reads: the file system, git if it is there.
Never: imports torch, or the package under test.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCES = (".py", ".toml", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".inc", ".cl", ".hip", ".metal", ".asm", ".s")
NOT_SOURCES = ("tests", "build", "dist", "node_modules", "__pycache__")
KIT = Path(__file__).parent


def package_folder(factory: str) -> Path | None:
    """The folder of the package that an import string leads into, found without importing it; its project's, in a checkout."""
    package = factory.partition(":")[0].partition(".")[0]
    if package == "oarlock":
        return KIT
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0])
    return folder.parent if (folder.parent / "pyproject.toml").exists() else folder


def source_hash(folder: Path | None) -> str:
    """Of names and contents of all sources below a folder, tests apart: 16 hexadecimal digits. "" without a folder."""
    if folder is None:
        return ""
    digest = hashlib.sha256()
    for path in sorted(_sources(folder), key=lambda p: p.relative_to(folder).as_posix()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in NOT_SOURCES and not path.name.startswith(".") and not path.name.endswith(".egg-info"):
                yield from _sources(path)
        elif path.suffix in SOURCES:
            yield path


def commit(folders: Iterable[Path | None]) -> str:
    """The commit that the folders are at, with "+changes" when they hold others; "" outside a repository."""
    state = ""
    for folder in (f for f in folders if f is not None):
        head, changed = _git(folder, "rev-parse", "--short=12", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
        if not head:
            return ""
        state = head + ("+changes" if changed or state.endswith("+changes") else "")
    return state


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
