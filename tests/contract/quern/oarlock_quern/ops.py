"""Operations of the chip, each with the parameters of its reference.

Owns: the order of a packed weight.
Reads: nothing.
Never: rounds before the end.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., hidden_size], weight [hidden_size] -> the shape and dtype of x."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(torch.float32)).to(x.dtype)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., size], residual [..., size] float32 -> the norm of their sum in x's dtype, and the sum in float32."""
    total = x.to(torch.float32) + residual
    return rms_norm(total, weight, eps).to(x.dtype), total


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] as loaded -> [in, out], as the chip's multiplier reads it."""
    return weight.t().contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [num_tokens, in], weight [in, out], bias [out] -> [num_tokens, out]"""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
