"""What the host says beside the driver: PCI, device files, the installed torch, CUDA_VISIBLE_DEVICES. Standard library only.

Owns: whether NVIDIA hardware is here, what of it may be used, and for which CUDA torch was built.
Reads: /sys, /dev, torch's folder, the environment, `nvml`.
Never: imports torch, opens a device, raises.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from oarlock_cuda.nvml import Board, Gpu

ROOT = Path("/")  # replaced in tests
VENDOR, DISPLAY = "0x10de", "0x03"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def hardware() -> str:
    """Where an NVIDIA GPU was seen without asking the driver: "PCI 0000:01:00.0", "/dev/nvidia0"; "": nowhere."""
    for folder in sorted((ROOT / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor") == VENDOR and _read(folder / "class").startswith(DISPLAY):
            return f"PCI {folder.name}"
    nodes = [*sorted((ROOT / "dev").glob("nvidia[0-9]*")), *sorted((ROOT / "usr/lib/wsl/lib").glob("libcuda.so*"))]
    return f"/{nodes[0].relative_to(ROOT)}" if nodes else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, ValueError):
        return ""


def torch_cuda() -> tuple[str, tuple[int, int] | None]:
    """(version of the installed torch, the CUDA that it was built for); ("", None): no torch; (…, None): one without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return "", None
    text = _source(Path(spec.origin).parent / "version.py")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    built = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return version.group(1) if version else "of unknown version", (int(built.group(1)), int(built.group(2))) if built else None


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def usable(boards: Sequence[Board]) -> tuple[list[Gpu], str]:
    """(what CUDA will show, why there is nothing).

    CUDA shows whole GPUs or one instance of a GPU that is cut, never more than one instance. CUDA_VISIBLE_DEVICES chooses and orders them; an
    entry that names nothing ends the list. Its numbers may count in another order than the driver's, so that only how many there are is sure.
    """
    whole = [board.gpu for board in boards if not board.is_cut]
    parts = [instance for board in boards for instance in board.instances]
    shown = whole or parts[:1]
    asked = os.environ.get(VISIBLE)
    if asked is not None:
        shown = _chosen(asked, whole, parts, len(boards))
    if shown:
        return shown, ""
    if asked is not None:
        return [], f"{VISIBLE}={asked} shows none of them"
    return [], "it is in MIG mode and has no instance"


def _chosen(asked: str, whole: list[Gpu], parts: list[Gpu], count: int) -> list[Gpu]:
    found: list[Gpu] = []
    for entry in asked.split(","):
        name = entry.strip()
        if name.isascii() and name.isdigit() and int(name) < count:
            found += (whole or parts)[int(name) : int(name) + 1] or (whole or parts)[:1]
        elif name.startswith(("GPU-", "MIG-")) and (fits := [gpu for gpu in (*whole, *parts) if gpu.uuid.startswith(name)]):
            found.append(fits[0])
        else:
            break
    cut = [gpu for gpu in found if gpu in parts]
    return cut[:1] if cut else found
