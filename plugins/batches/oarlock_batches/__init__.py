"""The entry point: files and batches as routes of the server, and `oarlock run-batch`. Light: it imports its routes when a server adds them.

Owns: the records of the routes, the command and the options.
Reads: `oarlock.backend_api`.
Never: knows a model or the engine.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import Extension, OptionSpec, Problem, hookimpl


@hookimpl
def options() -> list[OptionSpec]:
    """What a server keeps in memory, and how much of it at once."""
    return [
        OptionSpec("batches", "max-files", "int", 200, "Files kept in memory."),
        OptionSpec("batches", "max-mib", "int", 512, "MiB that all files and the answers of open batches may take."),
        OptionSpec("batches", "max-lines", "int", 50000, "Requests in one batch."),
        OptionSpec("batches", "max-batches", "int", 100, "Batches kept, the oldest that have ended are dropped first; as many may be open."),
        OptionSpec("batches", "concurrency", "int", 16, "Requests of all batches that are answered at once."),
    ]


@hookimpl
def check_model(model: Any, config: Any, device: Any) -> list[Problem]:
    """Whether the options are sensible numbers."""
    found = {one.flag: config.device.options.get(one.flag.replace("-", "_"), 1) for one in options()}
    return [Problem("error", f"--{flag} is {value}, and it must be at least 1", "give more, or leave it out") for flag, value in found.items() if value < 1]


@hookimpl
def extensions() -> list[Extension]:
    """/v1/files, /v1/batches, and the same offline."""
    return [
        Extension("routes", "batches", "oarlock_batches.routes:add"),
        Extension("command", "run-batch", "oarlock_batches.command:main", help="answer a file of requests"),
    ]
