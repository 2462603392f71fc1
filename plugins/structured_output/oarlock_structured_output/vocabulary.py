"""The tokens as bytes, and where they come from.

Owns: `Vocabulary`.
Reads: what core names as the source.
Never: decides what a text may be.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[i]` are the bytes of token i; empty: it stands for no text."""

    tokens: list[bytes]
    special: frozenset[int]  # control tokens, whose bytes are their name
    ends: frozenset[int]  # those that end a text
    encode_text: Callable[[str], list[int]]  # the model's own way to write a text
    by_name: dict[bytes, int] = field(default_factory=dict)  # special tokens
    _ids: dict[bytes, int] = field(default_factory=dict)

    def encode(self, text: bytes) -> list[int]:
        """Tokens whose bytes are exactly these: the model's own way to write them, else the longest token at each place."""
        try:
            ids = self.encode_text(text.decode())
        except UnicodeDecodeError:
            ids = []
        if b"".join(self.tokens[i] for i in ids) == text:
            return ids
        if not self._ids:
            self._ids.update((token, i) for i, token in reversed(self.text_tokens()))
        ids, at = [], 0
        while at < len(text):
            size = next((n for n in range(min(len(text) - at, 64), 0, -1) if text[at : at + n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids

    @property
    def num_mask_bytes(self) -> int:
        return (len(self.tokens) + 31) // 32 * 4

    def text_tokens(self) -> list[tuple[int, bytes]]:
        """(id, bytes) of the tokens that stand for text."""
        return [(i, text) for i, text in enumerate(self.tokens) if text and i not in self.special and i not in self.ends]

    def bits(self, ids: list[int]) -> bytes:
        """A mask with these tokens set."""
        mask = bytearray(self.num_mask_bytes)
        for i in ids:
            mask[i >> 3] |= 1 << (i & 7)
        return bytes(mask)


def load(source: str, argument: str) -> Vocabulary:
    """What core names: a function that gives tokens, special ids, ids that end a text, and the way to write one. Raises what it raises."""
    module, _, name = source.partition(":")
    tokens, special, ends, encode = getattr(importlib.import_module(module), name)(argument)
    known = [i for i in special if i < len(tokens)]
    return Vocabulary(tokens, frozenset(known), frozenset(ends), encode, {tokens[i]: i for i in known if tokens[i]})
