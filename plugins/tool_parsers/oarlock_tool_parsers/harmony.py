"""gpt-oss: messages of channels, <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>..., calls among them.

Owns: this format: analysis is reasoning, a message to functions.NAME is a call, everything else is content.
Reads: `json_text`.
Never: shows the headers of messages.
"""

from __future__ import annotations

import re

from oarlock.backend_api import ParserContext, Piece, TextParser

from oarlock_tool_parsers.json_text import JsonParser
from oarlock_tool_parsers.reading import Read

BEGIN, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class Harmony(JsonParser):
    """A tool parser that knows reasoning, too, for this format has them in one."""

    special_tokens = (BEGIN, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

    def read(self) -> Read[None]:
        header = yield from self.literal(" to=", "to=")  # the prompt ends within the first header
        if header is None:
            header = yield from self.until((BEGIN, CHANNEL), self.content)
        while header:
            parts = [header]
            if not (yield from self.until((MESSAGE,), parts.append)):
                return
            end = yield from self._message("".join(parts))
            header = end if end in (BEGIN, CHANNEL) else (yield from self.until((BEGIN, CHANNEL), self.content))

    def _message(self, header: str) -> Read[str | None]:
        """One message's text; the marker after it."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        emit = self.content
        if recipient and self.context.functions:
            yield from self.attempt(self._arguments(recipient.group(1)))
        elif channel and channel.group(1) == "analysis":
            emit = self.reasoning
        return (yield from self.until((*ENDS, BEGIN, CHANNEL), emit))

    def _arguments(self, name: str) -> Read[None]:
        yield from self.space()
        self.named(name)
        yield from self.arguments()


class HarmonyReasoning(TextParser):
    """The same without calls. Where calls are read, their parser reads the reasoning, and this one passes everything on."""

    special_tokens = Harmony.special_tokens

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._reader = None if context.calls_are_read else Harmony(ParserContext({}, context.prompt_end))

    def feed(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if self._reader is None else self._reader.feed(text)

    def finish(self, reason: str) -> list[Piece]:
        return [] if self._reader is None else self._reader.finish(reason)
