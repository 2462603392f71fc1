"""Ops of this device, each with the parameters of its reference, which is what it means.

Owns: the order in which a packed weight lies in memory.
Reads: nothing.
Never: waits for a value on the host, or lets a result's shape depend on data.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, in float32, rounded once. x [..., size], weight [size]."""
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True) / x.shape[-1]
    return (wide / (mean + eps).sqrt() * weight.float()).to(x.dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The order in which `linear` reads a weight: [out, in] as loaded -> [in, out]. Called once for each weight, at load."""
    return weight.t().contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [num_tokens, in], weight as `pack` left it, bias [out] or None -> [num_tokens, out]."""
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
