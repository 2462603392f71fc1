"""What plugins say about a configuration before an engine starts: their options, the changes they need, the problems they see.

Owns: `adjust`, `check`, `complete_options`, and every message that names a plugin's change.
Reads: `config.sections`, `config.resolve`, `config.options`, `plugins`.
Never: imports torch; changes what the user typed; runs more than once for an engine.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pluggy

from oarlock.backend_api import ConfigChange, DeviceSpec, Problem
from oarlock.config.options import OPTIONS
from oarlock.config.options.plugins import TARGET, keyword
from oarlock.config.resolve import check_relations
from oarlock.config.sections import EngineConfig, ServerConfig
from oarlock.errors import ConfigError, PluginError, UnsupportedByBackend
from oarlock.model_summary import ModelSummary
from oarlock.plugins import Catalogue, collect_named

log = logging.getLogger("oarlock.plugins")
# Read before any plugin is asked: the device's choice, the checkpoint's files, and what the front end has acted on.
SETTLED = ("model.", "device.device", "device.options", "observability.", "scheduler.max_waiting_requests", "scheduler.max_queue", "scheduler.num_owners")


def complete_options(config: EngineConfig, device: str, catalogue: Catalogue) -> EngineConfig:
    """The configuration with every option of the plugins that take part, typed or default.

    Raises:
        ConfigError: an option was typed whose plugin takes no part on this device.
    """
    values: dict[str, Any] = {}
    for plugin in catalogue.plugins:
        for spec in plugin.options:
            name = keyword(spec)
            if plugin.serves(device):
                values[name] = config.device.options.get(name, spec.default)
            elif TARGET + name in config.typed:
                theirs = " or ".join(f"--device {d.name}" for d in plugin.devices)
                raise ConfigError(f"--{name.replace('_', '-')} is of {plugin.distribution} and does nothing on {device}; leave it out, or take {theirs}")
    return replace(config, device=replace(config.device, options=values))


def adjust(config: EngineConfig, device: DeviceSpec, manager: pluggy.PluginManager) -> EngineConfig:
    """Ask for changes, and apply them in order; each is logged with its reason.

    Raises:
        PluginError: a change of what the user typed, of what is settled, of no field, or to a value that the field cannot hold.
        ConfigError: the changed configuration contradicts itself.
    """
    changes = collect_named(manager, "adjust_config", config=config, device=device)
    for plugin, change in changes:
        if not isinstance(change, ConfigChange):
            raise PluginError(f"plugin {plugin}: its hook adjust_config yielded {type(change).__name__} instead of ConfigChange")
        config, before = _apply(config, change, plugin, device.name)
        if before != change.value:
            log.warning("%s: %s is now %s (was %s), because %s", plugin, _flag(change.path), change.value, before, change.reason)
    if changes:
        check_relations(config, ServerConfig(), frozenset(config.typed))
    return config


def _apply(config: EngineConfig, change: ConfigChange, plugin: str, device: str) -> tuple[EngineConfig, Any]:
    """(changed configuration, the value before)."""
    section_name, _, field = change.path.partition(".")
    section: Any = getattr(config, section_name, None)
    hints = get_type_hints(type(section)) if section is not None and section_name != "typed" else {}
    if field not in hints or change.path.startswith(SETTLED):
        why = "is settled before plugins are asked" if field in hints else "is no field of the configuration"
        raise PluginError(f"plugin {plugin} asks to change {change.path}, which {why}; upgrade or uninstall the plugin")
    before = getattr(section, field)
    if change.path in config.typed and before != change.value:
        raise PluginError(
            f"{_flag(change.path)} {before} was given, but {plugin} needs {change.value} on device {device}, because {change.reason}; "
            f"leave {_flag(change.path)} out, or take another --device"
        )
    if not _holds(hints[field], change.value):
        raise PluginError(f"plugin {plugin} asks to set {change.path} to {change.value!r}, which it cannot hold; upgrade or uninstall the plugin")
    changed: dict[str, Any] = {section_name: replace(section, **{field: change.value})}
    return replace(config, **changed), before


def _flag(path: str) -> str:
    return next((f"--{o.name}" for o in OPTIONS if o.target == path and o.fate == "live"), path)


def _holds(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_holds(part, value) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    return type(value) is (origin or hint)


def check(config: EngineConfig, model: ModelSummary, device: DeviceSpec, manager: pluggy.PluginManager) -> None:
    """Ask what stands against this model: warnings are logged, errors end the start.

    Raises:
        UnsupportedByBackend: every error, with its remedy.
    """
    errors = []
    for plugin, problem in collect_named(manager, "check_model", model=model, config=config, device=device):
        if not isinstance(problem, Problem) or problem.severity not in ("error", "warning"):
            raise PluginError(f"plugin {plugin}: its hook check_model yielded {problem!r} instead of a Problem")
        text = f"{problem.text}{f'; {problem.remedy}' if problem.remedy else ''} ({plugin})"
        if problem.severity == "error":
            errors.append(text)
        else:
            log.warning("%s", text)
    if errors:
        raise UnsupportedByBackend(f"{config.model.model} cannot be served on {device.name}: {'. '.join(errors)}")
