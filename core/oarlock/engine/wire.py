"""The messages between the API process and the engine process: one kind byte and a msgpack body. Never pickle.

Owns: kinds, and encoding and decoding of the records in `messages`.
Reads: `messages`, `config.resolve` (the configuration's JSON form).
Never: opens a socket.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec

from oarlock.config.resolve import from_dict, to_dict
from oarlock.config.sections import EngineConfig
from oarlock.messages import Abort, EngineInfo, EngineOutputs, EngineRequest
from oarlock.model_summary import ModelSummary

REQUEST, ABORT, RESET, SHUTDOWN = b"R", b"A", b"C", b"S"  # to the engine
READY, OUTPUTS, DEAD = b"I", b"O", b"E"  # from the engine

_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[bytes, Any] = {
    REQUEST: msgspec.msgpack.Decoder(EngineRequest).decode,
    ABORT: msgspec.msgpack.Decoder(Abort).decode,
    READY: msgspec.msgpack.Decoder(EngineInfo).decode,
    OUTPUTS: msgspec.msgpack.Decoder(EngineOutputs).decode,
    DEAD: msgspec.msgpack.Decoder(tuple[str, str]).decode,  # (name of the error's class, message)
    SHUTDOWN: msgspec.msgpack.Decoder(float).decode,  # grace in seconds
}


def pack(kind: bytes, body: Any = None) -> bytes:
    """One frame."""
    return kind if body is None else kind + _encode(body)


def unpack(frame: bytes) -> tuple[bytes, Any]:
    """(kind, body). Raises msgspec.DecodeError or KeyError for what neither side ever sends."""
    kind = frame[:1]
    return kind, (_decoders[kind](memoryview(frame)[1:]) if len(frame) > 1 else None)


def dump_bootstrap(config: EngineConfig, summary: ModelSummary, device: str, factory: str, socket: str) -> str:
    """What a new engine process reads from its standard input, as one JSON line."""
    return json.dumps({"config": to_dict(config), "summary": dataclasses.asdict(summary), "device": device, "factory": factory, "socket": socket})


def load_bootstrap(line: str) -> tuple[EngineConfig, ModelSummary, str, str, str]:
    """The inverse of `dump_bootstrap`."""
    data = json.loads(line)
    return from_dict(data["config"]), ModelSummary.from_dict(data["summary"]), data["device"], data["factory"], data["socket"]

