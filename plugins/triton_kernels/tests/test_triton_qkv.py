"""The fused way from the projection to the cache gives what core's ops give one after another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oarlock.backend_api.runtime import Attention, AttentionParams, HeadSteps
from oarlock.conformance.references import layers
from oarlock_triton_kernels import attention as served
from oarlock_triton_kernels.attention import TritonAttention

HEADS, KV_HEADS, BLOCK, TOKENS = 6, 2, 8, 21


class Ops:
    """Core's references."""

    rms_norm, rotary = staticmethod(layers.rms_norm), staticmethod(layers.rotary)


@pytest.mark.parametrize(
    ("head_dim", "rot", "interleaved", "normed", "scales", "kept"),
    [
        (64, 64, False, False, (1.0, 1.0), torch.float32),
        (64, 64, False, True, (1.0, 1.0), torch.bfloat16),
        (256, 256, False, True, (1.0, 1.0), torch.float16),
        (128, 128, False, True, (1.0, 1.0), torch.float32),
        (80, 32, False, True, (1.0, 1.0), torch.float32),
        (96, 24, True, False, (1.0, 1.0), torch.float32),
        (64, 64, True, True, (0.5, 0.25), torch.float8_e4m3fn),
        (64, 64, False, False, (1.0, 1.0), torch.float8_e5m2),
    ],
)
def test_one_launch_gives_what_several_ops_give_in_float64(monkeypatch, launched, head_dim, rot, interleaved, normed, scales, kept):
    random, dtype = torch.Generator().manual_seed(head_dim), kept if kept.itemsize > 1 else torch.float32
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, head_dim, generator=random).to(dtype)
    positions = torch.randint(0, 100, (TOKENS,), generator=random).to(torch.int32)
    angles = torch.arange(100)[:, None] / 10000 ** (torch.arange(rot // 2) / (rot // 2))
    norms: list[Any] = [1 + torch.randn(head_dim, generator=random) / 4 for _ in range(2)] if normed else [None, None]
    steps = HeadSteps(positions, *norms, 1e-5, torch.stack((angles.cos(), angles.sin()), 1), interleaved, *scales)
    params = AttentionParams(HEADS, KV_HEADS, head_dim, head_dim**-0.5)
    attention = TritonAttention(BLOCK, kept, params)
    slots = (torch.randperm(6 * BLOCK, generator=random)[:TOKENS] + BLOCK).to(torch.int32)
    slots[-2:] = 0  # padding

    def taken(way: Any, given: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache = tuple(torch.full(shape, math.nan).to(kept) for shape in attention.kv_layout(8))
        query, cache = way(attention, Ops, given, cache, slots, params, steps)
        return query.to(dtype).float(), [tensor[1:].float().nan_to_num(7.0) for tensor in cache]  # the null block may hold anything

    want = taken(Attention.write_qkv, qkv.double())
    monkeypatch.setattr(served, "write_kv", None)  # several ops would end in it
    got = taken(TritonAttention.write_qkv, qkv)
    assert "qkv_kernel" in launched
    for mine, theirs in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        apart = ~torch.isclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert apart.float().mean() <= (0 if kept == torch.float32 else 0.003), "what lies near a tie may fall to the other side"
        assert torch.isclose(mine, theirs, rtol=torch.finfo(kept).eps, atol=2.0**-9).all()
    assert (want[1][0] != 7.0).any()


def test_without_a_rotation_the_ops_serve():
    params = AttentionParams(HEADS, KV_HEADS, 32, 32**-0.5)
    attention = TritonAttention(BLOCK, torch.float32, params)
    qkv = torch.randn(3, HEADS + 2 * KV_HEADS, 32)
    cache = tuple(torch.zeros(shape) for shape in attention.kv_layout(3))
    slots = torch.tensor([8, 17, 9], dtype=torch.int32)
    query, cache = attention.write_qkv(Ops, qkv, cache, slots, params, HeadSteps(slots))
    assert torch.equal(query, qkv[:, :HEADS])
    assert torch.equal(cache[0][2, :, 1], qkv[1, HEADS:-KV_HEADS]) and torch.equal(cache[1][1, :, 0], qkv[0, -KV_HEADS:])
