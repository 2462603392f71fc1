"""What the host says of Neuron devices and of the vendor's packages. Standard library only; some milliseconds.

Owns: the presence test, and the difference between the vendor's packages and their empty namesakes.
Reads: /dev, /sys/bus/pci, the metadata of installed packages, one environment variable.
Never: imports torch, opens a device, raises.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path("/")  # replaced in tests
VENDOR = "0x1d0f"
# PCI device id prefix -> (chip, bytes of memory of one logical core at most, whether TorchNeuron serves it)
CHIPS: tuple[tuple[str, str, int | None, bool], ...] = (
    ("0x706", "Inferentia", None, False),
    ("0x716", "Trainium", None, False),
    ("0x726", "Inferentia2", None, False),
    ("0x736", "Trainium2", 24 << 30, True),  # 96 GiB a chip, four logical cores of two physical ones
)
PACKAGES = ("torch-neuronx", "neuronx-cc")
FIRST_TORCHNEURON = (2, 13)  # before it, torch-neuronx was a PyTorch/XLA backend: another package of the same name
PLACEHOLDER_BYTES = 64 << 10  # the empty packages are 1 to 7 KB
OLDEST_PYTHON = (3, 12)
SIMULATE = "OARLOCK_NEURON_SIMULATE"


def is_simulated() -> bool:
    """Whether the user asked for the strict compiler on the host in place of a device."""
    return os.environ.get(SIMULATE, "") not in ("", "0")


def nodes() -> list[str]:
    """Device nodes of the driver, "/dev/neuron0"; one for each chip."""
    return sorted(f"/dev/{path.name}" for path in (ROOT / "dev").glob("neuron[0-9]*"))


def chips() -> list[tuple[str, str, int | None, bool]]:
    """(PCI address, chip, bytes of one logical core at most, served) of every known chip on the bus."""
    found = []
    for folder in sorted((ROOT / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor") == VENDOR:
            device = _read(folder / "device")
            found += [(folder.name, name, size, served) for prefix, name, size, served in CHIPS if device.startswith(prefix)]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, ValueError):
        return ""


def package_problem() -> str:
    """Why the installed packages cannot drive a device; "" when they can, as far as their metadata tell."""
    absent = []
    for name in PACKAGES:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if is_placeholder(found):
            return f"the installed {name} {found.version} is an empty placeholder, not the vendor's package"
        if name == "torch-neuronx" and _version(found.version) < FIRST_TORCHNEURON:
            return f"the installed torch-neuronx {found.version} is the older PyTorch/XLA backend; TorchNeuron begins with 2.13"
    if not absent:
        return ""
    old = f", and it needs Python 3.12 or newer (this is {sys.version_info[0]}.{sys.version_info[1]})" if sys.version_info < OLDEST_PYTHON else ""
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed{old}"


def is_placeholder(package: metadata.Distribution) -> bool:
    """A package of the right name without content: the vendor's hold hundreds of megabytes."""
    return sum(file.size or 0 for file in package.files or ()) < PLACEHOLDER_BYTES


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
