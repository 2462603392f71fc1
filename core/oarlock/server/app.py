"""`run_server`: the life of a server process, from the listening socket to the exit code.

Owns: signals, the order of start and stop, the exit code.
Reads: `engine.launch`, `async_llm`, `server.*`.
Never: imports torch; answers a request itself.

The socket listens from the first moment and answers 503 until the model is there. SIGTERM and SIGINT drain; a second one ends
the process at once. A dead engine gives every open request an error, turns /health to 503 and ends the process with code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from oarlock.config.resolve import Resolved
from oarlock.logs import configure_logging
from oarlock.server.listen import listen, release, url

if TYPE_CHECKING:
    from oarlock.engine.launch import Launch
    from oarlock.engine.process_client import ProcessClient
    from oarlock.model_summary import ModelSummary
    from oarlock.server.state import ServerState

log = logging.getLogger("oarlock.server")
Result = TypeVar("Result")

FLUSH_S = 2.0  # for the last error events to reach their clients
STATS_EVERY_S = 10.0


def run_server(resolved: Resolved) -> int:
    """Serve until told to stop. Returns the exit code: 0 after a drain, 1 when the engine ended, 128 + signal when stopped while loading.

    Raises:
        OarlockError: the port is taken, the configuration, device or checkpoint cannot be honoured.
    """
    started = time.monotonic()
    configure_logging(resolved.engine.observability)
    for warning in resolved.warnings:
        log.warning("%s", warning)
    sock = listen(resolved.server)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Life(resolved, sock, started).run())
    finally:
        sock.close()
        release(resolved.server)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Life:
    """One run of one server."""

    def __init__(self, resolved: Resolved, sock: socket.socket, started: float) -> None:
        self.resolved, self.sock, self.started = resolved, sock, started
        self.stop, self.dead, self.launched = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.signal = 0
        self.client: ProcessClient | None = None
        self.launch: Launch | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        boot = loop.create_task(self._boot())
        # The engine process first: its imports take longest. A download may take minutes, and is answered 503 meanwhile.
        await self._first(boot, self.launched.wait(), self.stop.wait(), timeout=1.0)
        serving = None
        try:
            from oarlock.server.http import HttpServer
            from oarlock.server.routes import add_plugin_routes, make_app
            from oarlock.server.state import ServerState

            state = ServerState(self.resolved.engine, self.resolved.server, self.resolved.server.api_keys)
            app = make_app(state)
            http = HttpServer(app, self.resolved.server)
            serving = loop.create_task(http.serve(sockets=[self.sock]))
            await self._first(boot, self.stop.wait(), serving)
            if serving.done():
                serving.result()  # raises why it could not serve
            if not boot.done():
                self._kill_engine()  # nothing to drain, and a loading engine listens to nobody
                return 128 + self.signal
            booted = boot.result()  # raises why the engine did not start
            assert self.launch is not None
            state.engine = self.launch.config
            add_plugin_routes(app, self.launch.selection.spec.name)
            state.ready(*booted)
            gc.collect()
            gc.freeze()  # PERF: a full collection over all that was imported stops every stream for 100 ms
            self._watch_engine(state)
            self._say_ready(state)
            code = await self._serve(state)
            http.finish()
            await serving
            return code
        finally:
            await _end(boot)
            if serving is not None:
                await _end(serving)
            if self.client is not None:
                self.client.shutdown(0.0)

    # ---------------------------------------------------------------- start
    async def _boot(self) -> tuple[Any, Any, Any, ModelSummary, Any]:
        """(AsyncLLM, tokenizer, chat template, summary, parsers) of a started engine."""
        from oarlock.engine.launch import prepare

        engine, server = self.resolved.engine, self.resolved.server
        self.launch = await in_thread(lambda: prepare(engine))
        summary, device = self.launch.summary, self.launch.selection.spec.name
        from oarlock.server.parsing import load_parsers

        parsers = load_parsers(server, device)
        self.client = client = self.launch.process()
        self.launched.set()
        tokenizer, template = await in_thread(lambda: self._load_text(summary))

        from oarlock.async_llm import AsyncLLM
        from oarlock.frontend.inputs import InputLimits, InputProcessor

        await client.ready()
        processor = InputProcessor(client.info, tokenizer, summary, InputLimits.make(engine.model, server))
        return AsyncLLM(client, processor, tokenizer), tokenizer, template, summary, parsers

    def _load_text(self, summary: ModelSummary) -> tuple[Any, Any]:
        from oarlock.frontend.chat import load_chat_template
        from oarlock.frontend.tokenizer import load_tokenizer

        if self.resolved.engine.model.skip_tokenizer_init:
            return None, None
        tokenizer = load_tokenizer(summary, self.resolved.engine.model)
        return tokenizer, load_chat_template(self.resolved.server.chat_template, tokenizer, summary)

    def _watch_engine(self, state: ServerState) -> None:
        """Hear of the engine's end and of each of its steps, after `AsyncLLM` has."""
        client = self.client
        assert client is not None
        die, receive = client.on_dead, client.on_outputs

        def on_dead(reason: str) -> None:
            die(reason)
            self.dead.set()

        def on_outputs(outputs: Any) -> None:
            state.on_step(outputs)
            receive(outputs)

        client.on_dead, client.on_outputs = on_dead, on_outputs
        if not client.is_alive():
            self.dead.set()

    def _say_ready(self, state: ServerState) -> None:
        seconds = time.monotonic() - self.started
        where, info = url(self.resolved.server, self.sock), state.info
        text = f"Oarlock serves {state.names[0]} at {where} on {info.device} ({info.device_text}, {info.dtype}), ready after {seconds:.1f} s"
        if self.resolved.engine.observability.log_json:
            log.info("%s", text)
            return
        try:
            print(text, flush=True)
        except OSError:  # a full disk, or a reader that went: no reason not to serve
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    # ---------------------------------------------------------------- serve and stop
    async def _serve(self, state: ServerState) -> int:
        from oarlock.server.errors import unavailable
        from oarlock.server.state import Phase

        stats = asyncio.create_task(_log_stats(state)) if self.resolved.engine.observability.log_stats else None
        try:
            await self._first(self.stop.wait(), self.dead.wait())
            if self.stop.is_set() and not self.dead.is_set():
                state.phase = Phase.DRAINING
                grace_s = self.resolved.server.drain_grace_s
                log.info("%s: %s", signal.Signals(self.signal).name, _what_remains(len(state.open), grace_s))
                await self._first(state.idle.wait(), self.dead.wait(), timeout=grace_s)
                state.end_all(unavailable("The server is shutting down; the request was ended.", "shutting_down", retry_after_s=5))
            if self.dead.is_set():
                state.phase = Phase.DEAD
            await self._first(state.idle.wait(), timeout=FLUSH_S)
            return 1 if self.dead.is_set() else 0
        finally:
            if stats is not None:
                await _end(stats)

    def _on_signal(self, number: int) -> None:
        if self.stop.is_set():
            self._exit_now(128 + number)
        self.signal = number
        self.stop.set()

    def _exit_now(self, code: int) -> None:
        """A second signal: nothing is waited for."""
        self._kill_engine()
        release(self.resolved.server)
        os._exit(code)

    def _kill_engine(self) -> None:
        """End the engine process; its workers die with it."""
        if self.client is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.client.pid, signal.SIGKILL)
            self.client.shutdown(0.0)

    @staticmethod
    async def _first(*waits: Any, timeout: float | None = None) -> None:
        """Until one of `waits` is done; the tasks made here are ended, those that were passed in go on."""
        own = [asyncio.ensure_future(w) for w in waits]
        try:
            await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
        finally:
            for task, given in zip(own, waits, strict=True):
                if task is not given:
                    task.cancel()


async def in_thread(call: Callable[[], Result]) -> Result:
    """Run `call` in a thread that does not keep the process alive: a download must not delay the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as exc:  # noqa: BLE001  it is raised again where the result is awaited
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for it; what it raised has been seen, or no longer matters."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _what_remains(num_open: int, grace_s: float) -> str:
    if not num_open:
        return "no request is open; stopping"
    return f"finishing {num_open} open request{'s' if num_open > 1 else ''} within {grace_s:g} s; a second signal ends the server at once"


async def _log_stats(state: ServerState) -> None:
    """A line every ten seconds in which something happened."""
    last = state.metrics.totals()
    while True:
        await asyncio.sleep(STATS_EVERY_S)
        now = state.metrics.totals()
        if now == last and not state.num_prompts:
            continue
        stats, info = state.llm.stats, state.info
        log.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f %%, prefix hits %.1f %%",
            (now[0] - last[0]) / STATS_EVERY_S, (now[1] - last[1]) / STATS_EVERY_S, stats.num_running, stats.num_waiting,
            100 * stats.num_used_blocks / max(1, info.num_blocks), 100 * stats.prefix_hits / max(1, stats.prefix_queries),
        )  # fmt: skip
        last = now
