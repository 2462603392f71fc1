"""DeepSeek V3 and R1: marks around each call, its name after a separator, its arguments in a fenced block; V3.1: the arguments after the separator.

Owns: this format.
Reads: `json_text`.
Never: takes text outside the marks for a call.
"""

from __future__ import annotations

import re

from oarlock_tool_parsers.json_text import JsonParser
from oarlock_tool_parsers.reading import Read

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(r"[^<\r\n]*")
_LINE = re.compile(r"[^\r\n]*")


class DeepSeek(JsonParser):
    """Both forms, told apart by what follows the separator."""

    special_tokens = (CALLS, CALLS_END, CALL, SEP, CALL_END)

    def read(self) -> Read[None]:
        while (marker := (yield from self.until((CALLS, CALL), self.content))):
            if marker == CALLS:
                space = yield from self.space()
                if not (yield from self.literal(CALL)):
                    if not self.lost_marker((CALL,)):
                        self.content(marker + space)
                    continue
                marker += space + CALL
            if (yield from self.attempt(self._body(), marker)):
                for marker in (CALL_END, CALLS_END):
                    space = yield from self.space()
                    if not (yield from self.literal(marker)) and not self.lost_marker((marker,)):
                        self.content(space)

    def _body(self) -> Read[None]:
        head = yield from self.run(_HEAD)
        yield from self.expect(SEP)
        space = yield from self.space()
        if (yield from self.peek()) == "{" and not ("\n" in space):
            self.named(head.strip())
            yield from self.arguments()
            return
        self.named((yield from self.run(_LINE)).strip())
        yield from self.space()
        fenced = yield from self.literal("```json", "```")
        yield from self.space()
        yield from self.arguments()
        if fenced:
            yield from self.space()
            yield from self.literal("```")
