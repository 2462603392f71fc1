"""A process for each rank on this host.

Owns: the worker processes, their sockets and their rendezvous.
Reads: `executor.codec`, `executor.frames`, `messages`.
Never: waits for ever: a rank that fails alone ends the executor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from typing import Any

from oarlock import errors
from oarlock.config.resolve import to_dict
from oarlock.config.sections import EngineConfig
from oarlock.errors import OarlockError, WorkerDied, WorkerError
from oarlock.executor import frames
from oarlock.executor.base import Executor, Pending
from oarlock.executor.codec import decode, encode
from oarlock.executor.parent import how_it_ended
from oarlock.messages import ModelRunnerOutput, SchedulerOutput, WorkerReady
from oarlock.model_summary import ModelSummary

CLOSE_S = 2.0  # how long a rank may take to end
CANARY_S = 60.0  # how long the check after a fault may take: ranks that wait for each other in a collective would take for ever
STRAGGLER_S = 10.0  # how long the other ranks may take after one has failed (they may wait in a collective)


class _MultiprocPending:
    """A launched step. Answers come in the order of what was asked, so an older step's is kept when a younger one is wanted."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self._answer: ModelRunnerOutput | None = None
        self._fault: Exception | None = None

    def take(self) -> None:
        """Read the answer, which is the next to come. Raises WorkerDied: after that nobody's answer can be waited for."""
        try:
            self._answer = self._executor.collect_answers()[0]
        except WorkerDied:
            raise
        except Exception as fault:  # noqa: BLE001  it is raised where the result is asked for
            self._fault = fault

    def result(self) -> ModelRunnerOutput:
        self._executor.read_until(self)
        if self._fault is not None:
            raise self._fault
        assert self._answer is not None
        return self._answer


