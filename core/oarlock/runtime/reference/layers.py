"""References of the ops that a transformer layer is made of.

Owns: embedding, norms, rotary, activations, linear.
Reads: nothing of ours.
Never: computes in less than float32 where the definition says float32; float64 inputs are computed in float64 (the kit's oracle).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that definitions compute in: float32, or float64 when `x` is."""
    return x if x.dtype == torch.float64 else x.float()


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a table.

    Shapes:
        ids:    [num_tokens]  int32 or int64
        weight: [vocab_size, hidden_size]
        result: [num_tokens, hidden_size]  weight's dtype
    """
    return F.embedding(ids, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, in float32, rounded once.

    Shapes:
        x, result: [..., hidden_size]
        weight:    [hidden_size]
    Source: RMSNorm, Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    x32 = wide(x)
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) in x's dtype, x + residual in float32).

    The sum of all layers stays in float32: rounding it to bfloat16 sixty times costs more than every other rounding of a model.

    Shapes:
        x:        [..., size]  model dtype
        residual: [..., size]  float32
        weight:   [size]
    """
    total = x + residual
    return rms_norm(total, weight, eps).to(x.dtype), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean) / std * weight + bias` over the last dimension, in float32, rounded once. Shapes as `rms_norm`."""
    x32 = wide(x)
    return F.layer_norm(x32, x32.shape[-1:], wide(weight), None if bias is None else wide(bias), eps).to(x.dtype)


def rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first `rot` dimensions of each head by its token's angles; the rest passes through.

    Dimension i is paired with i + rot/2, or 2i with 2i + 1 when `interleaved`.

    Shapes:
        x, result: [num_tokens, num_heads, head_dim]
        positions: [num_tokens]  int32
        table:     [max_len, 2, rot/2]  float32; cosines, then sines
    Source: RoPE, Su et al. 2021, arXiv:2104.09864, section 3.4.
    """
    half = table.shape[-1]
    cos, sin = table[positions].to(torch.promote_types(x.dtype, torch.float32)).unsqueeze(2).unbind(1)
    x32 = wide(x[..., : 2 * half])
    a, b = (x32[..., 0::2], x32[..., 1::2]) if interleaved else (x32[..., :half], x32[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    turned = turned.to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), -1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, in float32, rounded once. x [num_tokens, 2 * size], the gate first; result [num_tokens, size]."""
    gate, up = wide(x).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """`gelu(gate) * up`; `approximate` is "tanh" or "none". Shapes as `silu_and_mul`."""
    gate, up = wide(x).chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """An elementwise activation, in float32, rounded once.

    Raises:
        ValueError: `kind` is none of "relu", "gelu", "gelu_tanh", "silu".
    """
    x32 = wide(x)
    if kind == "relu":
        y = F.relu(x32)
    elif kind == "gelu":
        y = F.gelu(x32)
    elif kind == "gelu_tanh":
        y = F.gelu(x32, approximate="tanh")
    elif kind == "silu":
        y = F.silu(x32)
    else:
        raise ValueError(f"activation {kind!r} is unknown; known are relu, gelu, gelu_tanh, silu")
    return y.to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`. x [num_tokens, in_size]; weight [out_size, in_size]; bias [out_size]; result [num_tokens, out_size]."""
    return F.linear(x, weight, bias)


HEAD_PIECE = 8192  # outputs widened at a time: a whole vocabulary in float32 would be a second copy of the head


def lm_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear whose sums stay in float32: near-ties between tokens must not be decided by rounding to the model's dtype.

    Shapes:
        x:      [num_rows, in_size]  model dtype
        weight: [vocab_size, in_size]  model dtype; bias: [vocab_size] or None
        result: [num_rows, vocab_size]  float32
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.linear(x, weight, bias)
    parts = [F.linear(x.float(), piece.float()) for piece in weight.split(HEAD_PIECE)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return out if bias is None else out + bias.float()
