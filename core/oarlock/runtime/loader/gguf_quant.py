"""Block-quantised GGUF tensors to codes and to floats, in plain torch.

Owns: the bit layout of each block type.
Reads: nothing.
Never: reads files; knows tensor names.

Every `_q…` function takes blocks [num_blocks, block_bytes] uint8 and returns `Codes`. A block holds half-precision scales (d, and m for
a minimum), then integers q packed low bits first:
    value = d * q + m      (32 elements)
    value = d * scale * q - dmin * min     (256 elements, in sub-blocks with their own small scale and min)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BLOCKS_BYTES = 1 << 20  # PERF: of packed input at once; larger chunks leave the cache (measured 1.6 times slower at 16 MiB)


class Codes(NamedTuple):
    """Elements of one group share a scale and an offset: value = q * scale + offset."""

    q: Tensor  # [num_blocks, groups, elements of a group] int8
    scale: Tensor  # [num_blocks, groups] float32
    offset: Tensor | None  # as scale; None: 0


@dataclass(frozen=True, slots=True)
class BlockType:
    """One way to store a block of elements."""

    block_bytes: int
    elements: int
    group: int  # elements of one
    lowest: int  # code; with `bits`, the range of q
    bits: int  # 4 or 8: the least that hold q - lowest
    has_offset: bool
    unpack: Callable[[Tensor], Codes]


def dequantise(raw: Tensor, type_name: str, out: Tensor) -> None:
    """Write the values of `raw`, [num_blocks * block_bytes] uint8, into `out`, flat and floating point, in place.

    Raises:
        KeyError: no such block type here (see `BLOCK_TYPES`).
    """
    values, at = out.view(-1, BLOCK_TYPES[type_name].elements), 0
    for q, scale, offset in _chunks(raw, type_name):
        numbers = q.float() * scale[..., None] if offset is None else torch.addcmul(offset[..., None], q.float(), scale[..., None])
        values[at : at + len(q)] = numbers.flatten(1)
        at += len(q)


def read_codes(raw: Tensor, type_name: str, shape: tuple[int, int]) -> Codes:
    """All of a tensor of `shape` [out, in]: q [out, in] int8, scale and offset [out, in / group]. Raises as `dequantise`."""
    kind, parts = BLOCK_TYPES[type_name], list(_chunks(raw, type_name))
    tables = (torch.cat([part.scale for part in parts]), torch.cat([part.offset for part in parts if part.offset is not None]) if kind.has_offset else None)
    scale, offset = (None if table is None else table.view(shape[0], -1) for table in tables)
    assert scale is not None
    return Codes(torch.cat([part.q.flatten(1) for part in parts]).view(shape), scale, offset)


def _chunks(raw: Tensor, type_name: str) -> Iterator[Codes]:
    kind = BLOCK_TYPES[type_name]
    blocks = raw.view(-1, kind.block_bytes)
    for part in blocks.split(max(1, CHUNK_BLOCKS_BYTES // kind.block_bytes)):
        yield kind.unpack(part)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [num_blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[num_blocks, n] bytes to [num_blocks, 2n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fields(packed: Tensor, width: int) -> Tensor:
    """[..., n] bytes to [..., 8 / width, n]: the first field of all bytes, then the second, ..."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (packed.unsqueeze(-2) >> shifts) & ((1 << width) - 1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits from byte `at`, bit i for element i, worth 16 each."""
    return _fields(blocks[:, at : at + 4], 1).transpose(1, 2).reshape(-1, 32) << 4


def _one_group(q: Tensor, scale: Tensor, offset: Tensor | None = None) -> Codes:
    return Codes(q.view(torch.int8)[:, None], scale, offset)


def _q4_0(blocks: Tensor) -> Codes:
    return _one_group(_nibbles(blocks[:, 2:18]) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    return _one_group(_nibbles(blocks[:, 4:20]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    return _one_group((_nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    return _one_group(_nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return _one_group(blocks[:, 2:34], _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Codes:
    # | 16 x (scale 4 bits, min 4 bits) | 64 bytes of 2-bit q | d | dmin |
    packed = blocks[:, :16]
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return Codes(q.view(torch.int8), (packed & 15) * _half(blocks, 80), (packed >> 4) * -_half(blocks, 82))


def _q3_k(blocks: Tensor) -> Codes:
    # | 32 bytes of third bits | 64 bytes of low 2 bits | 12 bytes: 16 scales of 6 bits | d |
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    third = _fields(blocks[:, :32], 1).reshape(-1, 256)
    packed = blocks[:, 96:108]
    scale = (_nibbles(packed[:, :8]) | (_fields(packed[:, 8:], 2).reshape(-1, 16) << 4)).float() - 32
    return Codes(((low | (third << 2)) - 4).view(torch.int8).view(-1, 16, 16), scale * _half(blocks, 108), None)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes to 8 scales and 8 mins of 6 bits, each [num_blocks, 8].

    bytes 0-3   scale 0-3 in the low 6 bits; the high 2 are the top of scale 4-7
    bytes 4-7   min 0-3, and the top of min 4-7
    bytes 8-11  low 4 bits of scale 4-7, low 4 bits of min 4-7
    """
    scales, mins, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    return (
        torch.cat((scales & 63, (rest & 15) | ((scales >> 6) << 4)), dim=1),
        torch.cat((mins & 63, (rest >> 4) | ((mins >> 6) << 4)), dim=1),
    )


def _scaled(q: Tensor, blocks: Tensor) -> Codes:
    """Eight sub-blocks of 32: q [num_blocks, 8, 32] with d, dmin and the packed scales at the start of the block."""
    scale, low = _scales_and_mins(blocks[:, 4:16])
    return Codes(q.view(torch.int8), scale * _half(blocks, 0), low * -_half(blocks, 2))


def _q4_k(blocks: Tensor) -> Codes:
    # | d | dmin | scales and mins | 4 x 32 bytes: sub-block 2i in the low halves, 2i+1 in the high ones |
    return _scaled(_fields(blocks[:, 16:144].reshape(-1, 4, 32), 4).reshape(-1, 8, 32), blocks)


def _q5_k(blocks: Tensor) -> Codes:
    # as q4_k, with 32 bytes of fifth bits before: bit s of byte i belongs to element i of sub-block s
    low = _fields(blocks[:, 48:176].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _scaled(low | (_fields(blocks[:, 16:48], 1) << 4), blocks)


def _q6_k(blocks: Tensor) -> Codes:
    # | 2 x 64 bytes of low 4 bits | 2 x 32 bytes of high 2 bits | 16 scales int8 | d |
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 2, 4, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2)
    scale = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208)
    return Codes(((low | (high << 4)) - 32).view(torch.int8).view(-1, 16, 16), scale, None)


BLOCK_TYPES = {
    "Q4_0": BlockType(18, 32, 32, -8, 4, False, _q4_0),
    "Q4_1": BlockType(20, 32, 32, 0, 4, True, _q4_1),
    "Q5_0": BlockType(22, 32, 32, -16, 8, False, _q5_0),
    "Q5_1": BlockType(24, 32, 32, 0, 8, True, _q5_1),
    "Q8_0": BlockType(34, 32, 32, -128, 8, False, _q8_0),
    "Q2_K": BlockType(84, 256, 16, 0, 4, True, _q2_k),
    "Q3_K": BlockType(110, 256, 16, -4, 4, False, _q3_k),
    "Q4_K": BlockType(144, 256, 32, 0, 4, True, _q4_k),
    "Q5_K": BlockType(176, 256, 32, 0, 8, True, _q5_k),
    "Q6_K": BlockType(210, 256, 16, -32, 8, False, _q6_k),
}
