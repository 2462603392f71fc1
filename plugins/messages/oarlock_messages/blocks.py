"""Content blocks: from the chat route's deltas to events, and from events to the blocks of a whole answer.

Owns: which block is open, and its number.
Reads: chunks of the chat route.
Never: drops a delta; parses a call (the chat route's parsers have).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Event = tuple[str, dict[str, Any]]
INVALID_JSON = "INVALID_JSON"  # the key under which arguments that are no JSON object are shown, as when the answer was cut in them


def event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}


class Blocks:
    """The blocks of one answer, as they come."""

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []  # every block so far; a call's arguments are text until `close`
        self._open = ""
        self._arguments = ""

    def take(self, delta: Mapping[str, Any]) -> list[Event]:
        """The events of one delta."""
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content"):
            events += self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self.whole[-1]["thinking"] += reasoning
            events.append(self._delta({"type": "thinking_delta", "thinking": reasoning}))
        if text := delta.get("content"):
            events += self._start("text", {"type": "text", "text": "", "citations": None})
            self.whole[-1]["text"] += text
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls") or ():
            if call.get("id") is not None:
                events += self.close()
                events += self._start("tool_use", {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
            if arguments := call["function"].get("arguments"):
                self._arguments += arguments
                events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _start(self, kind: str, block: dict[str, Any]) -> list[Event]:
        """Nothing where a block of this kind is open."""
        if self._open == kind:
            return []
        events = self.close()
        self._open, self._arguments = kind, ""
        self.whole.append(block)
        return [*events, event("content_block_start", index=len(self.whole) - 1, content_block=dict(block))]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return event("content_block_delta", index=len(self.whole) - 1, delta=delta)

    def close(self) -> list[Event]:
        """End the open block, where there is one."""
        if not self._open:
            return []
        if self._open == "tool_use":
            self.whole[-1]["input"] = _arguments(self._arguments)
        self._open = ""
        return [event("content_block_stop", index=len(self.whole) - 1)]


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if type(value) is dict else {INVALID_JSON: text}
