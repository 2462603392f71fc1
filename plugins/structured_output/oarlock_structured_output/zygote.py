"""The process that has the vocabulary loaded and forks one process for each grammar: a fork costs a millisecond, loading seconds.

Owns: the pids of the grammars' processes.
Reads: `vocabulary`, `child`, `frames`.
Never: compiles anything itself; leaves a process behind when its engine goes.

Run as `python -m oarlock_structured_output.zygote SOCKET ENGINE MEMORY_BYTES`, with the vocabulary's source on standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

from oarlock_structured_output import child, frames, vocabulary
from oarlock_structured_output.runaway import Leads

PR_SET_PDEATHSIG = 1


class Zygote:
    """Single-threaded, as a process that forks must be."""

    def __init__(self, control: socket.socket, engine: Any, leads: Leads, memory_bytes: int) -> None:
        self._control, self._engine, self._leads, self._memory_bytes = control, engine, leads, memory_bytes
        self._pids: dict[int, int] = {}  # grammar id -> pid of a process that has not been waited for

    def run(self) -> None:
        """Take orders until the engine hangs up, then end every grammar."""
        try:
            while (order := self._order()) is not None:
                self._reap()
                kind, grammar, end = order
                if kind == b"N" and end is not None:
                    self._fork(grammar, end)
                elif kind == b"K" and grammar in self._pids:
                    os.kill(self._pids[grammar], signal.SIGKILL)
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)

    def _order(self) -> tuple[bytes, int, socket.socket | None] | None:
        data, ends = b"", []
        while len(data) < frames.ORDER.size:
            part, descriptors, _, _ = socket.recv_fds(self._control, frames.ORDER.size - len(data), 1)
            ends += [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if not part:
                return None
            data += part
        kind, grammar = frames.ORDER.unpack(data)
        return kind, grammar, ends[0] if ends else None

    def _fork(self, grammar: int, end: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # no more processes, no memory: this grammar's fault alone
            with end, contextlib.suppress(OSError):
                end.sendall(frames.frame(b"E", f"no process can be started for it now: {error.strerror}; send the request again".encode()))
            return
        if pid:
            self._pids[grammar] = pid
            end.close()
            return
        code = 1
        try:
            _die_with_parent()
            self._control.close()
            with contextlib.suppress(ConnectionError, MemoryError):
                child.serve(end, self._engine, self._leads, self._memory_bytes)
                code = 0
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Forget those that have ended: here alone, between two orders, is a pid given back, so a known pid is nobody else's.

        Each end of a grammar's process is followed by an order, as the engine hears of it: few are left unforgotten.
        """
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._pids = {grammar: known for grammar, known in self._pids.items() if known != pid}


def _die_with_parent() -> None:
    """Where the system offers it: a grammar that hangs would not see its socket close."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Load, say so, and serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the system itself gives pids back
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's to judge
    try:
        source, argument = json.load(sys.stdin)
        loaded = vocabulary.load(source, argument)
        engine = importlib.import_module(sys.argv[2]).Engine(loaded)
        leads = Leads(loaded)
    except Exception as error:  # noqa: BLE001  said to the engine, which lays it to the requests that wait
        control.sendall(frames.frame(b"E", f"{type(error).__name__}: {error}"[:500].encode("utf-8", "replace")))
        return 1
    gc.collect()
    gc.freeze()  # forks share what is loaded
    control.sendall(frames.frame(b"C"))
    with contextlib.suppress(ConnectionError):
        Zygote(control, engine, leads, int(sys.argv[3])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
