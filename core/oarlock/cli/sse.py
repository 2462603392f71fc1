"""Server-sent events, from bytes as they arrive to the payload of each event; and what a chunk of an answer says.

Owns: the parser and the reading of completion chunks, used by the terminal and by the benchmark.
Reads: nothing.
Never: does input or output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"


class EventReader:
    """Cuts a byte stream into the `data` payloads of its events. Bytes may be split anywhere, inside a character too."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The payloads of the events that `piece` completes. Comments and other fields are skipped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        payloads = []
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
            elif not line and self._data:
                payloads.append("\n".join(self._data))
                self._data.clear()
        return payloads


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event of a streamed answer says about its first choice."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None
    has_choice: bool = False


def read_chunk(payload: str) -> Chunk:
    """One payload of /v1/completions or /v1/chat/completions. What is no such payload comes back as an error."""
    try:
        body = json.loads(payload)
    except json.JSONDecodeError:
        return Chunk(error=f"the server sent an event that is not JSON: {payload[:200]}")
    if not isinstance(body, dict):
        return Chunk(error=f"the server sent an event that is no object: {payload[:200]}")
    if body.get("error"):
        return Chunk(error=error_text(body))
    choices = body.get("choices") or []
    usage = body.get("usage") or None
    if not choices:
        return Chunk(usage=usage)
    choice = choices[0]
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else (delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    return Chunk(text or "", choice.get("finish_reason"), usage, has_choice=True)


def error_text(body: Any) -> str:
    """The message of an error envelope, in any of the shapes that servers use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return str(error)


def error_of_response(status: int, body: bytes) -> str:
    """One line for a response that is no success."""
    text = body.decode("utf-8", "replace").strip()
    try:
        text = error_text(json.loads(text))
    except json.JSONDecodeError:
        text = " ".join(text.split())[:300]
    return f"{status}: {text}" if text else str(status)
