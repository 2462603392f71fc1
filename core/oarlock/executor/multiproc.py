"""A process for each rank on this host.

Owns: the worker processes, their sockets and their rendezvous.
Reads: `executor.codec`, `executor.frames`, `messages`.
Never: waits for ever: a rank that fails alone ends the executor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
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
STRAGGLER_S = 10.0  # how long the other ranks may take after one has failed (they may wait in a collective)


class _MultiprocPending:
    """A launched step. Answers come in the order of what was asked, so an older step's is kept when a younger one is wanted."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self._answer: ModelRunnerOutput | None = None
        self._fault: Exception | None = None

    def take(self) -> None:
        """Read the answer, which is the next to come."""
        try:
            self._answer = self._executor.collect_answers()[0]
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

    def load(self) -> list[WorkerReady]:
        size = self.config.parallel.tensor_parallel_size
        self._folder = tempfile.mkdtemp(prefix="oarlock-")
        for rank in range(size):
            self._spawn(rank, size)
        self.collect_answers()
        self._ask_all(frames.PREPARE)
        batch = self.config.parallel.max_parallel_loading_workers or size
        ready: list[WorkerReady] = []
        for first in range(0, size, batch):
            ranks = range(first, min(first + batch, size))
            for rank in ranks:
                self._send(rank, frames.LOAD, b"")
            ready += self.collect_answers(ranks)
        return ready

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
        self._ask_all(frames.CANARY)

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

    def _ask_all(self, kind: bytes, body: bytes = b"") -> list[Any]:
        for rank in range(len(self._ends)):
            self._send(rank, kind, body)
        self.read_until(None)
        return self.collect_answers()

    def read_until(self, wanted: _MultiprocPending | None) -> None:
        """Read launched steps, oldest first, up to `wanted`; None: all of them."""
        while self._unread and (wanted is None or wanted in self._unread):
            self._unread.popleft().take()

    def collect_answers(self, ranks: range | None = None) -> list[Any]:
        """One answer from each rank, in rank order.

        Raises:
            WorkerDied: a rank is gone, or one failed and others never came back from the step.
            OarlockError or WorkerError: what a rank raised.
        """
        open_ranks = {self._ends[rank]: rank for rank in (ranks or range(len(self._ends)))}
        answers: dict[int, Any] = {}
        failed: tuple[int, str, str] | None = None
        deadline: float | None = None
        while open_ranks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select(list(open_ranks), [], [], left)
            if not readable:
                raise WorkerDied(f"rank {failed[0] if failed else '?'} failed and rank {min(open_ranks.values())} did not come back: {failed[2] if failed else ''}")
            for end in readable:
                rank = open_ranks.pop(end)
                try:
                    kind, body = frames.receive(end)
                except (EOFError, OSError) as error:
                    raise WorkerDied(f"rank {rank} is gone ({self._how(rank)})") from error
                answers[rank] = decode(body)
                if kind == frames.ERROR:
                    failed = failed or (rank, *answers[rank])
                    deadline = deadline or time.monotonic() + STRAGGLER_S
        if failed is not None:
            self._raise(*failed)
        return [answers[rank] for rank in sorted(answers)]

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
