"""The entry point: a page for people at the server's root. Light: it reads the page when a server adds it.

Owns: the records of the route and of its switch.
Reads: `oarlock.backend_api`.
Never: knows a model or the engine.
"""

from __future__ import annotations

from oarlock.backend_api import Extension, OptionSpec, hookimpl


@hookimpl
def options() -> list[OptionSpec]:
    """The switch."""
    return [OptionSpec("ui", "", "bool", True, "The page at /: chat, live metrics, the memory plan.")]


@hookimpl
def extensions() -> list[Extension]:
    """GET /."""
    return [Extension("routes", "ui", "oarlock_ui.routes:add")]
