"""Parts that plugins add to core, found by kind and name.

Owns: which part serves a name, and the words when it is ambiguous or not for this device.
Reads: `plugins`.
Never: imports a part before it is used; calls a hook (discovery has).
"""

from __future__ import annotations

import importlib
from typing import Any

from oarlock.backend_api import Extension
from oarlock.errors import PluginError
from oarlock.plugins import Catalogue, FoundPlugin, installed


def parts(kind: str, device: str | None = None, catalogue: Catalogue | None = None) -> list[tuple[FoundPlugin, Extension]]:
    """All parts of one kind; with `device`, those that take part in a run on it."""
    catalogue = installed() if catalogue is None else catalogue
    return [(p, e) for p in catalogue.plugins if device is None or p.serves(device) for e in p.extensions if e.kind == kind]


def find(kind: str, name: str, device: str | None = None, *, own: bool = False, catalogue: Catalogue | None = None) -> Extension | None:
    """The part of highest priority with this name. None: there is none, or core's own (`own`: it has one, of priority 0) serves.

    Raises:
        PluginError: two parts of equal priority.
    """
    found = [(e.priority, p.distribution, e) for p, e in parts(kind, device, catalogue) if e.name == name]
    ranked: list[tuple[int, str, Extension | None]] = sorted([*found, *([(0, "oarlock itself", None)] if own else [])], key=lambda f: -f[0])
    if len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
        raise PluginError(f"{kind} {name} comes from {ranked[0][1]} and {ranked[1][1]} with equal priority {ranked[0][0]}; uninstall one")
    return ranked[0][2] if ranked else None


def load(part: Extension) -> Any:
    """Import what the part's factory names, "package.module:attribute" or a module.

    Raises:
        PluginError: it cannot be imported.
    """
    module, _, attribute = part.factory.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split(".") if attribute else ():
            found = getattr(found, name)
    except Exception as error:
        raise PluginError(f"{part.kind} {part.name}: {part.factory} cannot be imported: {type(error).__name__}: {error}") from error
    return found
