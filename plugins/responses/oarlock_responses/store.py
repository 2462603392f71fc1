"""What a server remembers of its responses: the last so many, in memory, within a number of bytes.

Owns: the stored responses, their order and their size.
Reads: `oarlock.backend_api`.
Never: drops one that is being made; writes to a disk.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from oarlock.backend_api import RouteError

LOGPROB = 400  # bytes of one token's entry, or of one alternative's; counted and not walked, as an answer may have a hundred thousand


@dataclass(slots=True)
class Stored:
    """One response. `messages` is the conversation that it ends, without instructions, once it is complete."""

    response: dict[str, Any]
    messages: tuple[dict[str, Any], ...] = ()
    task: asyncio.Task[None] | None = None  # makes a background response
    size: int = 0

    @property
    def is_open(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")


class Store:
    """By id, the oldest first. Used on the event loop's thread only."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self.size = 0
        self._entries: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Stored) -> None:
        """Keep `entry`, or count it anew; the oldest make room. Raises RouteError 429 where all are being made, which a new one waits for."""
        key = entry.response["id"]
        known = key in self._entries
        if not known and len(self._entries) >= self.max_count and all(other.is_open for other in self._entries.values()):
            text = f"All {self.max_count} responses that are kept (--responses-max-stored) are being made; try again."
            raise RouteError(429, text, None, "queue_full", "rate_limit_error", {"Retry-After": "1"})
        self.size -= entry.size if known else 0
        entry.size = sum(map(_bytes, entry.messages)) + _bytes({**entry.response, "output": None}) + sum(map(_item_bytes, entry.response.get("output", ())))
        self.size += entry.size
        self._entries[key] = entry
        self._make_room()

    def _make_room(self) -> None:
        """The newest may go too, where it is larger than all that may be kept."""
        for key, entry in list(self._entries.items()):
            if len(self._entries) <= self.max_count and self.size <= self.max_bytes:
                return
            if not entry.is_open:
                self.drop(key)

    def drop(self, key: str) -> None:
        self.size -= self._entries.pop(key).size

    def get(self, key: str) -> Stored:
        """Raises RouteError 404 that says what may have become of it."""
        found = self._entries.get(key)
        if found is None:
            raise RouteError(404, self.gone(key), "response_id", "response_not_found")
        return found

    def find(self, key: str) -> Stored | None:
        return self._entries.get(key)

    def gone(self, key: str) -> str:
        """Why there may be no such response."""
        shown = key if len(key) <= 80 else key[:80] + "…"
        if not self.max_count:
            return f"There is no response {shown!r} here: this server keeps none (--responses-max-stored 0)."
        kept = f"the last {self.max_count} (--responses-max-stored), up to {self.max_bytes >> 20} MiB (--responses-max-stored-mib), until it ends"
        return f"There is no response {shown!r} here: it was not stored, was deleted, or had to go, as this server keeps {kept}."


def _bytes(value: Any) -> int:
    """Bytes that a JSON value takes, near enough."""
    if isinstance(value, str):
        return 50 + 4 * len(value)
    if isinstance(value, dict):
        return 64 + sum(_bytes(k) + _bytes(v) for k, v in value.items())
    if isinstance(value, list):
        return 56 + sum(map(_bytes, value))
    return 32


def _item_bytes(item: dict[str, Any]) -> int:
    """The same of an item of the output."""
    parts = item.get("content", ())
    entries = sum(1 + len(entry["top_logprobs"]) for part in parts for entry in part.get("logprobs", ()))
    return _bytes({**item, "content": None}) + sum(500 + _bytes(part["text"]) for part in parts) + LOGPROB * entries
