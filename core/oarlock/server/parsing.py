"""Which parsers read the answers of this server, and one choice's text on its way through them.

Owns: the choice of parsers, the numbering and the ids of calls, how calls and reasoning look in a message and in its deltas.
Reads: `extensions`, `config`.
Never: knows a format of calls: a plugin's parser does; parses while no parser was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oarlock import extensions
from oarlock.backend_api import Extension, ParserContext, Piece, TextParser
from oarlock.config.sections import ServerConfig
from oarlock.errors import PIP, ConfigError, PluginError

PROMPT_END = 256  # characters of the prompt that parsers are shown


@dataclass(frozen=True, slots=True)
class Parsers:
    """What `--tool-call-parser` and `--reasoning-parser` name, imported. `listed`: the plugin's reader of a bare list of calls."""

    tool: type[TextParser] | None = None
    reasoning: type[TextParser] | None = None
    listed: type[TextParser] | None = None


def load_parsers(server: ServerConfig, device: str) -> Parsers:
    """Import the parsers that were asked for. Raises ConfigError for a name that no installed plugin has."""
    tools, thoughts = extensions.parts("tool_parser", device), extensions.parts("reasoning_parser", device)
    return Parsers(
        tool=_load("tool-call-parser", server.tool_call_parser, tools, device),
        reasoning=_load("reasoning-parser", server.reasoning_parser, thoughts, device),
        listed=_load(None, "json", tools, device),
    )


def _load(flag: str | None, name: str | None, parts: Sequence[tuple[Any, Extension]], device: str) -> type[TextParser] | None:
    """The parser of this name; None where none was asked for, or where it is not installed and no flag asks for it."""
    known = sorted({part.name for _, part in parts})
    if not name or (flag is None and name not in known):
        return None
    part = extensions.find(parts[0][1].kind, name, device) if parts else None
    if part is None:
        remedy = f"installed are {', '.join(known)}" if known else f"none is installed; run {PIP} ./plugins/tool_parsers"
        raise ConfigError(f"--{flag} {name}: there is no such parser; {remedy}", option=f"--{flag}")
    found = extensions.load(part)
    if not (isinstance(found, type) and issubclass(found, TextParser)):
        raise PluginError(f"{part.kind} {name}: {part.factory} is no subclass of oarlock.backend_api.TextParser")
    return found


class NamedCall(TextParser):
    """The text is the arguments of a function that the request named."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not self._started:
            text = text.lstrip()
            if not text:
                return []
        start = [] if self._started else [Piece("call", next(iter(self.context.functions)))]
        self._started = True
        return [*start, Piece("arguments", text)]

    def finish(self, reason: str) -> list[Piece]:
        return []


class Reading:
    """One choice's text, read piece by piece into deltas of its message."""

    def __init__(self, kinds: Sequence[type[TextParser]], context: ParserContext, *, max_calls: int | None = None, show_reasoning: bool = True) -> None:
        self._parsers = [kind(context) for kind in kinds]
        self._max_calls, self._show_reasoning = max_calls, show_reasoning
        self.num_calls = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas that this text makes certain."""
        return self._deltas(self._through([Piece("content", text)], 0) if text else [])

    def finish(self, reason: str) -> list[dict[str, Any]]:
        """The deltas of what was held back."""
        pieces: list[Piece] = []
        for at, parser in enumerate(self._parsers):
            pieces = [*self._through(pieces, at, only=True), *parser.finish(reason)]
        return self._deltas(pieces)

    def finish_reason(self, reason: str | None) -> str | None:
        """As the client is told it: a text that ended after calls ended for them."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _through(self, pieces: list[Piece], start: int, *, only: bool = False) -> list[Piece]:
        """The pieces after the parsers from `start` on (`only`: that one): each reads what those before it left as content."""
        for parser in self._parsers[start : start + 1 if only else None]:
            pieces = [new for piece in pieces for new in (parser.feed(piece.text) if piece.kind == "content" else (piece,))]
        return pieces

    def _deltas(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        before = ""
        for piece in pieces:
            if piece.kind == "call":
                self.num_calls += 1
            if self._is_dropped(piece):
                continue
            delta = self._delta(piece)
            if piece.kind == before and piece.kind != "call":
                merge(deltas[-1], delta)
            else:
                deltas.append(delta)
            before = piece.kind
        return deltas

    def _is_dropped(self, piece: Piece) -> bool:
        if piece.kind == "reasoning":
            return not self._show_reasoning
        return piece.kind in ("call", "arguments") and self._max_calls is not None and self.num_calls > self._max_calls

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind == "reasoning":
            return {"reasoning_content": piece.text, "reasoning": piece.text}
        if piece.kind == "content":
            return {"content": piece.text}
        call: dict[str, Any] = {"index": self.num_calls - 1}
        if piece.kind == "call":
            call |= {"id": self._parsers[-1].make_call_id(), "type": "function", "function": {"name": piece.text, "arguments": ""}}
        else:
            call["function"] = {"arguments": piece.text}
        return {"tool_calls": [call]}


def merge(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta to what came before it, in place: as a client does."""
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = (message.get(name) or "") + value
            continue
        calls = message.setdefault(name, [])
        for call in value:
            if calls and calls[-1]["index"] == call["index"]:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls.append({**call, "function": dict(call["function"])})


def whole_message(reading: Reading, text: str, reason: str) -> dict[str, Any]:
    """The message fields of a whole answer: the sum of its deltas, nothing else."""
    message: dict[str, Any] = {"content": None}
    for delta in [*reading.feed(text), *reading.finish(reason)]:
        merge(message, delta)
    for call in message.get("tool_calls", ()):
        del call["index"]
    return message
