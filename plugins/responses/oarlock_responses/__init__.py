"""The entry point: OpenAI's Responses API as routes of the server. Light: it imports its routes when a server adds them.

Owns: the records of the routes and of the options.
Reads: `oarlock.backend_api`.
Never: knows a model or the engine.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import Extension, OptionSpec, Problem, hookimpl

LEAST = {"max-stored": 0, "max-stored-mib": 1}


@hookimpl
def options() -> list[OptionSpec]:
    """How much a server remembers."""
    return [
        OptionSpec("responses", "max-stored", "int", 1000, "Responses kept in memory for retrieval and previous_response_id, the oldest dropped first. 0: none."),
        OptionSpec("responses", "max-stored-mib", "int", 256, "MiB that they may take with their conversations; the oldest are dropped first."),
    ]


@hookimpl
def check_model(model: Any, config: Any, device: Any) -> list[Problem]:
    """Whether the options are sensible numbers."""
    found = {name: config.device.options.get(f"responses_{name.replace('-', '_')}", least) for name, least in LEAST.items()}
    return [Problem("error", f"--responses-{name} is {value}, and it must be at least {LEAST[name]}", "give more, or leave it out") for name, value in found.items() if value < LEAST[name]]


@hookimpl
def extensions() -> list[Extension]:
    """/v1/responses and what is below it."""
    return [Extension("routes", "responses", "oarlock_responses.routes:add")]
