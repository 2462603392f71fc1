"""Which plugins are installed, which device this run uses, and why.

Owns: discovery over the entry points `oarlock.devices` and `oarlock.plugins`, version checks, the choice of a device,
    the plugin manager of a worker.
Reads: `backend_api` (light half), `hints`, `errors`.
Never: imports a heavy module; calls a hook once serving has begun (`hook_calls()` counts them).
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pluggy

from oarlock.backend_api import API_VERSION, PROJECT, DeviceSpec, Extension, Hooks, OptionSpec, ProbeResult
from oarlock.device_choice import DeviceRow, Selection, choose
from oarlock.errors import ApiVersionMismatch, PluginError
from oarlock.hints import Hint, load_hints

log = logging.getLogger("oarlock.plugins")
DEVICE_GROUP = "oarlock.devices"
PLUGIN_GROUP = "oarlock.plugins"
PROBE_LIMIT_MS = 50.0

_hook_calls = 0


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """One entry point of ours, imported or not."""

    name: str  # of the entry point
    group: str
    distribution: str
    version: str
    module: Any = None  # None: it could not be used
    error: str = ""  # one line: why not
    detail: str = ""  # the traceback
    devices: tuple[DeviceSpec, ...] = ()
    options: tuple[OptionSpec, ...] = ()
    extensions: tuple[Extension, ...] = ()

    def serves(self, device: str) -> bool:
        """Whether it takes part in a run on this device: its own package, and every feature plugin that works."""
        return not self.error and (self.group == PLUGIN_GROUP or any(spec.name == device for spec in self.devices))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything that discovery found."""

    plugins: tuple[FoundPlugin, ...]
    hints: tuple[Hint, ...] = field(default_factory=tuple)

    def broken(self) -> tuple[FoundPlugin, ...]:
        return tuple(p for p in self.plugins if p.error)

    def broken_text(self) -> str:
        """To be appended to a message about something unknown: a broken plugin may have brought it; "" when none is broken."""
        found = "; ".join(f"{p.distribution} ({p.error})" for p in self.broken())
        return f"; plugins that are broken and may have it: {found}; oarlock doctor shows why" if found else ""

    def rows(self) -> tuple[DeviceRow, ...]:
        """One row per device, probed now, best first; broken device packages last. Never raises."""
        rows = [_probe(plugin, spec) for plugin in self.plugins for spec in plugin.devices]
        rows.sort(key=lambda row: (-row.priority, row.device))
        return (*rows, *(DeviceRow.of_broken(p.name, p.distribution, p.version, p.error) for p in self.broken() if p.group == DEVICE_GROUP))


def discover(entries: Iterable[Any] | None = None, hints: Sequence[Hint] | None = None) -> Catalogue:
    """Import the light modules of all installed plugins. A broken one is recorded, never raised.

    `entries` and `hints` replace the installed ones in tests; an entry has `name`, `group`, `dist` and `load()`.
    """
    if entries is None:
        entries = (*metadata.entry_points(group=DEVICE_GROUP), *metadata.entry_points(group=PLUGIN_GROUP))
    plugins = tuple(_load(e) for e in sorted(entries, key=lambda e: (e.group, e.name, _dist(e)[0])))
    return Catalogue(plugins, tuple(load_hints() if hints is None else hints))


@cache
def installed() -> Catalogue:
    """What is installed, discovered once in this process."""
    return discover()


def _load(entry: Any) -> FoundPlugin:
    distribution, version = _dist(entry)
    found = {"name": entry.name, "group": entry.group, "distribution": distribution, "version": version}
    try:
        module = entry.load()
        manager = _manager()
        _register(manager, module, entry.name)
        _require_api(module, distribution)
        devices = tuple(collect(manager, "devices")) if entry.group == DEVICE_GROUP else ()
        _validate_devices(devices, distribution, is_device=entry.group == DEVICE_GROUP)
        options, extensions = tuple(collect(manager, "options")), tuple(collect(manager, "extensions"))
        _validate_parts(options, extensions, distribution)
        return FoundPlugin(**found, module=module, devices=devices, options=options, extensions=extensions)
    except Exception as error:  # noqa: BLE001 - whatever a stranger's module does at import is recorded, and must not end us
        first = str(error).strip().splitlines()[:1]
        return FoundPlugin(**found, error=f"{type(error).__name__}: {first[0] if first else ''}".rstrip(": "), detail=traceback.format_exc())


def _dist(entry: Any) -> tuple[str, str]:
    dist = getattr(entry, "dist", None)
    return (dist.name, dist.version) if dist is not None else ("unknown", "?")


