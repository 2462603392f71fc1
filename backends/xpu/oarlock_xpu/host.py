"""What the host says of Intel GPUs, from /sys, /dev and the files of the installed torch. Standard library only; some milliseconds.

Owns: which PCI functions are GPUs that torch.xpu serves, and what stands in their way.
Reads: /sys/bus/pci, /dev/dri, torch's folder.
Never: imports torch, opens a device, raises.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")  # replaced in tests
VENDOR, DISPLAY = "0x8086", "0x03"

# Prefixes of PCI device ids, most special first: (prefix, name, memory in GiB where every card of it has the same or less).
# Cards with memory of their own; the graphics inside a processor is no reason to refuse the processor.
KNOWN: tuple[tuple[str, str, int | None], ...] = (
    ("0x0bda", "Data Center GPU Max 1100", 48),
    ("0x0bd", "Data Center GPU Max", 128),
    ("0x0b6", "Data Center GPU Max", 128),
    ("0x56c0", "Data Center GPU Flex 170", 16),
    ("0x56c1", "Data Center GPU Flex 140", 6),
    ("0x56", "Arc A series", 16),
    ("0xe20b", "Arc B580", 12),
    ("0xe20c", "Arc B570", 10),
    ("0xe211", "Arc Pro B60", 24),
    ("0xe212", "Arc Pro B50", 16),
    ("0xe20", "Arc B series", None),
    ("0xe21", "Arc B series", None),
    ("0xe22", "Arc B series", None),
)
TOO_OLD = "0x490"  # Iris Xe MAX: known hardware that torch.xpu does not serve
ARTEFACT = "lib/libtorch_xpu.so"  # in the folder of a torch that was built with XPU support


@dataclass(frozen=True, slots=True)
class Card:
    """One PCI function."""

    address: str  # "0000:03:00.0"
    device_id: str  # "0x56a0"
    name: str
    driver: str  # kernel driver that is bound, "xe" or "i915"; "": none
    nodes: tuple[str, ...]  # render nodes in /dev/dri; (): none
    memory_bytes: int | None  # at most; None: not known before the card is opened

    def is_openable(self) -> bool:
        return any(os.access(ROOT / "dev/dri" / node, os.R_OK | os.W_OK) for node in self.nodes)


def cards(include_too_old: bool = False) -> list[Card]:
    """Every Intel GPU with memory of its own, in PCI order."""
    found = []
    for folder in sorted((ROOT / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor") != VENDOR or not _read(folder / "class").startswith(DISPLAY):
            continue
        device_id = _read(folder / "device")
        known = next(((name, gib) for prefix, name, gib in KNOWN if device_id.startswith(prefix)), None)
        if known is None and include_too_old and device_id.startswith(TOO_OLD):
            known = "Iris Xe MAX", 4
        if known is None:
            continue
        nodes = tuple(sorted(path.name for path in folder.glob("drm/renderD*")))
        driver = folder / "driver"
        found.append(Card(folder.name, device_id, known[0], driver.resolve().name if driver.exists() else "", nodes, _memory(folder, known[1])))
    return found


def _memory(folder: Path, gib: int | None) -> int | None:
    """What the driver says (xe: bytes of each tile; i915: bytes of the card), else the table's bound."""
    told = [int(text, 0) for path in folder.glob("tile*/physical_vram_size_bytes") if (text := _read(path))]
    told = told or [int(text, 0) for path in folder.glob("drm/card*/lmem_total_bytes") if (text := _read(path))][:1]
    return sum(told) or (gib << 30 if gib else None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, ValueError):
        return ""


def torch_problem() -> str:
    """Why the installed torch cannot drive an Intel GPU; "" when it can, as far as its files tell. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return "torch is not installed"
    folder = Path(spec.origin).parent
    return "" if (folder / ARTEFACT).is_file() else f"the installed torch has no XPU support ({ARTEFACT} is not in it)"
