"""What travels between the engine, the process that forks, and the processes of grammars.

Owns: the byte format: a length, then a kind byte and the body.
Reads: nothing of ours.
Never: blocks a sender.

To a grammar's process:   S specification (JSON)   A ask: branch id, start, token ids   F forget: branch id
From it:                  C compiled               E error: text (the end)              M mask: branch id, may end, mask   X error: branch id, text
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
_ASK = struct.Struct("<qI")
_MASK = struct.Struct("<q?")
_ID = struct.Struct("<q")
ORDER = struct.Struct("<cq")  # to the process that forks: N new grammar with its socket, K kill; a grammar id


def frame(kind: bytes, body: bytes = b"") -> bytes:
    """One frame."""
    return _LENGTH.pack(1 + len(body)) + kind + body


def ask(branch_id: int, start: int, token_ids: list[int]) -> bytes:
    """A frame: the branch's tokens from `start` on, after which its mask is wanted."""
    return frame(b"A", _ASK.pack(branch_id, start) + struct.pack(f"<{len(token_ids)}i", *token_ids))


def read_ask(body: memoryview) -> tuple[int, int, list[int]]:
    """The inverse of `ask`."""
    branch_id, start = _ASK.unpack_from(body)
    rest = body[_ASK.size :]
    return branch_id, start, list(struct.unpack(f"<{len(rest) // 4}i", rest))


def forget(branch_id: int) -> bytes:
    """A frame: the branch has ended."""
    return frame(b"F", _ID.pack(branch_id))


def read_id(body: memoryview) -> tuple[int, memoryview]:
    """A branch id and what follows it."""
    return _ID.unpack_from(body)[0], body[_ID.size :]


def mask(branch_id: int, bits: bytes, *, may_end: bool) -> bytes:
    """A frame: what may follow."""
    return frame(b"M", _MASK.pack(branch_id, may_end) + bits)


def read_mask(body: memoryview) -> tuple[int, bool, bytes]:
    """The inverse of `mask`."""
    branch_id, may_end = _MASK.unpack_from(body)
    return branch_id, may_end, bytes(body[_MASK.size :])


def failed(branch_id: int, text: str) -> bytes:
    """A frame: no mask can be had for this branch."""
    return frame(b"X", _ID.pack(branch_id) + text.encode("utf-8", "replace"))


def take(buffer: bytearray) -> Iterator[tuple[bytes, memoryview]]:
    """The whole frames at the beginning of `buffer`, which are removed from it."""
    at, data = 0, bytes(buffer)
    while len(data) - at >= _LENGTH.size:
        end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            break
        yield data[at + _LENGTH.size : at + _LENGTH.size + 1], memoryview(data)[at + _LENGTH.size + 1 : end]
        at = end
    del buffer[:at]