def _register(manager: pluggy.PluginManager, module: Any, name: str) -> None:
    """Register and check: hooks of unknown names and wrong signatures are errors."""
    manager.register(module, name=name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{name} implements a hook that Oarlock does not have: {error}") from error
    for hook in (hook for hook in vars(Hooks) if not hook.startswith("_") and inspect.isroutine(getattr(module, hook, None))):
        files = [Path(folder) / f"{hook}{end}" for folder in getattr(module, "__path__", ()) for end in (".py", "/__init__.py")]
        hiding = next((file for file in files if file.is_file()), None)
        if hiding is not None:  # Python sets it as an attribute of the package; a worker would find a module in place of the hook
            raise PluginError(f"{name}: once {hiding} is imported, it hides the hook {hook}() of {module.__name__}; give the file another name")


def _require_api(module: Any, distribution: str) -> None:
    """A module may say with OARLOCK_API = (major, minor) what it was built for. That of a device is judged when it is used."""
    wanted = getattr(module, "OARLOCK_API", None)
    problem = api_problem(distribution, tuple(wanted)) if wanted is not None else ""
    if problem:
        raise ApiVersionMismatch(problem)


def _validate_devices(devices: Sequence[DeviceSpec], distribution: str, *, is_device: bool) -> None:
    """The records are of the right type and name nothing impossible."""
    if is_device and not devices:
        raise PluginError(f"{distribution} registers under {DEVICE_GROUP} but its hook devices() yields no DeviceSpec")
    for spec in devices:
        if not isinstance(spec, DeviceSpec):
            raise PluginError(f"{distribution}: devices() yielded {type(spec).__name__} instead of DeviceSpec")
        if not spec.name or spec.name == "auto" or spec.name != spec.name.strip().lower():
            raise PluginError(f"{distribution}: {spec.name!r} is no name for a device; take lower case, not 'auto'")
        if not callable(spec.probe) or ":" not in spec.factory:
            raise PluginError(f"{distribution}: device {spec.name} needs a callable probe and a factory 'package.module:Class'")


def _validate_parts(options: Sequence[OptionSpec], extensions: Sequence[Extension], distribution: str) -> None:
    for option in options:
        if not isinstance(option, OptionSpec):
            raise PluginError(f"{distribution}: options() yielded {type(option).__name__} instead of OptionSpec")
        if not re.fullmatch(r"[a-z][a-z0-9]*", option.namespace) or not re.fullmatch(r"([a-z][a-z0-9]*(-[a-z0-9]+)*)?", option.name):
            raise PluginError(f"{distribution}: --{option.flag} is no name for an option; take lower case and single dashes")
        kind = {"str": str, "int": int, "float": float, "bool": bool}.get(option.type)
        if kind is None or (option.default is not None and type(option.default) is not kind):
            raise PluginError(f"{distribution}: --{option.flag} is of type {option.type!r} with default {option.default!r}")
    kinds = get_args(get_type_hints(Extension)["kind"])
    for part in extensions:
        if not isinstance(part, Extension):
            raise PluginError(f"{distribution}: extensions() yielded {type(part).__name__} instead of Extension")
        if part.kind not in kinds or not part.name or not part.factory:
            raise PluginError(f"{distribution}: {part} needs a name, a factory and one of the kinds {', '.join(kinds)}")


def api_problem(distribution: str, wanted: tuple[int, int], ours: tuple[int, int] = API_VERSION) -> str:
    """Why a plugin of API `wanted` cannot run here, naming the side to upgrade; "" when it can."""
    if not (isinstance(wanted, tuple) and len(wanted) == 2 and all(type(part) is int for part in wanted)):
        return f"{distribution} gives api_version {wanted!r}: it must be a tuple of two whole numbers, such as {ours}"
    if wanted[0] == ours[0] and wanted[1] <= ours[1]:
        return ""
    text = f"{distribution} was built for backend API {wanted[0]}.{wanted[1]}, this Oarlock has {ours[0]}.{ours[1]}"
    return f"{text}: upgrade oarlock" if wanted > ours else f"{text}: upgrade {distribution}"


def _probe(plugin: FoundPlugin, spec: DeviceSpec) -> DeviceRow:
    """Run one probe, timed. A probe that raises, or answers something else, is a row with status error."""
    problem = api_problem(plugin.distribution, spec.api_version)
    started = time.perf_counter()
    if problem:
        result = ProbeResult("error", problem.partition(": ")[0], problem.partition(": ")[2])
    else:
        try:
            result = spec.probe()
            if not isinstance(result, ProbeResult):
                result = ProbeResult("error", f"its probe answered {type(result).__name__} instead of ProbeResult", f"upgrade {plugin.distribution}")
        except Exception as error:  # noqa: BLE001 - a probe never ends us
            at = traceback.extract_tb(error.__traceback__)[-1]
            result = ProbeResult("error", f"its probe raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})", f"mend or upgrade {plugin.distribution}, or uninstall it")
    probe_ms = (time.perf_counter() - started) * 1000
    return DeviceRow(spec.name, plugin.distribution, plugin.version, spec.api_version, result, spec.priority, spec, probe_ms, bool(problem))


def select_device(name: str = "auto", catalogue: Catalogue | None = None) -> Selection:
    """The device of this run: `.spec`, `.probe`, and `.notes` to log.

    Raises:
        BackendNotFound: no installed package provides it; the message says how to get one, if that is possible.
        BackendUnavailable: installed, but not usable here; or `auto` saw an accelerator that it cannot use.
        ApiVersionMismatch: built for another backend API.
        PluginError: broken, provided twice, or two accelerators of equal priority under `auto`.
    """
    catalogue = installed() if catalogue is None else catalogue
    return choose(name, catalogue.rows(), catalogue.hints)


def apply_environment(spec: DeviceSpec) -> None:
    """Set the variables that the device wants before torch is imported, unless the user has set them. Warns when it is too late."""
    wanted = {key: value for key, value in spec.environment if key not in os.environ}
    if wanted and "torch" in sys.modules:
        shown = " ".join(f"{key}={value}" for key, value in wanted.items())
        log.warning(
            "torch was imported before %s could be set, so its threads may spin while they wait, and steps may take many times longer: "
            "make the LLM before torch is imported, or set them in the environment", shown,
        )  # fmt: skip
    os.environ.update(wanted)


# ---------------------------------------------------------------- hooks
def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.add_hookcall_monitoring(_count, lambda *_: None)
    return manager


def _count(*_: Any) -> None:
    global _hook_calls
    _hook_calls += 1


def hook_calls() -> int:
    """How many hooks this process has called so far. Constant while serving."""
    return _hook_calls


def worker_plugins(device: str, catalogue: Catalogue | None = None) -> pluggy.PluginManager:
    """The plugins of one run: the package of the chosen device, and every feature plugin that works.

    Raises:
        PluginError: no package, or more than one, provides the device.
    """
    catalogue = installed() if catalogue is None else catalogue
    chosen = [p for p in catalogue.plugins if any(spec.name == device for spec in p.devices)]
    if len(chosen) != 1:
        names = ", ".join(p.distribution for p in chosen) or "no installed package"
        raise PluginError(f"device {device} is provided by {names}; exactly one package must provide it")
    manager = _manager()
    for plugin in (*chosen, *(p for p in catalogue.plugins if p.group == PLUGIN_GROUP and p.serves(device))):
        if not any(registered is plugin.module for registered in manager.get_plugins()):
            _register(manager, plugin.module, f"{plugin.distribution}:{plugin.name}")
    return manager


def collect(manager: pluggy.PluginManager, hook: str, **arguments: Any) -> list[Any]:
    """All records that plugins answer to one hook, in one list. Raises as `collect_named`."""
    return [record for _, record in collect_named(manager, hook, **arguments)]


def collect_named(manager: pluggy.PluginManager, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
    """(plugin, record) for everything that plugins answer to one hook.

    Raises:
        PluginError: a plugin's hook raised, or yielded no list; the plugin is named.
    """
    records: list[tuple[str, Any]] = []
    everyone = manager.get_plugins()
    for name, plugin in manager.list_name_plugin():
        if plugin is None:
            continue
        caller = manager.subset_hook_caller(hook, everyone - {plugin})
        try:
            answers = caller(**arguments)
        except Exception as error:
            raise PluginError(f"plugin {name}: its hook {hook} raised {type(error).__name__}: {error}") from error
        for answer in answers:
            if not isinstance(answer, (list, tuple)):
                raise PluginError(f"plugin {name}: its hook {hook} returned {type(answer).__name__}; a list is needed")
            records += [(name, record) for record in answer]
    return records


__all__ = [
    "Catalogue",
    "DeviceRow",
    "FoundPlugin",
    "Selection",
    "api_problem",
    "apply_environment",
    "collect",
    "collect_named",
    "discover",
    "hook_calls",
    "installed",
    "select_device",
    "worker_plugins",
]
