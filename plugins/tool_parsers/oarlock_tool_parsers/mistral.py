"""Mistral: [TOOL_CALLS] and a JSON list of calls; in newer tokenizers [TOOL_CALLS]name{...} or [TOOL_CALLS]name[ARGS]{...} for each call.

Owns: this format, and the form of its call ids, which the chat templates check.
Reads: `json_text`.
Never: takes text before the mark for a call.
"""

from __future__ import annotations

import re
import uuid

from oarlock_tool_parsers.json_text import JsonParser
from oarlock_tool_parsers.reading import Broken, Read

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class Mistral(JsonParser):
    special_tokens = (START, ARGS, CALL_ID)

    def make_call_id(self) -> str:
        return uuid.uuid4().hex[:9]

    def read(self) -> Read[None]:
        marker = yield from self.until((START,), self.content)
        while marker:
            space = yield from self.space()
            if (yield from self.peek()) == "[":
                yield from self._list(marker + space)
            else:
                yield from self.attempt(self._named_call(), marker + space)
            marker = yield from self.until((START,), self.content)

    def _list(self, before: str) -> Read[None]:
        """The calls of a list. What follows one that is none is content."""
        before += self.advance(1) + (yield from self.space())
        while (yield from self.attempt(self.call_object(), before)):
            yield from self.space()
            if (yield from self.literal(",")) is None:
                yield from self.literal("]")
                return
            before = "," + (yield from self.space())

    def _named_call(self) -> Read[None]:
        name = yield from self.run(_NAME)
        if not name:
            raise Broken
        if (yield from self.literal(CALL_ID)):
            yield from self.run(_NAME)
        yield from self.literal(ARGS)
        yield from self.space()
        if (yield from self.peek()) != "{":
            raise Broken
        self.named(name)
        yield from self.arguments()
