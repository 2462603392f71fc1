"""Grammars by outlines-core: JSON schemas and choices as regular expressions, which become automata over tokens.

Owns: how a specification becomes its expression.
Reads: `vocabulary`.
Never: follows a $ref deeper than outlines-core does: recursion is cut off at three levels.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

from outlines_core import Guide, Index
from outlines_core import Vocabulary as Tokens
from outlines_core.json_schema import build_regex_from_schema

from oarlock_structured_output.vocabulary import Vocabulary

STRING = r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])*"'
SCALAR = rf"({STRING}|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null)"
BLANK = "[ ]?"  # what outlines-core itself takes; more of it makes automata many times larger
SPECIAL = frozenset("\\.^$*+?{}[]()|-/#&~")


def _literal(text: str) -> str:
    return "".join("\\" + char if char in SPECIAL else char for char in text)


def _any_object(blank: str, levels: int = 1) -> str:
    """Any JSON object, its values nested up to `levels` further levels: a regular expression cannot count more."""
    value = SCALAR
    for _ in range(levels + 1):
        pair = rf"{STRING}{blank}:{blank}{value}"
        found = rf"\{{{blank}({pair}({blank},{blank}{pair})*)?{blank}\}}"
        items = rf"\[{blank}({value}({blank},{blank}{value})*)?{blank}\]"
        value = rf"({SCALAR}|{found}|{items})"
    return found


class Engine:
    """One for a vocabulary; grammars are compiled in forks of its process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        ids: dict[bytes | str, list[int]] = {}
        for i, text in vocabulary.text_tokens():
            ids.setdefault(text, []).append(i)
        self._end = min(vocabulary.ends, default=len(vocabulary.tokens))
        self._tokens = Tokens(self._end, ids)

    def compile(self, wanted: dict[str, Any]) -> Matcher:
        """A matcher at the beginning of a text. Raises ValueError with the library's own words."""
        return Matcher(Index(self._expression(wanted), self._tokens), self.vocabulary, self._end)

    def _expression(self, wanted: dict[str, Any]) -> str:
        text = wanted["text"]
        blank = "" if wanted["disable_any_whitespace"] else wanted["whitespace_pattern"] or BLANK
        match wanted["kind"]:
            case "json" if json.loads(text) in ({}, True):
                return rf"({SCALAR}|{_any_object(blank, 0)})"
            case "json":
                if json.loads(text) == {"type": "object"}:
                    return _any_object(blank)
                return str(build_regex_from_schema(text, blank))
            case "json_object":
                return _any_object(blank)
            case "choice":
                return "(" + "|".join(map(_literal, sorted(json.loads(text), key=len, reverse=True))) + ")"  # the first that fits wins
        return str(text)


class Matcher:
    """One text as it grows."""

    def __init__(self, index: Index, vocabulary: Vocabulary, end: int) -> None:
        self._index, self._vocabulary, self._end = index, vocabulary, end
        self._guide = Guide(index)

    def copy(self) -> Matcher:
        """At the beginning: the first matcher is copied only."""
        return Matcher(self._index, self._vocabulary, self._end)

    def consume(self, token_ids: list[int]) -> None:
        """Raises ValueError when a token is not allowed."""
        for token in token_ids:
            self._guide.advance(token, return_tokens=False)

    def mask(self) -> tuple[bytes, bool]:
        """(what may follow, whether the text may end)."""
        num_words = self._vocabulary.num_mask_bytes // 4 + 1  # the end's id may lie behind the vocabulary
        words = (ctypes.c_uint32 * num_words)()
        self._guide.write_mask_into(ctypes.addressof(words), num_words, 4)
        bits = bytearray(bytes(words)[: self._vocabulary.num_mask_bytes])
        if self._end >> 3 < len(bits):
            bits[self._end >> 3] &= ~(1 << (self._end & 7)) & 255
        return bytes(bits), self._guide.is_finished()
