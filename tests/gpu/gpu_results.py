"""One file of figures for each mode, written after every figure, so that a run which was cut goes on where it ended.

Owns: the files' form; what makes an old file void (other sources, another device).
Reads: the source tree.
Never: imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "backends/cuda", "plugins/triton_kernels", "plugins/flashinfer", "tests/gpu")


def source_hash(root: Path = ROOT) -> str:
    """Of all Python, TOML and shell sources that a run depends on; those that are not there do not count."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".toml", ".sh") and not {"build", "tests", "__pycache__"} & set(p.relative_to(root / folder).parts)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Results:
    """The figures of one mode on one device. `facts` say where they come from. Several threads may measure at a time."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self._lock = path, threading.Lock()
        self.data: dict[str, Any] = {**facts, "date": time.strftime("%Y-%m-%d"), "sources": source_hash(), "finished": False, "figures": {}}
        old = read(path)
        if old is not None:
            same = all(old.get(name) == self.data[name] for name in ("sources", "device", "device_text", "sizes"))
            if same:
                self.data = old
            else:
                path.rename(path.with_suffix(f".{int(path.stat().st_mtime)}.json"))

    def has(self, name: str) -> bool:
        """Whether a figure is there already. One that failed is tried again."""
        return "error" not in self.data["figures"].get(name, {"error": ""})

    def put(self, name: str, figure: dict[str, Any]) -> None:
        with self._lock:
            self.data["figures"][name] = figure
            self._write()

    def finish(self) -> None:
        self.data["finished"] = True
        self._write()

    def measure(self, name: str, make: Callable[[], dict[str, Any]]) -> bool:
        """Make a figure unless it is there; what it raises is kept with it, and the next is tried. Whether it is there."""
        if not self.has(name):
            started = time.perf_counter()
            try:
                self.put(name, {**make(), "took_s": round(time.perf_counter() - started, 2)})
            except Exception as error:  # noqa: BLE001  whatever stops one figure must not stop the others
                self.put(name, {"error": f"{type(error).__name__}: {error}"})
        print(line(name, self.data["figures"][name]), flush=True)
        return self.has(name)

    def _write(self) -> None:
        """Whole or not at all: a run may be killed at any moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        os.replace(temporary, self.path)


def read(path: Path) -> dict[str, Any] | None:
    """An older file; None where there is none that can be read."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data if isinstance(data.get("figures"), dict) else None
    except (OSError, ValueError, AttributeError):
        return None


def line(name: str, figure: dict[str, Any]) -> str:
    """One figure for people."""
    if "error" in figure:
        return f"  {name:<52} FAILED  {figure['error']}"
    if figure.get("status") == "unavailable":
        return f"  {name:<52} unavailable: {figure['reason']}"
    text = f"  {name:<52} {figure['value']:>10.4g} {figure['unit']}"
    if "share" in figure:
        text += f"   {figure['share']:.0%} of {figure['of']}"
    if "target" in figure:
        text += f"   target {figure['target']:g}: {'met' if figure['met'] else 'MISSED'}"
    return text
