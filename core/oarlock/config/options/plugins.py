"""Option table: rows that installed plugins bring.

Owns: how an `OptionSpec` becomes an `Option`, and which executors may be named.
Reads: `config.option`, `plugins`.
Never: looks for plugins before a name is met that core does not have, or help is printed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from oarlock.backend_api import OptionSpec
from oarlock.config.option import Option
from oarlock.errors import PluginError
from oarlock.plugins import Catalogue, installed

TARGET = "device.options."


def keyword(spec: OptionSpec) -> str:
    """The key in `Device.options`, and the keyword of `LLM(...)`."""
    return spec.flag.replace("-", "_")


def plugin_options(taken: Collection[str], catalogue: Catalogue | None = None) -> dict[str, Option]:
    """Rows by name, of every plugin that works. `taken` are core's names.

    Raises:
        PluginError: two plugins, or a plugin and core, have one name.
    """
    found: dict[str, Option] = {}
    owner: dict[str, str] = dict.fromkeys(taken, "oarlock itself")
    for plugin in (installed() if catalogue is None else catalogue).plugins:
        for spec in plugin.options:
            name = spec.flag
            if name in owner:
                raise PluginError(f"option --{name} comes from {owner[name]} and {plugin.distribution}; uninstall one")
            owner[name] = plugin.distribution
            found[name] = Option(name, spec.type, spec.default, spec.help, TARGET + keyword(spec), group=f"Plugin {plugin.distribution}")
    return found


def with_extensions(option: Option) -> Option:
    """The row with the names that plugins add to its choices."""
    names = tuple(e.name for p in installed().plugins for e in p.extensions if e.kind == option.extended_by and e.name not in option.choices)
    return replace(option, choices=(*option.choices, *names), built=(*(option.built or ()), *names))
