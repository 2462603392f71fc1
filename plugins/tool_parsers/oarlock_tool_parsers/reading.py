"""The base of every parser here: text is read as from a tape, whatever pieces it comes in.

Owns: the tape, what is held back, when a call is announced.
Reads: `oarlock.backend_api`.
Never: knows a format.

A parser is a generator, `read`, which consumes the text in order and pauses where it runs out; so what it makes of a text cannot
depend on how the text was cut. The methods that may pause are generators too: `yield from` them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import cache
from typing import ClassVar, TypeVar

from oarlock.backend_api import ParserContext, Piece, TextParser

T = TypeVar("T")
Read = Generator[None, None, T]

# A call is announced once its text has proved to be one, or once its arguments are this long: then they stream.
HELD_ARGUMENTS = 1024
MAX_HELD = 1 << 16  # characters of other text that may be held back for one call
LEAST_MARKUP = 3  # characters of a marker that a limit cut, from which it is taken for one
SPACE = " \t\r\n"


class Broken(Exception):
    """The text is no call."""


class Call:
    """A call that is being read. Its arguments are the model's own text."""

    __slots__ = ("arguments", "is_announced", "name", "size")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []  # what was not sent yet
        self.size = 0  # characters of arguments so far
        self.is_announced = False


class StreamParser(TextParser):
    """Subclasses write `read`. `markers`: what begins a call, where the format marks calls."""

    markers: ClassVar[tuple[str, ...]] = ()
    names_must_be_known: ClassVar[bool] = False  # text is taken for a call only where it names one of the request's functions

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._text, self._at = "", 0
        self._end: str | None = None  # why the text ended; None: more may come
        self._pieces: list[Piece] = []
        self._space = ""  # white space whose fate hangs on what follows
        self._follows_call = False
        self._raw: list[str] | None = None  # what an attempt has consumed; None: nothing can be taken back
        self._call = Call()
        self._in_arguments = False
        self._held = 0  # characters that the attempt holds back and cannot stream
        self._steps = self._all()

    @property
    def is_marked(self) -> bool:
        """Whether what an attempt reads is a call for certain, if a whole one."""
        return not self.names_must_be_known or self.context.is_forced

    # ---------------------------------------------------------------- the interface
    def feed(self, text: str) -> list[Piece]:
        self._text, self._at = self._text[self._at :] + text, 0
        return self._resume()

    def finish(self, reason: str) -> list[Piece]:
        self._end = reason
        pieces = self._resume()
        if not self._follows_call and self._space:
            pieces.append(Piece("content", self._space))
        self._space = ""
        return pieces

    def _resume(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _all(self) -> Read[None]:
        yield from self.read()
        yield from self.rest(self.content)

    def read(self) -> Read[None]:
        """Read the text, making pieces; what is left of it is content."""
        raise NotImplementedError

    # ---------------------------------------------------------------- making pieces
    def content(self, text: str) -> None:
        """Text of the answer. White space at its end waits: next to a call it is the format's, elsewhere the answer's."""
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._follows_call = False
            self._pieces.append(Piece("content", shown))

    def reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("reasoning", text))

    def _announce(self) -> None:
        call = self._call
        if not call.is_announced:
            call.is_announced = True
            self._space, self._follows_call = "", True
            self._raw = None  # it cannot be taken back any more
            self._pieces.append(Piece("call", call.name or ""))
        self._pieces += [Piece("arguments", text) for text in call.arguments]
        call.arguments = []

    def named(self, name: str) -> None:
        """The call's function is known. Raises Broken."""
        if not name or len(name) > 256 or (self.names_must_be_known and name not in self.context.functions):
            raise Broken
        self._call.name = name

    def argument(self, text: str) -> None:
        """More of the arguments' JSON text."""
        call = self._call
        call.arguments.append(text)
        call.size += len(text)
        if call.is_announced or (call.name is not None and call.size > HELD_ARGUMENTS):
            self._announce()

    def attempt(self, body: Read[None], before: str = "") -> Read[bool]:
        """Read `body` as one call, which `before` began. Where it is none, what was read is content; cut by a limit, as much of it as is known is a call."""
        self._raw, self._call, self._in_arguments, self._held = [before], Call(), False, 0
        try:
            yield from body
            if self._call.name is None:
                raise Broken
        except Broken:
            call, raw = self._call, self._raw
            self._raw = None
            if call.is_announced:
                return False
            if self._end == "length" and self._at >= len(self._text) and (call.name is not None or self.is_marked):
                if call.name is not None:
                    self._announce()
                else:
                    self._space, self._follows_call = "", True  # the beginning of a call shows as nothing
                return False
            self.content("".join(raw or ()))
            return False
        if not self._call.size:
            self.argument("{}")
        self._announce()
        self._raw = None
        return True

    # ---------------------------------------------------------------- the tape
    def advance(self, count: int) -> str:
        """Consume characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._raw is not None:
            self._raw.append(text)
            if not (self._in_arguments and self._call.name is not None):
                self._held += count
        return text

    def peek(self) -> Read[str]:
        """The next character, "" at the end. Raises Broken where the attempt holds back too much."""
        if self._raw is not None and self._held > MAX_HELD:
            raise Broken
        while self._at >= len(self._text):
            if self._end is not None:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Read[str]:
        char = yield from self.peek()
        if char:
            self.advance(1)
        return char

    def run(self, pattern: re.Pattern[str], emit: Callable[[str], None] | None = None) -> Read[str]:
        """The longest run of characters that match, "" where none does; `emit` gets it as it comes. `pattern`: one repeated character class."""
        parts: list[str] = []
        emit = emit or parts.append
        while (yield from self.peek()):
            found = pattern.match(self._text, self._at)
            size = found.end() - self._at if found else 0
            if not size:
                break
            room = MAX_HELD + 1 - self._held if self._raw is not None else size  # so that it breaks at the same place however the text comes
            emit(self.advance(min(size, room)))
        return "".join(parts)

    def space(self) -> Read[str]:
        return (yield from self.run(_SPACES))

    def literal(self, *texts: str) -> Read[str | None]:
        """Consume the one of `texts` that comes next, and return it; None: none does."""
        longest = max(map(len, texts))
        while True:
            rest = self._text[self._at : self._at + longest]
            full = [text for text in texts if rest.startswith(text)]
            if self._end is not None or not any(len(rest) < len(text) and text.startswith(rest) for text in texts):
                if not full:
                    return None
                return self.advance(len(max(full, key=len)))
            yield

    def expect(self, *texts: str) -> Read[str]:
        found = yield from self.literal(*texts)
        if found is None:
            raise Broken
        return found

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Read[str | None]:
        """Pass text to `emit` up to the first of `markers`, which is consumed and returned; None at the end."""
        pattern = _alternation(markers)
        while True:
            found = pattern.search(self._text, self._at)
            if found:
                emit(self.advance(found.start() - self._at))
                return self.advance(found.end() - found.start())
            keep = begun(self._text, self._at, markers)
            if self._end is not None and not (self._end == "length" and keep >= LEAST_MARKUP):
                keep = 0
            if (size := len(self._text) - self._at - keep) > 0:
                emit(self.advance(size))
            if self._end is not None:
                self.advance(keep)  # a marker that a limit cut shows as nothing
                return None
            yield

    def rest(self, emit: Callable[[str], None]) -> Read[None]:
        """Pass all that is left to `emit`."""
        while (yield from self.peek()):
            emit(self.advance(len(self._text) - self._at))

    def lost_marker(self, markers: Iterable[str]) -> bool:
        """Whether the text ended within a marker, of which nothing is to be shown; it is consumed."""
        rest = self._text[self._at :]
        if self._end is None or not rest or not any(marker.startswith(rest) for marker in markers):
            return False
        self.advance(len(rest))
        return True


_SPACES = re.compile(r"[ \t\r\n]*")


@cache
def _alternation(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))


def begun(text: str, start: int, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text) - start), 0, -1):
        tail = text[len(text) - size :]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
