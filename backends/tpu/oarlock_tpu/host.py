"""What the host says of TPUs, from /sys, /dev, the environment and package metadata. Standard library only; some milliseconds.

Owns: which PCI functions are TPU chips, whether this user may open them, and what the installed packages lack.
Reads: /sys/bus/pci, /dev, environment variables, the metadata of installed packages.
Never: imports torch, jax or libtpu; opens a device; raises.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")  # replaced in tests
VENDOR = "0x1ae0"  # Google; its network cards have it too
ON_HOST = "OARLOCK_TPU_ON_HOST"  # "1": no TPU, the same programs on JAX's CPU
NEEDED = ("torch", "torchax", "jax", "libtpu")  # import names


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of chip. Sizes as the vendor documents them; `topology` is what its compiler calls the smallest host."""

    name: str
    memory_gib: int  # HBM of one chip
    topology: str


# PCI device id -> chip
CHIPS = {
    "0x0027": Chip("v3", 32, "v3:2x2"),
    "0x005e": Chip("v4", 32, "v4:2x2x1"),
    "0x0062": Chip("v5p", 95, "v5p:2x2x1"),
    "0x0063": Chip("v5e", 16, "v5e:2x2"),
    "0x006f": Chip("v6e", 32, "v6e:2x2"),
    "0x0076": Chip("tpu7x", 192, "tpu7x:2x2x1"),
}


def is_simulated() -> bool:
    """Whether the user asked for JAX's CPU in the place of a TPU."""
    return os.environ.get(ON_HOST, "") not in ("", "0")


def environment() -> tuple[tuple[str, str], ...]:
    """Variables that jax and libtpu read when they are imported."""
    if is_simulated():
        # libtpu is loaded to compile only, and never holds a chip: the last lets several processes do so.
        return (("JAX_PLATFORMS", "cpu"), ("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"))
    return (("JAX_PLATFORMS", "tpu,cpu"),)


def chips() -> list[Chip]:
    """The chips on the PCI bus, in its order."""
    found = []
    for folder in sorted((ROOT / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor") == VENDOR and (chip := CHIPS.get(_read(folder / "device"))):
            found.append(chip)
    return found


def nodes() -> list[str]:
    """Device nodes of chips: /dev/accelN of the older driver, /dev/vfio/N of the newer. Others may own some of the latter."""
    paths = [*sorted((ROOT / "dev").glob("accel[0-9]*")), *sorted((ROOT / "dev/vfio").glob("[0-9]*"))]
    return ["/" + str(path.relative_to(ROOT)) for path in paths]


def openable(names: list[str]) -> list[str]:
    return [name for name in names if os.access(ROOT / name.lstrip("/"), os.R_OK | os.W_OK)]


def announced() -> str:
    """What the environment of a cloud machine says it has ("v5litepod-8"); "" when it says nothing."""
    return os.environ.get("TPU_ACCELERATOR_TYPE", "") or os.environ.get("TPU_NAME", "")


def missing(needed: tuple[str, ...] = NEEDED) -> list[str]:
    """Packages that a worker needs and that are not installed. Looks for files, imports nothing."""
    return [name for name in needed if importlib.util.find_spec(name) is None]


def memory() -> tuple[int, int]:
    """(available, total) bytes of the host: what JAX's CPU can take."""
    found = {}
    for line in _read(ROOT / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("memavailable", "memtotal"):
            found[name] = int(rest.split()[0]) << 10
    return found.get("memavailable", 0), found.get("memtotal", 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, ValueError):
        return ""