class MultiprocExecutor(Executor):
    """Ranks 0 .. tensor_parallel_size - 1."""

    def __init__(self, config: EngineConfig, summary: ModelSummary, device_name: str, factory: str) -> None:
        super().__init__(config, summary, device_name, factory)
        self._folder = ""
        self._children: list[subprocess.Popen[bytes]] = []
        self._ends: list[socket.socket] = []
        self._unread: deque[_MultiprocPending] = deque()  # launched steps, oldest first
        self._inbox: defaultdict[int, deque[tuple[bytes, Any]]] = defaultdict(deque)  # by rank: answers that nobody has asked for yet

    def load(self) -> list[WorkerReady]:
        size = self.config.parallel.tensor_parallel_size
        self._folder = tempfile.mkdtemp(prefix="oarlock-")
        for rank in range(size):
            self._spawn(rank, size)
        self.collect_answers()
        self._ask_all(frames.PREPARE)
        batch = self.config.parallel.max_parallel_loading_workers or size
        for first in range(0, size, batch):
            ranks = range(first, min(first + batch, size))
            for rank in ranks:
                self._send(rank, frames.LOAD, b"")
            self.collect_answers(ranks)
        return self._ask_all(frames.MEASURE)

    def _spawn(self, rank: int, size: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ} if sys.platform == "linux" else dict(os.environ)
        command = [sys.executable, "-m", "oarlock.executor.worker_process", str(theirs.fileno()), str(os.getpid())]
        self._children.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL))
        theirs.close()
        self._ends.append(ours)
        bootstrap = {
            "config": to_dict(self.config),
            "summary": dataclasses.asdict(self.summary),
            "device": self.device_name,
            "factory": self.factory,
            "rank": rank,
            "size": size,
            "rendezvous": f"file://{self._folder}/rendezvous",
        }
        self._send(rank, frames.PREPARE, json.dumps(bootstrap).encode())

    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        return self._ask_all(frames.START, encode((num_blocks, num_host_blocks, max_model_len)))[0]

    def execute(self, out: SchedulerOutput) -> Pending:
        body = encode(out)
        for rank in range(len(self._ends)):
            self._send(rank, frames.EXECUTE, body)
        self._unread.append(_MultiprocPending(self))
        return self._unread[-1]

    def canary(self) -> None:
        self.read_until(None)  # no rank may begin the check while another still runs a step: their collectives would meet
        self._ask_all(frames.CANARY, within_s=CANARY_S)

    def idle_ends(self) -> tuple[int, ...]:
        return tuple(end.fileno() for end in self._ends)

    def check_idle(self) -> None:
        for end in select.select(self._ends, [], [], 0)[0]:
            rank = self._ends.index(end)
            raise WorkerDied(f"rank {rank} is gone ({self._how(rank)})")

    def shutdown(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.settimeout(CLOSE_S)  # a worker that hangs may have left its end full
                frames.send(end, frames.CLOSE)
        for child in self._children:
            try:
                child.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for end in self._ends:
            end.close()
        self._ends, self._children = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ talking
    def _send(self, rank: int, kind: bytes, body: bytes) -> None:
        try:
            frames.send(self._ends[rank], kind, body)
        except OSError as error:
            raise WorkerDied(f"rank {rank} is gone ({self._how(rank)})") from error

    def _ask_all(self, kind: bytes, body: bytes = b"", within_s: float | None = None) -> list[Any]:
        for rank in range(len(self._ends)):
            self._send(rank, kind, body)
        self.read_until(None)
        return self.collect_answers(within_s=within_s)

    def read_until(self, wanted: _MultiprocPending | None) -> None:
        """Read launched steps, oldest first, up to `wanted`; None: all of them."""
        while self._unread and (wanted is None or wanted in self._unread):
            self._unread.popleft().take()

    def collect_answers(self, ranks: range | None = None, within_s: float | None = None) -> list[Any]:
        """One answer from each rank, in rank order. `within_s`: how long all of them may take; None: as long as they are well.

        Raises:
            WorkerDied: a rank is gone, or did not come back in time, or one failed and others never came back from the step.
            OarlockError or WorkerError: what a rank raised.
        """
        wanted = ranks or range(len(self._ends))
        deadline, straggling = None if within_s is None else time.monotonic() + within_s, None
        while missing := [rank for rank in wanted if not self._inbox[rank]]:
            # A rank's later answers count, too: it may have failed in the next step, which another waits in and so says nothing of this one.
            failed = self._first_error()
            if failed is not None and straggling is None:
                straggling = time.monotonic() + STRAGGLER_S
                deadline = min(deadline or math.inf, straggling)
            if not self._receive(None if deadline is None else max(0.0, deadline - time.monotonic())):
                late = f"rank {missing[0]} did not come back"
                raise WorkerDied(f"rank {failed[0]} failed and {late}: {failed[2]}" if failed else f"{late} within {within_s:.0f} s")
        failed = self._first_error(of_these=True)
        answers = [self._inbox[rank].popleft()[1] for rank in wanted]
        if failed is not None:
            self._raise(*failed)
        return answers

    def _first_error(self, *, of_these: bool = False) -> tuple[int, str, str] | None:
        """(rank, kind, message) of an error among the answers that have come; `of_these`: among those that are next."""
        for rank, answers in self._inbox.items():
            for kind, answer in list(answers)[: 1 if of_these else None]:
                if kind == frames.ERROR:
                    return rank, *answer
        return None

    def _receive(self, within_s: float | None) -> bool:
        """Take in what has come from any rank; False: nothing came in time. Raises WorkerDied when a rank is gone."""
        readable, _, _ = select.select(self._ends, [], [], within_s)
        for end in readable:
            rank = self._ends.index(end)
            try:
                kind, body = frames.receive(end)
            except (EOFError, OSError) as error:
                raise WorkerDied(f"rank {rank} is gone ({self._how(rank)})") from error
            self._inbox[rank].append((kind, decode(body)))
        return bool(readable)

    def _raise(self, rank: int, kind: str, message: str) -> None:
        cls = getattr(errors, kind, None)
        if isinstance(cls, type) and issubclass(cls, OarlockError):
            raise cls(message)
        raise WorkerError(f"rank {rank}: {kind}: {message}")

    def _how(self, rank: int) -> str:
        try:
            code = self._children[rank].wait(1)
        except subprocess.TimeoutExpired:
            return "its socket is closed"
        return how_it_ended(code)
