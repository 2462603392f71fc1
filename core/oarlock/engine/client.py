"""How a front end talks to an engine: submit, abort, receive. One protocol for both ways of running it.

Owns: `EngineClient` and its in-process form.
Reads: `messages`, `engine.core`.
Never: validates a request (the front end has) or touches text.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from oarlock.engine.core import EngineCore
from oarlock.engine.sinks import Feed
from oarlock.errors import EngineDead
from oarlock.messages import Abort, EngineInfo, EngineOutputs, EngineRequest


class EngineClient(abc.ABC):
    """Sync calls that return at once; outputs come through callbacks.

    A process client calls back on the event loop's thread; an in-process client calls back from inside `step()`.
    """

    info: EngineInfo

    def __init__(self) -> None:
        self.on_outputs: Callable[[EngineOutputs], None] = lambda outputs: None
        self.on_dead: Callable[[str], None] = lambda reason: None
        self.feed: Feed | None = None  # observers

    def emit(self, outputs: EngineOutputs) -> None:
        """Pass on what the engine said after a step."""
        self.on_outputs(outputs)
        if self.feed is not None:
            self.feed.put(outputs)

    def note(self, record: Any) -> None:
        """Tell observers of a request that has ended (`frontend.outputs.RequestRecord`)."""
        if self.feed is not None:
            self.feed.note(record)

    def close_feed(self) -> None:
        """Let observers see the rest, and end them. Idempotent."""
        feed, self.feed = self.feed, None
        if feed is not None:
            feed.close()

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


class InProcessClient(EngineClient):
    """The engine in the calling thread: nothing happens outside `step`."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._core: EngineCore | None = core
        self.info = core.info

    def submit(self, request: EngineRequest) -> None:
        self._alive().add(request)

    def abort(self, abort: Abort) -> None:
        if self._core is not None:
            self._core.abort(abort)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self._core is not None and self._core.has_work()

    def step(self) -> EngineOutputs | None:
        """One step; its outputs are returned and passed to `on_outputs`. None when there is nothing to do.

        Raises:
            EngineDead: the engine has ended, now or before.
        """
        core = self._alive()
        if not core.has_work():
            return None
        try:
            outputs = core.step()
        except EngineDead as death:
            self.shutdown()
            self.on_dead(str(death))
            raise
        self.emit(outputs)
        return outputs

    def is_alive(self) -> bool:
        return self._core is not None

    def reset_prefix_cache(self) -> None:
        self._alive().reset_prefix_cache()

    def shutdown(self, grace_s: float = 0.0) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()
        self.close_feed()

    def _alive(self) -> EngineCore:
        if self._core is None:
            raise EngineDead("this engine has been shut down; make a new one")
        return self._core
