"""Fake entry points, probes and hints for the tests of discovery and choice."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oarlock.backend_api import Claims, DeviceSpec, ProbeResult, hookimpl
from oarlock.hints import Hint
from oarlock.plugins import DEVICE_GROUP, PLUGIN_GROUP, Catalogue, discover


@dataclass(frozen=True)
class Dist:
    name: str
    version: str = "1.2.3"


@dataclass(frozen=True)
class Entry:
    """What importlib.metadata gives for an entry point, as far as discovery looks at it."""

    name: str
    group: str
    dist: Dist
    load: Callable[[], Any] = field(compare=False)


def available(reason: str = "a fine one") -> ProbeResult:
    return ProbeResult("available", reason, claims=Claims())


def no_hardware() -> ProbeResult:
    return ProbeResult("no_hardware", "there is none")


def driver_problem() -> ProbeResult:
    return ProbeResult("driver_problem", "the chip is here but its driver is missing", "install the driver")


def unsupported() -> ProbeResult:
    return ProbeResult("unsupported", "the chip is too old", "use a newer one")


def raising() -> ProbeResult:
    raise OSError("libfoo.so: cannot open")


def device(name: str, probe: Callable[[], Any] = available, priority: int = 10, package: str = "", **settings: Any) -> Entry:
    """The entry point of a package that provides one device."""
    package = package or f"oarlock-{name}"
    spec = DeviceSpec(name, probe, f"oarlock_{name}.device:Device", package, priority, **settings)
    return Entry(name, DEVICE_GROUP, Dist(package), lambda: module(devices=lambda: [spec]))


def module(**hooks: Callable[..., Any]) -> types.ModuleType:
    """A plugin module whose hooks are these functions."""
    made = types.ModuleType("fake_plugin")
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))
    return made


def nothing() -> list[Any]:
    """A hook that answers no record."""
    return []


def feature(name: str, load: Callable[[], Any]) -> Entry:
    return Entry(name, PLUGIN_GROUP, Dist(f"oarlock-{name}"), load)


def broken(name: str, package: str = "") -> Entry:
    def load() -> Any:
        raise ImportError("No module named 'missing_part'")

    return Entry(name, DEVICE_GROUP, Dist(package or f"oarlock-{name}"), load)


HOST = Hint("host", "the processor of this machine", "oarlock-host", is_host=True, install="pip install ./backends/host")


def hint(name: str, *, present: bool = False, install: str = "", words: tuple[str, ...] = ()) -> Hint:
    seen = f"/dev/{name}0" if present else ""
    return Hint(name, f"a {name} chip", f"oarlock-{name}", (f"{name}-alias",), False, present, seen, install, words=words)


def catalogue(*entries: Entry, hints: tuple[Hint, ...] = (HOST,)) -> Catalogue:
    return discover(entries, hints)
