"""Observers of an engine, off the step path: a thread hands them what was said since it last looked.

Owns: the thread, the queue, and core's own observer, the statistics line of `LLM(..., disable_log_stats=False)`.
Reads: `extensions`, `messages`.
Never: delays a step; lets an observer's fault reach anybody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

from oarlock import extensions
from oarlock.config.sections import EngineConfig
from oarlock.errors import PIP, ConfigError, PluginError
from oarlock.messages import EngineOutputs

log = logging.getLogger("oarlock.engine")
EVERY_S = 1.0
STATS_EVERY_S = 10.0
MAX_QUEUED = 20_000  # steps; an observer that hangs loses the oldest, and a warning says how many
CLOSE_S = 2.0


class Sink(Protocol):
    """What an extension of kind "sink" makes."""

    def observe(self, steps: list[EngineOutputs]) -> None: ...

    # Optional: finished(records), a server's requests that have ended since it was last called, as `frontend.outputs.RequestRecord`s.

    def close(self) -> None: ...


class StatsLog:
    """A line every ten seconds in which something happened."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._tokens = 0
        self._prompt_tokens = 0  # of the engine's count, as last said

    def observe(self, steps: list[EngineOutputs]) -> None:
        self._tokens += sum(len(output.new_token_ids) for step in steps for output in step.outputs)
        if time.monotonic() - self._since >= STATS_EVERY_S:
            self._say(steps[-1])

    def _say(self, last: EngineOutputs) -> None:
        s, seconds = last.stats, time.monotonic() - self._since
        log.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f %%, prefix hits %.1f %%",
            (s.num_prompt_tokens - self._prompt_tokens) / seconds, self._tokens / seconds, s.num_running, s.num_waiting,
            100 * s.num_used_blocks / max(1, s.num_blocks), 100 * s.prefix_hits / max(1, s.prefix_queries),
        )  # fmt: skip
        self._since, self._tokens, self._prompt_tokens = time.monotonic(), 0, s.num_prompt_tokens

    def close(self) -> None:
        """Nothing is kept."""


class Feed:
    """`put` never waits. One thread serves every observer; it sleeps while nothing happens."""

    def __init__(self, sinks: dict[str, Sink]) -> None:
        self._sinks = sinks
        self._queue: deque[EngineOutputs] = deque(maxlen=MAX_QUEUED)
        self._ended: deque[Any] = deque(maxlen=MAX_QUEUED)
        self._lost = 0
        self._news, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="oarlock-sinks", daemon=True)
        self._thread.start()

    def put(self, outputs: EngineOutputs) -> None:
        """Called after each step, on the thread that steps or that reads the engine's messages."""
        self._lost += len(self._queue) == MAX_QUEUED
        self._queue.append(outputs)
        self._news.set()

    def note(self, record: Any) -> None:
        """Called for each request that has ended, on the same thread."""
        self._ended.append(record)
        self._news.set()

    def close(self) -> None:
        """Hand over what is left, and end. Idempotent."""
        self._closing.set()
        self._news.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._news.wait()
            self._closing.wait(EVERY_S)  # let a batch gather
            self._news.clear()
            self._hand_over()
        for name in list(self._sinks):
            self._call(name, "close")

    def _hand_over(self) -> None:
        if self._lost:
            log.warning("observers were too slow: %d steps were not shown to them", self._lost)
            self._lost = 0
        steps, ended = ([queue.popleft() for _ in range(len(queue))] for queue in (self._queue, self._ended))
        for name in list(self._sinks):
            if steps:
                self._call(name, "observe", list(steps))
            if ended and hasattr(self._sinks.get(name), "finished"):
                self._call(name, "finished", list(ended))

    def _call(self, name: str, method: str, *arguments: Any) -> None:
        try:
            getattr(self._sinks[name], method)(*arguments)
        except Exception as error:  # noqa: BLE001 - an observer never ends what it observes
            log.error("the sink %s failed and is no longer called: %s: %s", name, type(error).__name__, error)
            del self._sinks[name]


def make_feed(config: EngineConfig, device: str, own: dict[str, Sink] | None = None) -> Feed | None:
    """A feed of `own` observers and every plugin's that takes part; None when nobody observes.

    Raises:
        PluginError: a plugin's observer cannot be made. ConfigError: none sends spans, and some were asked for.
    """
    parts = extensions.parts("sink", device)
    if config.observability.otlp_traces_endpoint is not None and all(part.name != "otel" for _, part in parts):
        option = "--otlp-traces-endpoint"
        raise ConfigError(f"{option} needs a package that sends spans, and none is installed; run {PIP} ./plugins/otel", option=option)
    sinks: dict[str, Sink] = dict(own or {})
    for plugin, part in parts:
        factory = extensions.load(part)
        try:
            made = factory(config)
        except Exception as error:
            raise PluginError(f"the sink {part.name} of {plugin.distribution} cannot be made: {error}") from error
        if made is not None:
            sinks[f"{part.name} ({plugin.distribution})"] = made
    return Feed(sinks) if sinks else None
