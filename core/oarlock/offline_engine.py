"""An in-process engine on a thread of its own, and the loop that runs lists of requests through it.

Owns: the engine's thread, its client, the output state of open requests.
Reads: `engine.client`, `frontend.outputs`, `frontend.collect`.
Never: validates a prompt; installs a signal handler.

Why a thread: an interrupt (Ctrl-C) reaches the main thread only, so it can end the waiting but never a step halfway; and
whatever is bound to a thread (current device, thread teams) stays with the engine, whichever thread calls.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from oarlock.errors import EngineDead, OarlockError, QueueFull
from oarlock.frontend.collect import Collector
from oarlock.frontend.outputs import OutputProcessor, RequestOutput
from oarlock.messages import EngineInfo, EngineOutputs, EngineRequest, SchedulerStats

if TYPE_CHECKING:
    from oarlock.engine.client import InProcessClient

log = logging.getLogger("oarlock.llm")
DRAIN_STEPS = 1000  # steps in which an engine must be idle again once every request is aborted
CLOSE_S = 10.0  # how long closing waits for the engine's thread
WAKE_S = 0.1  # a signal that arrives just before a wait begins is noticed after this long
Prepared = tuple[EngineRequest, str | None]
Jobs = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class OfflineEngine:
    """Calls from several threads run one after another. `close()` and `del` free everything; a call that is running then ends with EngineDead.

    A fork takes the engine's thread along to no child: there every call is refused, and ending it does nothing.
    """

    def __init__(self, launch: Callable[[], InProcessClient], *, max_waiting_requests: int | None = None) -> None:
        """`launch` makes the client, on the engine's thread. Raises what it raises."""
        self._pid = os.getpid()
        self._jobs: Jobs = SimpleQueue()
        self._gate = threading.Lock()  # no job may come after the one that ends the thread: nobody would do it
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="oarlock-engine", daemon=True)
        self._thread.start()
        started = self._submit(launch)
        try:
            self._client: InProcessClient = _wait(started)
        except BaseException:
            _give_up(self._thread, self._jobs, started)
            raise
        self.info: EngineInfo = self._client.info
        self.inbox = _Inbox(self._client)
        self.totals = {"prompt": 0, "generated": 0, "finished": 0}
        window = 2 * self.info.max_num_seqs  # open requests: the running ones, and as many to follow
        self._window = window if max_waiting_requests is None else min(window, self.info.max_num_seqs + max_waiting_requests)
        self._outputs = OutputProcessor(None, self._client.abort)
        self._finalizer = weakref.finalize(self, _end, self._pid, self._thread, self._jobs, self._gate, self._client, self.inbox)

    def use_tokenizer(self, tokenizer: Any | None) -> None:
        """From the next run on."""
        self._submit_open(lambda: setattr(self, "_outputs", OutputProcessor(tokenizer, self._client.abort))).result()

    def reset_prefix_cache(self) -> None:
        self._submit_open(self._client.reset_prefix_cache).result()

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()

    def run(self, requests: Sequence[Prepared], on_finished: Callable[[RequestOutput], None]) -> list[RequestOutput]:
        """Results in the order of the requests; `on_finished` gets each one's last delta, on the calling thread.

        Whatever ends this call early, an interrupt included, aborts what is open; the engine stays usable.

        Raises:
            EngineDead: the engine has ended.
        """
        run = _Run(requests)
        done = self._submit_open(lambda: self._serve_run(run))
        done.add_done_callback(lambda _: run.finished.put(None))
        try:
            while (delta := run.next_finished()) is not None:
                on_finished(delta)
        except BaseException:
            run.is_cancelled = True
            done.exception()  # waits until the engine is idle again
            raise
        finally:
            if self.inbox.is_closing:  # from within this call perhaps, where nobody could wait for the thread
                self._thread.join(CLOSE_S)
        done.result()
        return [run.collectors[request.request_id].result() for request, _ in requests]

    # ---------------------------------------------------------------- the calling threads
    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        if threading.current_thread() is self._thread:
            raise OarlockError("this LLM is generating; it cannot be called from within (a logits processor, say).")
        done: Future[Any] = Future()
        self._jobs.put((done, job))
        return done

    def _submit_open(self, job: Callable[[], Any]) -> Future[Any]:
        if os.getpid() != self._pid:
            raise EngineDead("this LLM belongs to the process that this one was forked from; make one here, or start children by spawn.")
        with self._gate:
            if not self._finalizer.alive:
                raise EngineDead("this LLM is closed; make a new one.")
            return self._submit(job)

    # ---------------------------------------------------------------- the engine's thread
    def _serve_run(self, run: _Run) -> None:
        try:
            if not self._client.is_alive():
                raise EngineDead(self.inbox.dead or "the engine has ended; make a new LLM.")
            while (run.waiting or len(self._outputs)) and not run.is_cancelled and not self.inbox.is_closing:
                self._feed(run.waiting)
                for delta in self._step():
                    if run.collectors[delta.request_id].add(delta):
                        self._count(delta)
                        run.finished.put(delta)
            if self.inbox.is_closing:
                raise EngineDead("this LLM was closed while it was generating.")
            if run.is_cancelled:
                self._abandon(run.collectors)
            else:
                self._drain()
        except BaseException:
            self._abandon(run.collectors)
            raise

    def _feed(self, waiting: deque[Prepared]) -> None:
        """Enough for the next batches, never more than the queue takes."""
        while waiting and len(self._outputs) < self._window:
            request, text = waiting[0]
            self._outputs.add(request, text)
            try:
                self._client.submit(request)
            except BaseException as error:
                self._outputs.forget(request.request_id)
                if isinstance(error, QueueFull) and len(self._outputs):
                    return
                raise
            waiting.popleft()

    def _step(self) -> list[RequestOutput]:
        has_work = self._client.has_unfinished()
        self._client.step()
        if self.inbox.dead is not None:
            raise EngineDead(self.inbox.dead)
        deltas = []
        while self.inbox.outputs:
            deltas += self._outputs.receive(self.inbox.outputs.popleft())
        if not has_work and not deltas and len(self._outputs):
            raise EngineDead(f"the engine is idle, yet {len(self._outputs)} requests have no end; please report this.")
        return deltas

    def _drain(self) -> None:
        """Let the engine take in the last aborts, so that their blocks are free when the call returns."""
        for _ in range(DRAIN_STEPS):
            if not self._client.is_alive() or not self._client.has_unfinished():
                break
            self._client.step()
        else:
            self._client.shutdown()
            self.inbox.dead = "the engine did not come to rest after every request was aborted; make a new LLM."
        self.inbox.outputs.clear()

    def _abandon(self, collectors: Mapping[str, Collector]) -> None:
        """Abort what is open, and leave the engine idle, or dead and saying so."""
        self.inbox.outputs.clear()
        for request_id in collectors:
            self._outputs.cancel(request_id)
        try:
            self._drain()
        except Exception as fault:  # noqa: BLE001  whatever it is, the first error is the one to raise
            log.error("the engine could not be brought to rest: %s", fault)
            self._client.shutdown()
            self.inbox.dead = self.inbox.dead or f"the engine ended while requests were being aborted: {fault}"

    def _count(self, last: RequestOutput) -> None:
        self.totals["prompt"] += len(last.prompt_token_ids)
        self.totals["generated"] += last.num_generated_tokens
        self.totals["finished"] += last.error is None


