"""What the tests' processes of grammars import: a vocabulary of bytes, and an engine whose faults a test chooses.

Owns: `vocabulary`, and `Engine`, whose text says what it does.
Reads: nothing of ours.
Never: is imported by the package.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Any

END = 256
WORDS = [b"true", b'{"', b"   ", b"12", b"ab"]
TOKENS = [*(bytes([i]) for i in range(256)), b"<end>", b"<call>", *WORDS]
TOKENS += [b""] * (288 - len(TOKENS))  # padding of the model's own, to a multiple of 32: no word of a mask has room to spare
CALL = 257


def encode(text: str) -> list[int]:
    """Bytes, one token each."""
    return list(text.encode())


def vocabulary(argument: str) -> tuple[list[bytes], list[int], list[int], Any]:
    """What core's source gives; "broken" raises, and after "no processes" this process gets one child and no more."""
    if argument == "broken":
        raise ValueError("the tokenizer is not there")
    if argument == "no processes":
        fork, left = os.fork, [1]

        def limited() -> int:
            if not left:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            left.pop()
            return fork()

        os.fork = limited
    return TOKENS, [END, CALL], [END], encode


class Engine:
    """Compiles "hang", "eat", "crash", "wrong", "slow N" and "mask-hang"; everything else allows the byte a for ever."""

    def __init__(self, found: Any) -> None:
        self.vocabulary = found

    def compile(self, wanted: dict[str, Any]) -> Matcher:
        text = wanted["text"]
        if text == "hang":
            while True:
                pass
        if text == "eat":
            kept = []
            while True:
                kept.append(b"x" * (8 << 20))
        if text == "wrong":
            raise ValueError("it is wrong")
        if text == "crash":
            os.abort()
        if text.startswith("slow"):
            time.sleep(float(text.split()[1]))
        return Matcher(self.vocabulary, text)


class Matcher:
    """The byte a, and the end after three."""

    def __init__(self, found: Any, text: str, count: int = 0) -> None:
        self._vocabulary, self._text, self._count = found, text, count

    def copy(self) -> Matcher:
        return Matcher(self._vocabulary, self._text, self._count)

    def consume(self, token_ids: list[int]) -> None:
        if any(token != 97 for token in token_ids):
            raise ValueError(f"only a is allowed, not {token_ids}")
        self._count += len(token_ids)

    def mask(self) -> tuple[bytes, bool]:
        if self._text == "mask-hang" and self._count:
            time.sleep(3600)
        return self._vocabulary.bits([97]), self._count >= 3
