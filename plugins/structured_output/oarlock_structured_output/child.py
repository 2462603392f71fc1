"""The process of one grammar: compiles it, then answers with a mask whenever a branch's tokens have grown.

Owns: the matcher of each branch.
Reads: `frames`, `runaway`, `schema`.
Never: outlives the socket to its engine; takes more memory than it may.
"""

from __future__ import annotations

import json
import resource
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from oarlock_structured_output import frames, schema
from oarlock_structured_output.runaway import JsonRun, Leads

READ = 1 << 16
NOTHING = "nothing can match it, so no answer is possible; a $ref that leads only to itself does this"


def serve(end: socket.socket, engine: Any, leads: Leads, memory_bytes: int) -> None:
    """Until the socket closes. Every fault of a grammar is told, and ends the process or the branch."""
    _bound(memory_bytes)
    buffer = bytearray()
    grammar: _Grammar | None = None
    while data := end.recv(READ):
        buffer += data
        for kind, body in frames.take(buffer):
            if kind == b"S":
                try:
                    grammar = _Grammar(engine, leads, json.loads(bytes(body)))
                except MemoryError:
                    end.sendall(frames.frame(b"E", b"it needs more memory than a grammar may take"))
                    return
                except Exception as error:  # noqa: BLE001  whatever a library says of a client's text
                    end.sendall(frames.frame(b"E", _words(error).encode("utf-8", "replace")))
                    return
                end.sendall(frames.frame(b"C"))
            elif kind == b"A" and grammar is not None:
                end.sendall(grammar.answer(*frames.read_ask(body)))
            elif kind == b"F" and grammar is not None:
                grammar.branches.pop(frames.read_id(body)[0], None)


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or refers to itself without an end"
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__


def _bound(memory_bytes: int) -> None:
    """No more address space than now and this much. Where the system does not say how much is used, there is no bound of ours."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Branch:
    """A branch's matcher and how many of its tokens it has seen."""

    __slots__ = ("matcher", "run", "seen")

    def __init__(self, matcher: Any, run: JsonRun | None) -> None:
        self.matcher, self.run, self.seen = matcher, run, 0


class _Grammar:
    """One compiled grammar."""

    def __init__(self, engine: Any, leads: Leads, wanted: dict[str, Any]) -> None:
        if wanted["disable_additional_properties"]:
            wanted["text"] = json.dumps(schema.closed(json.loads(wanted["text"])))
        self._engine, self._leads = engine, leads
        self._is_json = wanted["kind"] in ("json", "json_object") and wanted["whitespace_pattern"] is None  # whose blanks are counted
        self._first = engine.compile(wanted)
        self.branches: dict[int, _Branch] = {}
        bits, may_end = self._first.copy().mask()
        if not may_end and not bits.strip(b"\0"):
            raise ValueError(NOTHING)

    def answer(self, branch_id: int, start: int, token_ids: list[int]) -> bytes:
        """The mask after these tokens, as a frame."""
        branch = self.branches.get(branch_id)
        if branch is None or start == 0:
            branch = self.branches[branch_id] = _Branch(self._first.copy(), JsonRun(self._leads) if self._is_json else None)
        try:
            if start != branch.seen:
                raise ValueError(f"token {start} follows token {branch.seen}")
            branch.matcher.consume(token_ids)
            branch.seen += len(token_ids)
            bits, may_end = branch.matcher.mask()
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a library says of a client's text
            return frames.failed(branch_id, _words(error))
        if branch.run is not None:
            branch.run.add(b"".join(self._engine.vocabulary.tokens[i] for i in token_ids))
            bits = branch.run.restrict(bits, may_end=may_end)
        return frames.mask(branch_id, bits, may_end=may_end)
