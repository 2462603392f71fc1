"""Keeps JSON from running on, with endless blanks between its parts or endless digits of a number, and from closing after a comma.

Owns: how far the first two may go, and the state that tells a string from the rest.
Reads: `vocabulary`.
Never: forbids the last token that a grammar allows.

A grammar allows any number of blanks and digits, and a model that has lost its way takes them until max_tokens. Commas are
lm-format-enforcer's mistake.
"""

from __future__ import annotations

from oarlock_structured_output.vocabulary import Vocabulary

LIMIT = 32  # blanks in a row outside strings, digits of one number
BLANKS, DIGITS = b" \t\r\n", b"0123456789"


def _lead(text: bytes, of: bytes) -> int:
    return len(text) - len(text.lstrip(of))


class Leads:
    """How each token begins. Made once for a vocabulary; bans are made as they are needed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        pairs = vocabulary.text_tokens()
        self._leads = {of: [(n, i) for i, text in pairs if (n := _lead(text, of))] for of in (BLANKS, DIGITS)}
        self._longest = {of: max((n for n, _ in found), default=0) for of, found in self._leads.items()}
        self._bans: dict[tuple[bytes, int], int] = {}
        self.closers = int.from_bytes(vocabulary.bits([i for i, text in pairs if text.lstrip(BLANKS)[:1] in (b"}", b"]")]), "little")

    def ban(self, of: bytes, run: int) -> int:
        """The tokens, as one integer of bits, that would bring a run of this length beyond the limit."""
        left = max(0, LIMIT - run)
        if left >= self._longest[of]:
            return 0
        if (of, left) not in self._bans:
            ids = [i for n, i in self._leads[of] if n > left]
            self._bans[of, left] = int.from_bytes(self._vocabulary.bits(ids), "little")
        return self._bans[of, left]


class JsonRun:
    """One JSON text as it grows."""

    def __init__(self, leads: Leads) -> None:
        self._leads = leads
        self._in_string = self._escaped = False
        self._blanks = self._digits = self._last = 0  # _last: the last byte that is no blank, outside strings

    def add(self, text: bytes) -> None:
        for byte in text:
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif byte == 0x5C:
                    self._escaped = True
                elif byte == 0x22:
                    self._in_string = False
                continue
            self._in_string = byte == 0x22
            self._last = self._last if byte in BLANKS else byte
            self._blanks = self._blanks + 1 if byte in BLANKS else 0
            if byte in DIGITS:
                self._digits += 1
            elif byte not in b"+-.eE":
                self._digits = 0

    def restrict(self, mask: bytes, *, may_end: bool) -> bytes:
        """The mask without what would run on, if that leaves anything."""
        if self._in_string:
            return mask
        ban = self._leads.ban(BLANKS, self._blanks) | self._leads.ban(DIGITS, self._digits)
        if self._last == 0x2C:
            ban |= self._leads.closers
        if not ban:
            return mask
        left = int.from_bytes(mask, "little") & ~ban
        return left.to_bytes(len(mask), "little") if left or may_end else mask
