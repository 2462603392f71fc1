"""Llama 3 and 4: {"name": ..., "parameters": {...}} as the whole answer or after <|python_tag|>, several with ";" between them.

Owns: this format.
Reads: `json_text`.
Never: takes JSON for a call that names none of the request's functions, for the format has no mark of its own.
"""

from __future__ import annotations

from oarlock_tool_parsers.json_text import JsonParser
from oarlock_tool_parsers.reading import Read

TAG = "<|python_tag|>"


class Llama3Json(JsonParser):
    """An answer that begins otherwise is content, up to the tag."""

    special_tokens = (TAG,)
    names_must_be_known = True

    def read(self) -> Read[None]:
        space = yield from self.space()
        if (yield from self.peek()) != "{":
            self.content(space)
            if not (yield from self.until((TAG,), self.content)):
                return
            yield from self.space()
        while (yield from self.peek()) == "{":
            if not (yield from self.attempt(self.call_object())):
                break
            space = yield from self.space()
            more = yield from self.literal(";", ",")
            if more:
                space = yield from self.space()
            if (yield from self.literal(TAG)):
                space = yield from self.space()
            if (yield from self.peek()) != "{":
                self.content(space)
        yield from self.until((TAG,), self.content)
