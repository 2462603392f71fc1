"""Log-probabilities in the shapes that clients read.

Owns: how a token is written as text, and the completions, chat and prompt_logprobs shapes.
Reads: `frontend.outputs` records.
Never: loses an entry because two tokens read alike; never writes a number that is not finite (None becomes null).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oarlock.frontend.outputs import Logprob

Position = dict[int, Logprob]


def ranked(position: Position, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most probable entries, best first (all under count -1); null comes last."""
    entries = sorted(position.items(), key=lambda item: (item[1].logprob is None, -(item[1].logprob or 0.0), item[1].rank or 0))
    return entries if count < 0 else entries[:count]


def _text(token_id: int, entry: Logprob, escape: str) -> str:
    """A token's own text. Bytes that are no whole characters are written as escapes, so that no two tokens read alike by it."""
    if entry.bytes is None:
        return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"
    raw = bytes(entry.bytes)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return escape + "".join(f"\\x{byte:02x}" for byte in raw)


# ---------------------------------------------------------------- chat
@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How chat entries are written. `hidden`: token ids that do not show in the text; their bytes are []."""

    count: int
    as_ids: bool = False
    hidden: frozenset[int] = frozenset()

    def content(self, token_ids: Sequence[int], positions: Sequence[Position]) -> list[dict[str, Any]]:
        result = []
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = self._entry(token_id, position[token_id])
            entry["top_logprobs"] = [self._entry(i, lp) for i, lp in ranked(position, self.count)]
            result.append(entry)
        return result

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        text = f"token_id:{token_id}" if self.as_ids else _text(token_id, entry, "")
        shown = [] if token_id in self.hidden else None if entry.bytes is None else list(entry.bytes)
        return {"token": text, "logprob": entry.logprob, "bytes": shown}


# ---------------------------------------------------------------- completions
@dataclass(slots=True)
class CompletionLogprobs:
    """The completions shape, built position by position; `text_offset` counts characters of the whole answer.

    `top_logprobs` is keyed by text. Where another token reads like one that is there already, its key is `token_id:<id>`,
    so the sampled token always keeps the key that `tokens` shows.
    """

    count: int
    as_ids: bool = False
    hidden: frozenset[int] = frozenset()
    bytes_of: Callable[[int], bytes] | None = None  # for the first prompt token, which has no record
    offset: int = 0
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def make(self, token_ids: Iterable[int], positions: Iterable[Position | None], text: str | None = None) -> dict[str, list[Any]]:
        """`text`: what these tokens stand for, where it is known (the echoed prompt), to place special tokens in it."""
        shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            sampled = self._unrecorded(token_id) if position is None else position.get(token_id)
            key = self._key(token_id, sampled)
            shape["tokens"].append(key)
            shape["token_logprobs"].append(None if sampled is None else sampled.logprob)
            shape["top_logprobs"].append(None if position is None else self._top(token_id, key, position))
            shape["text_offset"].append(self.offset)
            self._advance(token_id, sampled, text)
        return shape

    def _unrecorded(self, token_id: int) -> Logprob | None:
        return None if self.bytes_of is None else Logprob(None, bytes=tuple(self.bytes_of(token_id)))

    def _key(self, token_id: int, entry: Logprob | None) -> str:
        return f"token_id:{token_id}" if self.as_ids or entry is None else _text(token_id, entry, "bytes:")

    def _top(self, sampled_id: int, sampled_key: str, position: Position) -> dict[str, float | None]:
        top: dict[str, float | None] = {}
        for token_id, entry in ranked(position, self.count):
            key = sampled_key if token_id == sampled_id else self._key(token_id, entry)
            if token_id != sampled_id and (key in top or key == sampled_key):
                key = f"token_id:{token_id}"
            top[key] = entry.logprob
        if sampled_id in position:
            top.setdefault(sampled_key, position[sampled_id].logprob)
        return top

    def _advance(self, token_id: int, entry: Logprob | None, text: str | None) -> None:
        if entry is None or entry.bytes is None:
            return
        raw = bytes(entry.bytes)
        literal = raw.decode("utf-8", "replace")
        if token_id in self.hidden and not (text is not None and text.startswith(literal, self.offset) and literal):
            return
        if text is not None and self.offset == 0 and literal[:1] == " " and text[:1] != " ":
            raw = raw[1:]  # tokenizers that mark word starts put a space before the first word, which the text lacks
        self.offset += len(self._decoder.decode(raw))


def extend(shape: dict[str, list[Any]], more: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """`shape` with the positions of `more` appended, in place."""
    for name, values in more.items():
        shape[name] += values
    return shape


# ---------------------------------------------------------------- prompt_logprobs
def prompt_shape(positions: Sequence[Position | None], count: int) -> list[dict[str, Any] | None]:
    """One entry a prompt token, the first null: {token id: {logprob, rank, decoded_token}}."""
    result: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        own = next(iter(position))  # the prompt's own token comes first
        entries = {own: position[own], **dict(ranked(position, count))}
        result.append({str(i): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token} for i, e in entries.items()})
    return result
