"""The engine's end: which grammar each branch follows, what is outstanding, and when a process has had its time.

Owns: the processes, their sockets, deadlines, and the tokens of each branch, from which a lost matcher is rebuilt.
Reads: `frames`.
Never: waits longer than it is told; computes a mask.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oarlock_structured_output import frames

START_S = 120.0  # to load the vocabulary
MAX_COMPILES = 2  # at one time; further grammars wait for their turn
KINDS = {
    "llguidance": ("json", "json_object", "regex", "choice", "grammar", "structural_tag"),
    "outlines": ("json", "json_object", "regex", "choice"),
    "lm-format-enforcer": ("json", "json_object", "regex", "choice"),
}
Answer = tuple[int, bytes, bool, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one grammar may cost."""

    time_s: float = 5.0
    memory_bytes: int = 512 << 20
    processes: int = 32


class _Branch:
    __slots__ = ("grammar", "sent", "tokens")

    def __init__(self, grammar: _Grammar) -> None:
        self.grammar = grammar
        self.tokens: list[int] = []
        self.sent = 0  # tokens that the grammar's process has


class _Grammar:
    """One specification: queued, then in a process of its own, then perhaps without one again."""

    def __init__(self, number: int, specification: bytes) -> None:
        self.number, self.specification = number, specification
        self.end: socket.socket | None = None  # None: no process
        self.is_compiled = False
        self.outgoing, self.incoming = bytearray(), bytearray()
        self.branches: set[int] = set()
        self.waiting: dict[int, None] = {}  # branches whose mask is outstanding, in order
        self.since = 0.0  # when its process last said something, or was first asked
        self.used_s = 0.0


