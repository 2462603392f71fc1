"""Records to bytes and back, between engine and workers. Standard library and numpy only; never pickle.

Owns: the byte format, and the list of record types that may travel.
Reads: `messages` and the records they hold.
Never: builds an object of a type that is not listed.

Format: one tag byte, then the value. Integers are 8 bytes; a tuple of more than a few small integers (tokens, blocks)
travels as one int32 array.

    N None   T True   F False   i int64   f float64   s text   b bytes   t tuple   l list   d dict   a int32 array   r record
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np

from oarlock.backend_api.capabilities import Capabilities
from oarlock.errors import WorkerError
from oarlock.kv_spec import KVGroup
from oarlock.messages import CachedRequest, ModelRunnerOutput, NewRequest, PositionLogprobs, ScheduledRow, SchedulerOutput, WorkerReady
from oarlock.pooling_params import PoolingParams
from oarlock.sampling_params import SamplingParams
from oarlock.shapes import BucketTable

RECORDS: tuple[type, ...] = (
    SchedulerOutput,
    NewRequest,
    CachedRequest,
    ScheduledRow,
    SamplingParams,
    ModelRunnerOutput,
    PositionLogprobs,
    WorkerReady,
    Capabilities,
    KVGroup,
    BucketTable,
    PoolingParams,
)
_NUMBER = {cls: at for at, cls in enumerate(RECORDS)}
_FIELDS = [tuple(f.name for f in dataclasses.fields(cls)) for cls in RECORDS]
_INT, _FLOAT, _LEN = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I")
_ARRAY_FROM = 8  # elements from which a tuple of ints is worth an array
_INT32 = range(-(2**31), 2**31)


def encode(value: Any) -> bytes:
    """The bytes of a record. Raises TypeError for a type that does not travel (callables, tensors)."""
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def decode(data: bytes) -> Any:
    """The inverse of `encode`.

    Raises:
        WorkerError: the bytes are not what `encode` writes.
    """
    try:
        value, end = _read(memoryview(data), 0)
    except (IndexError, struct.error, KeyError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise WorkerError(f"a message between engine and worker is damaged: {error}") from error
    if end != len(data):
        raise WorkerError(f"a message between engine and worker has {len(data) - end} bytes too many")
    return value


def _write(value: Any, put: Any) -> None:
    kind = type(value)
    if value is None:
        put(b"N")
    elif kind is bool:
        put(b"T" if value else b"F")
    elif kind is int:
        put(b"i" + _INT.pack(value))
    elif kind is float:
        put(b"f" + _FLOAT.pack(value))
    elif kind is str:
        data = value.encode("utf-8", "surrogatepass")
        put(b"s" + _LEN.pack(len(data)) + data)
    elif kind is bytes:
        put(b"b" + _LEN.pack(len(value)) + value)
    elif kind is tuple or kind is list:
        _write_sequence(value, put)
    elif kind is dict:
        put(b"d" + _LEN.pack(len(value)))
        for key, item in value.items():
            _write(key, put)
            _write(item, put)
    elif kind in _NUMBER:
        number = _NUMBER[kind]
        put(b"r" + bytes((number,)))
        for name in _FIELDS[number]:
            _write(getattr(value, name), put)
    else:
        raise TypeError(f"{kind.__name__} does not travel between engine and workers")


def _write_sequence(value: Any, put: Any) -> None:
    if type(value) is tuple and len(value) >= _ARRAY_FROM and all(type(v) is int and v in _INT32 for v in value):
        put(b"a" + _LEN.pack(len(value)) + np.array(value, np.int32).tobytes())
        return
    put((b"t" if type(value) is tuple else b"l") + _LEN.pack(len(value)))
    for item in value:
        _write(item, put)


def _read(data: memoryview, at: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1
    if tag == 0x4E:  # N
        return None, at
    if tag == 0x54 or tag == 0x46:  # T F
        return tag == 0x54, at
    if tag == 0x69:  # i
        return _INT.unpack_from(data, at)[0], at + 8
    if tag == 0x66:  # f
        return _FLOAT.unpack_from(data, at)[0], at + 8
    if tag == 0x72:  # r
        return _read_record(data, at)
    (count,) = _LEN.unpack_from(data, at)
    return _read_sized(tag, count, data, at + 4)


def _read_sized(tag: int, count: int, data: memoryview, at: int) -> tuple[Any, int]:
    if tag == 0x73 or tag == 0x62:  # s b
        raw = bytes(data[at : at + count])
        if len(raw) != count:
            raise ValueError("text is cut short")
        return (raw.decode("utf-8", "surrogatepass") if tag == 0x73 else raw), at + count
    if tag == 0x61:  # a
        return tuple(np.frombuffer(data[at : at + 4 * count], np.int32, count).tolist()), at + 4 * count
    if tag == 0x64:  # d
        found: dict[Any, Any] = {}
        for _ in range(count):
            key, at = _read(data, at)
            found[key], at = _read(data, at)
        return found, at
    if tag not in (0x74, 0x6C):
        raise ValueError(f"unknown tag {tag}")
    items = []
    for _ in range(count):
        item, at = _read(data, at)
        items.append(item)
    return (tuple(items) if tag == 0x74 else items), at


def _read_record(data: memoryview, at: int) -> tuple[Any, int]:
    number, at = data[at], at + 1
    values = []
    for _ in _FIELDS[number]:
        value, at = _read(data, at)
        values.append(value)
    return RECORDS[number](*values), at
