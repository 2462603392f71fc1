"""Whole messages over a stream socket: a kind byte, a length, the body.

Owns: framing.
Reads: nothing of ours.
Never: interprets a body.
"""

from __future__ import annotations

import socket
import struct

_HEAD = struct.Struct("<cQ")
LOAD, PREPARE, MEASURE, START, EXECUTE, CANARY, CLOSE = b"L", b"P", b"M", b"S", b"X", b"C", b"Q"  # engine to worker
OK, ERROR = b"k", b"e"  # worker to engine


def send(end: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Write one message. Raises OSError when the other end is gone."""
    end.sendall(_HEAD.pack(kind, len(body)) + body)


def receive(end: socket.socket) -> tuple[bytes, bytes]:
    """Read one message. Raises EOFError when the other end is gone."""
    kind, size = _HEAD.unpack(_exactly(end, _HEAD.size))
    return kind, _exactly(end, size)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = end.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
    return bytes(data)
