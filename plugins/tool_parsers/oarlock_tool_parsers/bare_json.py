"""Calls as plain JSON: an object {"name": ..., "arguments" or "parameters": {...}} or a list of them, perhaps fenced by ```json, as the whole answer.

Owns: this format, which is also that of a forced call.
Reads: `json_text`.
Never: takes JSON for a call that names none of the request's functions, for the format has no mark of its own.
"""

from __future__ import annotations

from oarlock_tool_parsers.json_text import JsonParser
from oarlock_tool_parsers.reading import Read


class BareJson(JsonParser):
    names_must_be_known = True

    def read(self) -> Read[None]:
        before = yield from self.space()
        fence = yield from self.literal("```json", "```")
        if fence:
            before += fence + (yield from self.space())
        opened = yield from self.literal("[")
        if opened:
            before += opened + (yield from self.space())
        while (yield from self.peek()) == "{":
            if not (yield from self.attempt(self.call_object(), before)):
                return
            before = yield from self.space()
            if opened and (yield from self.literal(",")):
                before = "," + (yield from self.space())
        for closing in ("]" if opened else "", "```" if fence else ""):
            if self._follows_call and closing and (yield from self.literal(closing)):
                before = yield from self.space()
        if not (self.context.is_forced and self._end is not None and self._at >= len(self._text)):
            self.content(before)
