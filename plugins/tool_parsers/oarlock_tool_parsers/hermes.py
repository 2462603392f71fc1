"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around.

Owns: this format.
Reads: `json_text`.
Never: takes text outside the marks for a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from oarlock_tool_parsers.json_text import JsonParser
from oarlock_tool_parsers.reading import Read

START, END = "<tool_call>", "</tool_call>"


class Hermes(JsonParser):
    """The closing mark may be missing; one that stands alone is content."""

    special_tokens = (START, END)

    @classmethod
    def call_tags(cls, functions: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        tags = [
            {"begin": f'{START}\n{{"name": {json.dumps(name)}, "arguments": ', "schema": schema, "end": f"}}\n{END}"}
            for name, schema in functions.items()
        ]
        return {"structures": tags, "triggers": [START]}

    def read(self) -> Read[None]:
        while (yield from self.until((START,), self.content)):
            if (yield from self.attempt(self._body(), START)):
                space = yield from self.space()
                if not (yield from self.literal(END)) and not self.lost_marker((END,)):
                    self.content(space)

    def _body(self) -> Read[None]:
        yield from self.space()
        yield from self.call_object()
