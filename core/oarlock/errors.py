"""Every error that Oarlock raises on purpose, and how their messages show a value.

Owns: the error hierarchy and the machine-readable fields that travel with an error.
Reads: nothing.
Never: formats HTTP responses (`server.errors` does) or decides whether a fault is fatal (`engine` does).

A message says what happened, the offending value, the true limit and the remedy.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# How a package gets into this environment, as it is typed in this folder. An environment elsewhere is taken to be active: its path is nobody's affair.
_python = sys.executable.removeprefix(os.environ.get("PWD", "") + os.sep)
PIP = "pip install" if os.path.isabs(_python) else f"{_python} -m pip install"
CONTEXT_IS = "this model's maximum context length is"  # clients that shorten the conversation and try again look for these words


class OarlockError(Exception):
    """Base of every deliberate error."""


class ConfigError(OarlockError):
    """A flag or setting that cannot be honoured. `option` names it (a dotted path or `--flag`)."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class PluginError(OarlockError):
    """A plugin is broken, missing, ambiguous or of the wrong version."""


class BackendNotFound(PluginError):
    """No installed package provides the device that was asked for."""


class BackendUnavailable(PluginError):
    """The package is installed but its device cannot be used here; the message holds the probe's reason and remedy."""


class ApiVersionMismatch(PluginError):
    """A plugin was built for another backend API; the message says which side to upgrade."""


class RequestError(OarlockError):
    """A request that the client can fix. Fails that request only.

    `param` is the request field at fault (`"stop"`, `"messages[2].content"`), `code` a stable machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidParameter(RequestError, ValueError):
    """A field has a value that is not allowed. A ValueError too, as callers of other engines expect."""


class PromptTooLong(RequestError, ValueError):
    """Prompt plus requested tokens exceed the context, or can never fit in the KV cache."""


class QueueFull(RequestError):
    """The waiting queue is at its limit (code queue_full), or the request waited too long in it (queue_timeout); retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1, code: str = "queue_full") -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class ModelError(OarlockError):
    """The checkpoint cannot be served."""


class UnsupportedArchitecture(ModelError):
    """No model file, and no generic path, serves this architecture."""


class WeightMismatch(ModelError):
    """A tensor is missing, truncated, of the wrong shape, or left over; the message names it."""


class NotBuilt(OarlockError, NotImplementedError):
    """A known feature that this version does not have; the message names it and what serves instead."""


class UnsupportedByBackend(OarlockError):
    """The device declares that it cannot do this; the message names the capability and what it does offer."""


class WorkerError(OarlockError):
    """Something went wrong in a worker."""


class WorkerDied(WorkerError):
    """A worker process is gone."""


class OutOfDeviceMemory(WorkerError):
    """An allocation on the device failed; the message says needed and available."""


class EngineDead(OarlockError):
    """The engine has ended; every open request gets this."""


def show(value: Any) -> str:
    """A value as JSON would write it, shortened; containers by their kind only."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, int):
        return str(value) if -(10**30) < value < 10**30 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    return "an array" if isinstance(value, list) else "an object"
