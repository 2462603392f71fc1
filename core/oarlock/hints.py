"""Hardware that Oarlock knows of, from hints.toml: is it here, and how is its package got?

Owns: reading hints.toml, presence tests, the install command.
Reads: hints.toml, /sys, /dev, the checkout this package may lie in.
Never: decides for a device; names one.
"""

from __future__ import annotations

import glob
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.errors import PIP

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class PciMatch:
    """A PCI function: all given parts match. Values as the files in /sys spell them, "0x10de"."""

    vendor: str
    class_prefix: str = ""
    devices: tuple[str, ...] = ()  # prefixes of the device id; (): any


@dataclass(frozen=True, slots=True)
class Hint:
    """One kind of known hardware."""

    device: str
    label: str  # "an NVIDIA GPU"
    package: str
    aliases: tuple[str, ...] = ()
    is_host: bool = False  # the machine's own processor
    is_present: bool = False
    evidence: str = ""  # what was found: a path, or a PCI address
    install: str = ""  # a command that works; "": there is none here
    source: str = ""  # its folder in the source of Oarlock; "": this version has no such backend
    is_simulated: bool = False  # for tests: missed only by who names it
    words: tuple[str, ...] = ()  # what people call it who do not know its name


def load_hints(root: str | Path = "/", checkout: str | Path | None = None) -> list[Hint]:
    """All hints, each tested against this machine. `root` and `checkout` are replaced in tests. Some milliseconds; never raises."""
    with open(_PACKAGE / "hints.toml", "rb") as file:
        entries = tomllib.load(file)["devices"]
    folder = _PACKAGE.parents[1] if checkout is None else Path(checkout)
    functions = _pci_functions(Path(root))
    hints = []
    for device, entry in entries.items():
        evidence = "" if entry.get("host") else _evidence(entry, Path(root), functions)
        hints.append(
            Hint(device, entry["label"], entry["package"], tuple(entry["aliases"]), bool(entry.get("host")), bool(evidence), evidence,
                 install_command(entry.get("source") or f"backends/{device}", entry["release"], folder), entry.get("source", ""),
                 bool(entry.get("simulated")), tuple(entry.get("words", ())))
        )  # fmt: skip
    return hints


def install_command(source: str, release: str, checkout: Path) -> str:
    """How a package can be had here: from its folder `source` in the checkout, else from a release, else not at all ("")."""
    folder = checkout / source
    if (folder / "pyproject.toml").is_file():
        return f"{PIP} {f'./{source}' if Path.cwd() == checkout else folder}"
    return release


def _pci_functions(root: Path) -> list[tuple[str, str, str, str]]:
    """(address, vendor, device, class) of every PCI function."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, device, kind = ((folder / name).read_text().strip().lower() for name in ("vendor", "device", "class"))
        except OSError:
            continue
        found.append((folder.name, vendor, device, kind))
    return found


def _evidence(entry: dict[str, Any], root: Path, functions: list[tuple[str, str, str, str]]) -> str:
    for pattern in entry.get("paths", ()):
        hit = next(iter(sorted(glob.glob(str(root / pattern.lstrip("/"))))), None)
        if hit is not None:
            return "/" + str(Path(hit).relative_to(root))
    matches = [PciMatch(m["vendor"], m.get("class", ""), tuple(m.get("devices", ()))) for m in entry.get("pci", ())]
    for address, vendor, device, kind in functions:
        for match in matches:
            if vendor == match.vendor and kind.startswith(match.class_prefix) and (not match.devices or device.startswith(match.devices)):
                return f"PCI {address}"
    return ""
