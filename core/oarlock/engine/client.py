"""How a front end talks to an engine: submit, abort, receive. One protocol for both ways of running it.

Owns: `EngineClient` and its in-process form.
Reads: `messages`, `engine.core`.
Never: validates a request (the front end has) or touches text.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

from oarlock.messages import Abort, EngineInfo, EngineOutputs, EngineRequest


class EngineClient(abc.ABC):
    """Sync calls that return at once; outputs come through callbacks.

    A process client calls back on the event loop's thread; an in-process client calls back from inside `step()`.
    """

    info: EngineInfo

    def __init__(self) -> None:
        self.on_outputs: Callable[[EngineOutputs], None] = lambda outputs: None
        self.on_dead: Callable[[str], None] = lambda reason: None

    @abc.abstractmethod
    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises EngineDead when the engine has ended."""

    @abc.abstractmethod
    def abort(self, abort: Abort) -> None:
        """End a request or one branch; unknown ids are ignored (it may have ended meanwhile)."""

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether the engine can still serve."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""

    @abc.abstractmethod
    def shutdown(self, grace_s: float = 0.0) -> None:
        """Stop, ending what is open; idempotent."""
