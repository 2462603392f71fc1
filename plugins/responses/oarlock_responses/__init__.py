"""The entry point: OpenAI's Responses API as routes of the server. Light: it imports its routes when a server adds them.

Owns: the records of the routes and of the options.
Reads: `oarlock.backend_api`.
Never: knows a model or the engine.
"""

from __future__ import annotations

from oarlock.backend_api import Extension, OptionSpec, hookimpl


@hookimpl
def options() -> list[OptionSpec]:
    """How much a server remembers."""
    return [
        OptionSpec("responses", "max-stored", "int", 1000, "Responses kept in memory for retrieval and previous_response_id, the oldest dropped first. 0: none."),
        OptionSpec("responses", "max-stored-mib", "int", 256, "MiB that they may take with their conversations; the oldest are dropped first."),
    ]


@hookimpl
def extensions() -> list[Extension]:
    """/v1/responses and what is below it."""
    return [Extension("routes", "responses", "oarlock_responses.routes:add")]
