"""Read the header of a .gguf file: metadata and where each tensor lies.

Owns: the GGUF container format, versions 2 and 3, little-endian.
Reads: `errors`.
Never: reads tensor data; knows what a metadata key means (`gguf_config` and the tokenizer do).

    | magic version #tensors #metadata | metadata ... | tensor infos ... | padding | tensor data ... |
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oarlock.errors import ModelError, WeightMismatch

# Tensor type id -> (name, elements in a block, bytes of a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]  # torch order: the last axis is contiguous
    type_name: str  # "Q4_K"
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(slots=True)
class GGUFHeader:
    """What a header says. Arrays of strings are lists of str, arrays of numbers are numpy arrays, skipped ones `None`."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)
    array_lengths: dict[str, int] = field(default_factory=dict)  # of every array, read or skipped
    tensors: dict[str, GGUFTensor] = field(default_factory=dict)


def is_gguf(path: str | Path) -> bool:
    """Whether the file starts as a GGUF file does. False when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_header(path: str | Path, *, large_arrays: bool = False) -> GGUFHeader:
    """Read a header; about 60 ms for a vocabulary of 262,144 without its arrays, 150 ms with them.

    `large_arrays` also reads arrays of more than 1,024 entries (the vocabulary).

    Raises:
        ModelError: the file is missing, of another format or version, or broken; the message says where.
        WeightMismatch: the file ends before a tensor does; the message names the tensor.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(str(path), data, large_arrays).read()
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise ModelError(f"cannot read the GGUF file {path}: {error}") from None


class _Reader:
    def __init__(self, path: str, data: mmap.mmap, large_arrays: bool) -> None:
        self.path, self.data, self.large_arrays, self.at = path, data, large_arrays, 0

    def read(self) -> GGUFHeader:
        data = self.data
        if data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it starts with {bytes(data[:4])!r}, not b'GGUF'")
        self.at = 4
        header = GGUFHeader(self.path)
        what = "the counts"
        try:
            version = self._scalar("<I")
            if version not in (2, 3):
                hint = " (a big-endian file?)" if version and version & 0xFFFF == 0 else ""
                raise ModelError(f"{self.path}: GGUF version {version} is not supported{hint}; versions 2 and 3 are")
            num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
            for number in range(num_keys):
                what = f"metadata entry {number} of {num_keys}"
                key = self._string()
                what = f"the metadata key {key!r}"
                header.metadata[key] = self._value(self._scalar("<I"), header, key)
            what = "the tensor list"
            infos = [self._tensor_info() for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ModelError(
                f"{self.path} is truncated or corrupt: {what} at byte {self.at} of {len(data)} cannot be read ({error})"
            ) from None
        alignment = header.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} is corrupt: general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        for name, shape, type_id, offset in infos:
            header.tensors[name] = self._place(name, shape, type_id, start + offset)
        return header

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        if type_id not in TENSOR_TYPES:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {type_id}")
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        count = 1
        for size in shape:
            count *= size
        if shape and shape[-1] % block:
            raise WeightMismatch(f"{self.path}: tensor {name} has rows of {shape[-1]} elements, but {type_name} comes in blocks of {block}")
        nbytes = count // block * block_bytes
        if offset + nbytes > len(self.data):
            raise WeightMismatch(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + nbytes}, the file at {len(self.data)}; fetch it again"
            )
        return GGUFTensor(name, shape, type_name, offset, nbytes)

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        size = self._scalar("<Q")
        self._need(size)
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8")

    def _need(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise IndexError(f"{size} bytes are announced, {len(self.data) - self.at} are left")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_axes = self._scalar("<I")
        if num_axes > 8:
            raise IndexError(f"tensor {name} has {num_axes} axes")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(num_axes)]))
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _value(self, kind: int, header: GGUFHeader, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(header, key)
        if kind not in _SCALARS:
            raise IndexError(f"value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, header: GGUFHeader, key: str) -> Any:
        kind, length = self._scalar("<I"), self._scalar("<Q")
        header.array_lengths[key] = length
        wanted = self.large_arrays or length <= 1024
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            self._need(length * dtype.itemsize)
            start, self.at = self.at, self.at + length * dtype.itemsize
            return np.frombuffer(self.data[start : self.at], dtype) if wanted else None
        if kind != _STRING:
            raise IndexError(f"array of value type {kind}")
        self._need(length * 8)
        return self._strings(length, wanted)

    def _strings(self, length: int, wanted: bool) -> list[str] | None:
        # PERF: the hot loop of the header, 262,144 turns for a Gemma vocabulary; everything is a local.
        data, at, unpack, end = self.data, self.at, _U64.unpack_from, len(self.data)
        found: list[str] = []
        for _ in range(length):
            (size,) = unpack(data, at)
            at += 8 + size
            if at > end:
                raise IndexError(f"a string of {size} bytes is announced, {end - at + size} are left")
            if wanted:
                found.append(data[at - size : at].decode("utf-8", "surrogateescape"))
        self.at = at
        return found if wanted else None