class _Run:
    """One list of requests on its way."""

    def __init__(self, requests: Sequence[Prepared]) -> None:
        self.waiting = deque(requests)
        self.collectors = {request.request_id: Collector(request.params) for request, _ in requests}
        self.finished: SimpleQueue[RequestOutput | None] = SimpleQueue()  # None: the run is over
        self.is_cancelled = False  # set by the caller, read between steps

    def next_finished(self) -> RequestOutput | None:
        """Wait for a request's last delta; None when the run is over."""
        while True:
            try:
                return self.finished.get(timeout=WAKE_S)
            except Empty:
                pass


class _Inbox:
    """Where the client leaves outputs. It refers to nothing else, so that `del llm` frees everything at once."""

    def __init__(self, client: InProcessClient) -> None:
        self.outputs: deque[EngineOutputs] = deque()
        self.dead: str | None = None
        self.is_closing = False  # read between steps
        self.stats = SchedulerStats()
        client.on_outputs = self.put
        client.on_dead = self.die

    def put(self, outputs: EngineOutputs) -> None:
        self.stats = outputs.stats
        self.outputs.append(outputs)

    def die(self, reason: str) -> None:
        self.dead = reason


def _wait(done: Future[Any]) -> Any:
    while True:
        try:
            return done.result(timeout=WAKE_S)
        except TimeoutError:
            if done.done():  # just now, or the job's own TimeoutError
                return done.result()


def _serve(jobs: Jobs) -> None:
    """The engine's thread: one job after another, until None. It keeps no reference to a job that is done."""
    while (entry := jobs.get()) is not None:
        done, job = entry
        result, failure = None, None
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            failure = error
        del entry, job  # before the caller goes on: it may drop the last reference, and expects that to free everything
        if failure is None:
            done.set_result(result)
        else:
            done.set_exception(failure)
        del done, result, failure


def _give_up(thread: threading.Thread, jobs: Jobs, started: Future[Any]) -> None:
    """The launch failed, or its caller was interrupted: interrupt the launch too, and free what it made."""
    started.add_done_callback(lambda done: done.exception() or done.result().shutdown())
    jobs.put(None)
    if not started.done() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(CLOSE_S)


def _end(pid: int, thread: threading.Thread, jobs: Jobs, gate: threading.Lock, client: InProcessClient, inbox: _Inbox) -> None:
    """Shut the engine down on its own thread, then end that. Children of a thread may die with it, so it goes last.

    A thread that still computes when the interpreter goes away would abort the process, so what is running ends after its step.
    """
    if os.getpid() != pid:  # forked: there is no such thread here, and the engine is the parent's
        return
    inbox.is_closing = True
    done: Future[Any] = Future()
    with gate:
        jobs.put((done, client.shutdown))
        jobs.put(None)
    if threading.current_thread() is thread:  # from inside a call, which ends first
        return
    deadline = time.monotonic() + CLOSE_S
    thread.join(CLOSE_S)
    if thread.is_alive() or time.monotonic() > deadline:
        log.warning("the engine's thread is still busy after %.0f s; it is left to end by itself", CLOSE_S)
    elif (error := done.exception()) is not None:
        log.warning("closing the engine failed: %s", error)
