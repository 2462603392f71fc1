"""Reads JSON as it comes, strictly: a value's text, and a call written as an object.

Owns: the grammar of JSON (RFC 8259), and what an object must have to be a call.
Reads: `reading`.
Never: builds Python values of what the model wrote, but for names and arguments that are themselves a text.

One repair is made: a raw line break or another control character inside a string, which models write, becomes its escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import ClassVar

from oarlock_tool_parsers.reading import Broken, Read, StreamParser

MAX_DEPTH = 64
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
WORD = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
HEX = frozenset("0123456789abcdefABCDEF")
ESCAPES = frozenset('"\\/bfnrt')
Emit = Callable[[str], None]


class JsonParser(StreamParser):
    """What parsers of JSON calls share."""

    argument_keys: ClassVar[tuple[str, ...]] = ("arguments", "parameters")

    # ---------------------------------------------------------------- values
    def json_string(self, emit: Emit) -> Read[None]:
        """A string with its quotes. Raises Broken."""
        emit((yield from self.expect('"')))
        while True:
            yield from self.run(PLAIN, emit)
            char = yield from self.take()
            if char == '"':
                emit(char)
                return
            if not char:
                raise Broken
            if char != "\\":
                emit(json.dumps(char)[1:-1])  # a control character
                continue
            escape = yield from self.take()
            if escape == "u":
                for _ in range(4):
                    digit = yield from self.take()
                    if digit not in HEX:
                        raise Broken
                    escape += digit
            elif escape not in ESCAPES:
                raise Broken
            emit(char + escape)

    def json_value(self, emit: Emit) -> Read[None]:
        """Any value. `emit` gets its text as it comes. Raises Broken. No recursion: `stack` holds the brackets to close."""
        stack: list[str] = []
        while True:
            emit((yield from self.space()) if stack else "")
            char = yield from self.peek()
            if char in ("{", "["):
                emit(self.advance(1))
                stack.append("}" if char == "{" else "]")
                if len(stack) > MAX_DEPTH:
                    raise Broken
                emit((yield from self.space()))
                if (yield from self.peek()) != stack[-1]:
                    if char == "{":
                        yield from self._key(emit)
                    continue
            elif char == '"':
                yield from self.json_string(emit)
            else:
                word = yield from self.run(WORD)
                if word not in ("true", "false", "null") and not NUMBER.fullmatch(word):
                    raise Broken
                emit(word)
            if (yield from self._close(stack, emit)):
                return

    def _close(self, stack: list[str], emit: Emit) -> Read[bool]:
        """After a value: close brackets until another value must come (False) or the outermost is done (True)."""
        while stack:
            emit((yield from self.space()))
            found = yield from self.expect(stack[-1], ",")
            emit(found)
            if found == ",":
                if stack[-1] == "}":
                    yield from self._key(emit)
                return False
            stack.pop()
        return True

    def _key(self, emit: Emit) -> Read[None]:
        emit((yield from self.space()))
        yield from self.json_string(emit)
        emit((yield from self.space()))
        emit((yield from self.expect(":")))

    def text_value(self) -> Read[str]:
        """A string's value. Raises Broken."""
        parts: list[str] = []
        yield from self.json_string(parts.append)
        text = str(json.loads("".join(parts)))
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise Broken  # half a character, which no answer can carry
        return text

    # ---------------------------------------------------------------- calls
    def arguments(self) -> Read[None]:
        """The call's arguments: an object; null; or a string that holds an object. Raises Broken."""
        if self._call.size:
            raise Broken  # given twice
        char = yield from self.peek()
        if char == "{":
            self._in_arguments = True
            yield from self.json_value(self.argument)
            self._in_arguments = False
        elif char == '"':
            text = yield from self.text_value()
            try:
                is_object = isinstance(json.loads(text), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                raise Broken
            self.argument(text)
        else:
            yield from self.expect("null")

    def call_object(self) -> Read[None]:
        """{"name": ..., "arguments": {...}}, in any order and with other keys; or the same as the value of "function". Raises Broken."""
        yield from self.expect("{")
        while True:
            yield from self.space()
            key = yield from self.text_value()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            is_object = (yield from self.peek()) == "{"
            if key == "name" or (key == "function" and not is_object):
                self.named((yield from self.text_value()))
            elif key == "function" and self._call.name is None:
                yield from self.call_object()
            elif key in self.argument_keys:
                yield from self.arguments()
            else:
                yield from self.json_value(_ignore)
            yield from self.space()
            if (yield from self.expect(",", "}")) == "}":
                return


def _ignore(text: str) -> None:
    """Other keys, such as an id of the model's own, say nothing that is passed on."""
