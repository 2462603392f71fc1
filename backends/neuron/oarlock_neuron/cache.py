"""Compiled programs on disk, found by everything that they depend on.

Owns: the folder, its file format and the keys.
Reads: nothing.
Never: gives back a file whose content is not what was written; fails a start because the disk is full or read-only.

A file is the SHA-256 of its content, then the content. Files are written beside their place and renamed, so that several
workers may share a folder. The content is read by torch, which runs code in it: the folder is its owner's alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("oarlock.neuron")
SUFFIX = ".program"


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oarlock" / "neuron"


def source_hash(folder: Path) -> str:
    """Of all Python files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key_of(parts: Iterable[str]) -> str:
    """A name for what these parts say."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


class Cache:
    """One folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> bytes | None:
        """The content kept under a key; None when there is none, or none that is whole."""
        path = self.folder / f"{key}{SUFFIX}"
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read (%s); the program is compiled again", path, error)
            return None
        content = found[32:]
        if hashlib.sha256(content).digest() != found[:32]:
            log.warning("%s is damaged; the program is compiled again", path)
            return None
        return content

    def write(self, key: str, content: bytes) -> None:
        """Keep. A disk that does not take it costs the next start its time, and a warning now."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                os.replace(name, self.folder / f"{key}{SUFFIX}")
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            log.warning("a compiled program could not be kept in %s: %s", self.folder, error)
