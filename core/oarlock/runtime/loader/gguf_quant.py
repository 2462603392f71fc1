"""Block-quantised GGUF tensors to floats, in plain torch.

Owns: the bit layout of each block type.
Reads: nothing.
Never: reads files; knows tensor names.

Every `_q…` function takes blocks [num_blocks, block_bytes] uint8 and returns [num_blocks, block_elements] float32.
A block holds half-precision scales (d, and m for a minimum), then integers q packed low bits first:
    value = d * q + m      (32 elements)
    value = d * scale * q - dmin * min     (256 elements, in sub-blocks with their own small scale and min)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_BLOCKS_BYTES = 1 << 20  # PERF: of packed input at once; larger chunks leave the cache (measured 1.6 times slower at 16 MiB)


def dequantise(raw: Tensor, type_name: str, out: Tensor) -> None:
    """Write the values of `raw`, [num_blocks * block_bytes] uint8, into `out`, flat and floating point, in place.

    Raises:
        KeyError: no such block type here (see `BLOCK_TYPES`).
    """
    block_bytes, block_elements, unpack = BLOCK_TYPES[type_name]
    blocks = raw.view(-1, block_bytes)
    values = out.view(-1, block_elements)
    step = max(1, CHUNK_BLOCKS_BYTES // block_bytes)
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = unpack(blocks[start : start + step])


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


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:18]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return torch.addcmul(_half(blocks, 2), _nibbles(blocks[:, 4:20]).float(), _half(blocks, 0))


def _q5_0(blocks: Tensor) -> Tensor:
    return ((_nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)).float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return torch.addcmul(_half(blocks, 2), (_nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)).float(), _half(blocks, 0))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:34].view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    # | 16 x (scale 4 bits, min 4 bits) | 64 bytes of 2-bit q | d | dmin |
    packed, sub = blocks[:, :16], 16
    scale, low = (packed & 15) * _half(blocks, 80), (packed >> 4) * _half(blocks, 82)
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, sub).float()
    return (q * scale[:, :, None] - low[:, :, None]).view(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    # | 32 bytes of third bits | 64 bytes of low 2 bits | 12 bytes: 16 scales of 6 bits | d |
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    third = _fields(blocks[:, :32], 1).reshape(-1, 256)
    q = (low | (third << 2)).float() - 4
    packed = blocks[:, 96:108]
    scale = (_nibbles(packed[:, :8]) | (_fields(packed[:, 8:], 2).reshape(-1, 16) << 4)).float() - 32
    return (q.view(-1, 16, 16) * (scale * _half(blocks, 108))[:, :, None]).view(-1, 256)


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


def _scaled(q: Tensor, blocks: Tensor) -> Tensor:
    """Eight sub-blocks of 32: q [num_blocks, 8, 32] with d, dmin and the packed scales at the start of the block."""
    scale, low = _scales_and_mins(blocks[:, 4:16])
    return torch.addcmul(-(low * _half(blocks, 2))[:, :, None], q.float(), (scale * _half(blocks, 0))[:, :, None]).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    # | d | dmin | scales and mins | 4 x 32 bytes: sub-block 2i in the low halves, 2i+1 in the high ones |
    return _scaled(_fields(blocks[:, 16:144].reshape(-1, 4, 32), 4).reshape(-1, 8, 32), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    # as q4_k, with 32 bytes of fifth bits before: bit s of byte i belongs to element i of sub-block s
    low = _fields(blocks[:, 48:176].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _scaled(low | (_fields(blocks[:, 16:48], 1) << 4), blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    # | 2 x 64 bytes of low 4 bits | 2 x 32 bytes of high 2 bits | 16 scales int8 | d |
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 2, 4, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2)
    q = (low | (high << 4)).float() - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208)
    return (q.view(-1, 16, 16) * scale[:, :, None]).view(-1, 256)


# name -> (bytes of a block, elements of a block, function)
BLOCK_TYPES: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, 32, _q4_0),
    "Q4_1": (20, 32, _q4_1),
    "Q5_0": (22, 32, _q5_0),
    "Q5_1": (24, 32, _q5_1),
    "Q8_0": (34, 32, _q8_0),
    "Q2_K": (84, 256, _q2_k),
    "Q3_K": (110, 256, _q3_k),
    "Q4_K": (144, 256, _q4_k),
    "Q5_K": (176, 256, _q5_k),
    "Q6_K": (210, 256, _q6_k),
}
