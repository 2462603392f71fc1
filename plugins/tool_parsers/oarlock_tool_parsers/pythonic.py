"""Llama 3 and 4 pythonic: [f(a=1, b="x"), g()] as the whole answer, perhaps between <|python_start|> and <|python_end|>.

Owns: this format, and the literals of Python that it may hold.
Reads: `reading`.
Never: evaluates anything; takes text for a call that names none of the request's functions, for the format has no mark of its own.

Values become JSON as they are read: names and strings in double quotes, True, False and None in JSON's spelling, tuples as arrays.
"""

from __future__ import annotations

import json
import re

from oarlock_tool_parsers.json_text import HEX, MAX_DEPTH, NUMBER, WORD
from oarlock_tool_parsers.reading import Broken, Read, StreamParser

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


class Pythonic(StreamParser):
    special_tokens = (START, END)
    names_must_be_known = True

    def read(self) -> Read[None]:
        before = yield from self.space()
        if (yield from self.literal(START)):
            before = yield from self.space()
        if not (yield from self.literal("[")):
            self.content(before)
            return
        before += "[" + (yield from self.space())
        while (yield from self.attempt(self._call_text(), before)):
            before = yield from self.space()
            if not (yield from self.literal(",")):
                if (yield from self.literal("]")):
                    before = yield from self.space()
                    if (yield from self.literal(END)) or self.lost_marker((END,)):
                        before = ""
                self.content(before)
                return
            before = "," + (yield from self.space())

    def _call_text(self) -> Read[None]:
        name = yield from self.run(_NAME)
        yield from self.expect("(")
        self.named(name)
        self._in_arguments = True
        emit, first = self.argument, True
        emit("{")
        while True:
            yield from self.space()
            if (yield from self.literal(")")):
                break
            key = yield from self.run(_NAME)
            if not key.isidentifier():
                raise Broken
            yield from self.space()
            yield from self.expect("=")
            emit(("" if first else ", ") + json.dumps(key) + ": ")
            first = False
            yield from self._value(0)
            yield from self.space()
            if (yield from self.expect(",", ")")) == ")":
                break
        emit("}")
        self._in_arguments = False

    def _value(self, depth: int) -> Read[None]:
        """One literal, as JSON. Raises Broken."""
        if depth > MAX_DEPTH:
            raise Broken
        yield from self.space()
        char = yield from self.peek()
        if char in _PLAIN:
            yield from self._string()
        elif char in ("[", "("):
            yield from self._items(depth, "]" if char == "[" else ")")
        elif char == "{":
            yield from self._items(depth, "}")
        else:
            word = yield from self.run(WORD)
            if word not in _WORDS and not NUMBER.fullmatch(word):
                raise Broken
            self.argument(_WORDS.get(word, word))

    def _items(self, depth: int, closing: str) -> Read[None]:
        self.advance(1)
        is_dict, first = closing == "}", True
        self.argument("{" if is_dict else "[")
        while True:
            yield from self.space()
            if (yield from self.literal(closing)):
                break
            if not first:
                self.argument(", ")
            first = False
            if is_dict:
                if (yield from self.peek()) not in _PLAIN:
                    raise Broken  # JSON's keys are strings
                yield from self._string()
                yield from self.space()
                yield from self.expect(":")
                self.argument(": ")
            yield from self._value(depth + 1)
            yield from self.space()
            if (yield from self.expect(",", closing)) == closing:
                break
        self.argument("}" if is_dict else "]")

    def _string(self) -> Read[None]:
        quote = self.advance(1)
        self.argument('"')
        while True:
            yield from self.run(_PLAIN[quote], lambda text: self.argument(json.dumps(text, ensure_ascii=False)[1:-1]))
            char = yield from self.take()
            if char == quote:
                break
            if not char:
                raise Broken
            yield from self._escape()
        self.argument('"')

    def _escape(self) -> Read[None]:
        """What stands after a backslash."""
        char = yield from self.take()
        if char in _DIGITS:
            code = ""
            for _ in range(_DIGITS[char]):
                digit = yield from self.take()
                if digit not in HEX:
                    raise Broken
                code += digit
            if int(code, 16) > 0x10FFFF:
                raise Broken
            text = chr(int(code, 16))
        elif char:
            text = _ESCAPES.get(char, "\\" + char)  # as Python does: an unknown escape is no escape
        else:
            raise Broken
        self.argument(json.dumps(text)[1:-1])