class Client:
    """Made for one backend; nothing is started before the first request. Used on the engine's thread only."""

    def __init__(self, name: str, module: str, vocabulary: tuple[str, str], limits: Limits) -> None:
        self.name, self.limits = name, limits
        self._module, self._vocabulary = module, vocabulary
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready, self._started_s = False, 0.0
        self._greeting = bytearray()
        self._poll = selectors.DefaultSelector()
        self._grammars: dict[bytes, _Grammar] = {}
        self._branches: dict[int, _Branch] = {}
        self._answers: list[Answer] = []
        self._next = 0

    # ---------------------------------------------------------------- what core calls
    def ask(self, branch_id: int, wanted: Any, start: int, token_ids: tuple[int, ...]) -> None:
        """Compute the mask that holds after the branch's tokens, of which those from `start` on are given."""
        branch = self._branches.get(branch_id)
        if branch is None:
            if wanted.kind not in KINDS[self.name]:
                able = ", ".join(name for name, kinds in KINDS.items() if wanted.kind in kinds)
                self._answers.append((branch_id, b"", False, f"{self.name} has no {wanted.kind}; use {able}, or one of {', '.join(KINDS[self.name])}"))
                return
            branch = self._branches[branch_id] = _Branch(self._grammar(wanted))
            branch.grammar.branches.add(branch_id)
        branch.tokens[start:] = token_ids
        grammar = branch.grammar
        grammar.used_s = time.monotonic()
        if not grammar.waiting:
            grammar.since = grammar.used_s
        grammar.waiting[branch_id] = None
        if grammar.is_compiled:
            self._send_ask(branch_id, branch)
        else:
            self._start()

    def answers(self, wait_s: float) -> list[Answer]:
        """What has come since, waiting for the first."""
        until = time.monotonic() + wait_s
        while True:
            self._start()
            now = time.monotonic()
            for key, events in self._poll.select(0.0 if self._answers else max(0.0, min(until, self._deadline()) - now)):
                self._serve(key.data, events)
            self._check_deadlines()
            if self._answers or time.monotonic() >= until:
                found, self._answers = self._answers, []
                return found

    def forget(self, branch_id: int) -> None:
        """The branch has ended."""
        branch = self._branches.pop(branch_id, None)
        if branch is None:
            return
        grammar = branch.grammar
        grammar.branches.discard(branch_id)
        grammar.waiting.pop(branch_id, None)
        if grammar.is_compiled:
            self._send(grammar, frames.forget(branch_id))
        elif not grammar.branches:  # nobody waits for its compilation any more
            self._kill(grammar)
            self._grammars.pop(grammar.specification, None)

    def close(self) -> None:
        """End the processes: they end when their sockets close. Idempotent."""
        for grammar in self._grammars.values():
            self._drop(grammar)
        self._grammars.clear()
        self._lose_zygote()

    # ---------------------------------------------------------------- processes
    def _grammar(self, wanted: Any) -> _Grammar:
        values = {name: getattr(wanted, name) for name in ("kind", "text", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")}
        specification = json.dumps(values).encode()
        found = self._grammars.get(specification)
        if found is None:
            self._next += 1
            found = self._grammars[specification] = _Grammar(self._next, specification)
        return found

    def _start(self) -> None:
        """Start the process that forks, and as many queued grammars as may compile now."""
        queued = [g for g in self._grammars.values() if g.end is None and g.waiting]
        if not queued:
            return
        if self._control is None:
            try:
                self._start_zygote()
            except OSError as error:  # a full disk, no more processes, no more descriptors
                self._fail_all(f"no process for grammars can be started here now: {error.strerror or error}; send the request again")
                return
        if not self._is_ready:
            return
        compiling = sum(g.end is not None and not g.is_compiled for g in self._grammars.values())
        for grammar in queued[: max(0, MAX_COMPILES - compiling)]:
            if not self._make_room():
                return
            self._fork(grammar)

    def _start_zygote(self) -> None:
        with contextlib.ExitStack() as opened:
            ours, theirs = map(opened.enter_context, socket.socketpair())
            source = opened.enter_context(tempfile.TemporaryFile())  # a pipe could fill before the other end reads
            source.write(json.dumps(self._vocabulary).encode())
            source.seek(0)
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # threads do not survive a fork
            command = [sys.executable, "-m", "oarlock_structured_output.zygote", str(theirs.fileno()), self._module, str(self.limits.memory_bytes)]
            self._zygote = subprocess.Popen(command, stdin=source, pass_fds=(theirs.fileno(),), env=environment)
            self._control, self._started_s = ours.dup(), time.monotonic()
        self._poll.register(self._control, selectors.EVENT_READ, None)

    def _make_room(self) -> bool:
        """Whether one more process may start; one that nobody uses goes first."""
        running = [g for g in self._grammars.values() if g.end is not None]
        if len(running) < self.limits.processes:
            return True
        idle = [g for g in running if not g.branches]
        if not idle:
            return False
        oldest = min(idle, key=lambda g: g.used_s)
        self._kill(oldest)
        del self._grammars[oldest.specification]
        return True

    def _fork(self, grammar: _Grammar) -> None:
        assert self._control is not None
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._fail(grammar, f"no process can be started for it now: {error.strerror or error}; send the request again")
            return
        try:
            socket.send_fds(self._control, [frames.ORDER.pack(b"N", grammar.number)], [theirs.fileno()])
        except OSError:
            ours.close()
            self._fail_all("the process for grammars has ended")
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        grammar.end, grammar.since = ours, time.monotonic()
        self._poll.register(ours, selectors.EVENT_READ, grammar)
        self._send(grammar, frames.frame(b"S", grammar.specification))

    def _kill(self, grammar: _Grammar) -> None:
        if grammar.end is not None and self._control is not None:
            with contextlib.suppress(OSError):
                self._control.sendall(frames.ORDER.pack(b"K", grammar.number))
        self._drop(grammar)

    def _drop(self, grammar: _Grammar) -> None:
        """It has no process any more. Its branches send their tokens again if they go on."""
        if grammar.end is not None:
            self._poll.unregister(grammar.end)
            grammar.end.close()
        self._next += 1
        grammar.end, grammar.is_compiled, grammar.number = None, False, self._next
        grammar.outgoing, grammar.incoming = bytearray(), bytearray()
        for branch_id in grammar.branches:
            self._branches[branch_id].sent = 0

    def _fail(self, grammar: _Grammar, problem: str) -> None:
        """Lay a fault to everybody who waits for this grammar."""
        self._answers += [(branch_id, b"", False, problem) for branch_id in grammar.waiting]
        grammar.waiting.clear()
        self._kill(grammar)
        if not grammar.branches:
            self._grammars.pop(grammar.specification, None)

    def _fail_all(self, problem: str) -> None:
        for grammar in list(self._grammars.values()):
            self._fail(grammar, problem)
        self._lose_zygote()

    def _lose_zygote(self) -> None:
        if self._control is not None:
            self._poll.unregister(self._control)
            self._control.close()
        if self._zygote is not None:
            try:
                self._zygote.wait(1.0)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait()
        self._control, self._zygote, self._is_ready = None, None, False
        self._greeting.clear()

    # ---------------------------------------------------------------- sockets
    def _send_ask(self, branch_id: int, branch: _Branch) -> None:
        self._send(branch.grammar, frames.ask(branch_id, branch.sent, branch.tokens[branch.sent :]))
        branch.sent = len(branch.tokens)

    def _send(self, grammar: _Grammar, data: bytes) -> None:
        grammar.outgoing += data
        self._flush(grammar)

    def _flush(self, grammar: _Grammar) -> None:
        if grammar.end is None:
            return
        try:
            while grammar.outgoing:
                del grammar.outgoing[: grammar.end.send(grammar.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            return  # reading tells what happened
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if grammar.outgoing else 0)
        if self._poll.get_key(grammar.end).events != events:
            self._poll.modify(grammar.end, events, grammar)

    def _serve(self, grammar: _Grammar | None, events: int) -> None:
        if grammar is None:
            self._hear_zygote()
            return
        if grammar.end is None:  # dropped while this round was served
            return
        if events & selectors.EVENT_WRITE:
            self._flush(grammar)
        if events & selectors.EVENT_READ:
            self._hear(grammar)

    def _hear_zygote(self) -> None:
        if self._control is None:
            return
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        self._greeting += data
        for kind, body in frames.take(self._greeting):
            if kind == b"C":
                self._is_ready = True
            else:
                self._fail_all(f"the backend {self.name} cannot start: {bytes(body).decode('utf-8', 'replace')}")
                return
        if not data:
            self._fail_all(f"the process of the backend {self.name} ended; send the request again")

    def _hear(self, grammar: _Grammar) -> None:
        assert grammar.end is not None
        try:
            while data := grammar.end.recv(1 << 18):
                grammar.incoming += data
            has_ended = True
        except BlockingIOError:
            has_ended = False
        except OSError:
            has_ended = True
        for kind, body in frames.take(grammar.incoming):
            grammar.since = time.monotonic()
            if kind == b"C":
                grammar.is_compiled = True
                for branch_id in grammar.waiting:
                    self._send_ask(branch_id, self._branches[branch_id])
            elif kind == b"E":
                self._fail(grammar, bytes(body).decode("utf-8", "replace"))
                return
            elif kind == b"M":
                branch_id, may_end, mask = frames.read_mask(body)
                self._answer(grammar, (branch_id, mask, may_end, ""))
            else:
                branch_id, text = frames.read_id(body)
                self._answer(grammar, (branch_id, b"", False, bytes(text).decode("utf-8", "replace")))
        if has_ended:
            doing = "was used" if grammar.is_compiled else "was compiled"
            self._fail(grammar, f"its process ended while it {doing}: it is too complex, or needs more than {self.limits.memory_bytes >> 20} MiB (--grammar-memory-mib)")

    def _answer(self, grammar: _Grammar, answer: Answer) -> None:
        if answer[0] in grammar.waiting:
            del grammar.waiting[answer[0]]
            self._answers.append(answer)

    # ---------------------------------------------------------------- deadlines
    def _deadline(self) -> float:
        """When somebody's time is up."""
        running = [g.since + self.limits.time_s for g in self._grammars.values() if g.end is not None and (g.waiting or not g.is_compiled)]
        starting = [self._started_s + START_S] if self._control is not None and not self._is_ready else []
        return min(running + starting, default=float("inf"))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now < self._deadline():
            return
        if self._control is not None and not self._is_ready and now >= self._started_s + START_S:
            self._fail_all(f"the backend {self.name} did not load the vocabulary within {START_S:g} s")
        for grammar in list(self._grammars.values()):
            if grammar.end is not None and (grammar.waiting or not grammar.is_compiled) and now >= grammar.since + self.limits.time_s:
                what = "a token's mask was not computed" if grammar.is_compiled else "it was not compiled"
                self._fail(grammar, f"{what} within {self.limits.time_s:g} s (--grammar-time); simplify it")


def _make(name: str, library: str, requirement: str) -> Callable[[Any, tuple[str, str]], Client]:
    def make(config: Any, vocabulary: tuple[str, str]) -> Client:
        """Raises RuntimeError where the library is missing."""
        if importlib.util.find_spec(library) is None:
            raise RuntimeError(f"{name} is not installed: pip install {requirement}")
        options = config.device.options
        limits = Limits(options.get("grammar_time", 5.0), options.get("grammar_memory_mib", 512) << 20, options.get("grammar_processes", 32))
        return Client(name, f"oarlock_structured_output.engine_{name.replace('-', '_')}", vocabulary, limits)

    return make


make_llguidance = _make("llguidance", "llguidance", "llguidance==1.9.1")
make_outlines = _make("outlines", "outlines_core", "outlines-core==0.2.14")
make_lm_format_enforcer = _make("lm-format-enforcer", "lmformatenforcer", "lm-format-enforcer==0.11.3")
