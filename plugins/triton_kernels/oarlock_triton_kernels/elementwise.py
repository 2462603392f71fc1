"""What a layer does to each token by itself: norms, rotary, activations.

Owns: rms_norm, fused_add_rms_norm, layer_norm, rotary, silu_and_mul, gelu_and_mul, activation.
Reads: nothing of ours.
Never: mixes two tokens; writes an argument.

Legend: T tokens, H heads of a token (1 where a token is one row), R = T * H rows, N the size of a row, D head_dim, HALF
pairs of a head that are rotated.
All of these are bound by memory: a few operations on each number that is read once. So each program takes about TILE numbers, enough for every
thread to have a few 16-byte loads in flight, and there is nothing else to choose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oarlock_triton_kernels.stepwise import STEPWISE

TILE = 4096  # numbers of a program where rows are shorter than that
MAX_ROW = 65536  # numbers of a row that one program can hold in registers
_KINDS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}


@triton.jit(**STEPWISE)
def rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, rows, heads, size, stride_xt, stride_xh, eps,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(R / ROWS),). `x / rms(x) * weight` over the last dimension.

    out_ptr:    [R, N]  contiguous
    x_ptr:      [T, H, N]  strides (stride_xt, stride_xh, 1): heads may be a view into a wider projection
    weight_ptr: [N]  model dtype or float32
    ROWS, SIZE: rows of a program; N rounded up to a power of two

    Reference: oarlock.runtime.reference.layers.rms_norm.
    Cost: 4 R N FLOP; 2 R N numbers moved, and the weight from the cache.
    Bound: memory, 2 FLOP a byte in bf16.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    token, head = (row // heads).to(tl.int64), row % heads
    inside = (row < rows)[:, None] & (column < size)[None, :]
    x = tl.load(x_ptr + (token * stride_xt + head * stride_xh)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    y = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + (row.to(tl.int64) * size)[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the registry's. x [T, N] or [T, H, N], its last dimension of stride 1."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, heads, rows, size = _as_heads(x)
    if rows and size:
        tile = _tile(rows, size)
        rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](out, x, weight, rows, heads, size, x.stride(0), x.stride(1), eps, **tile)
    return out


@triton.jit(**STEPWISE)
def fused_add_rms_norm_kernel(
    out_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, rows, size, stride_x, stride_residual, eps,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / ROWS),). total = x + residual in float32; out = total / rms(total) * weight.

    out_ptr:      [T, N]  model dtype, contiguous
    total_ptr:    [T, N]  float32, contiguous
    x_ptr:        [T, N]  model dtype, strides (stride_x, 1)
    residual_ptr: [T, N]  float32, strides (stride_residual, 1)
    weight_ptr:   [N]  model dtype or float32
    ROWS, SIZE:   rows of a program; N rounded up to a power of two

    Reference: oarlock.runtime.reference.layers.fused_add_rms_norm.
    Cost: 5 T N FLOP; T N (2 w + 8) bytes for w-byte activations: the float32 sum is two thirds of it.
    Bound: memory.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    long = row.to(tl.int64)
    x = tl.load(x_ptr + (long * stride_x)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    total = x + tl.load(residual_ptr + (long * stride_residual)[:, None] + column[None, :], mask=inside, other=0.0)
    at = (long * size)[:, None] + column[None, :]
    tl.store(total_ptr + at, total, mask=inside)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 1) / size + eps)
    y = total * scale[:, None] * weight[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As the registry's, for x and residual [T, N]."""
    x, residual = _rows_of(x), _rows_of(residual)
    rows, size = x.shape
    out, total = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(residual, memory_format=torch.contiguous_format)
    if rows and size:
        tile = _tile(rows, size)
        fused_add_rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            out, total, x, residual, weight, rows, size, x.stride(0), residual.stride(0), eps, **tile
        )
    return out, total


@triton.jit(**STEPWISE)
def layer_norm_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, rows, heads, size, stride_xt, stride_xh, eps,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(R / ROWS),). `(x - mean) / std * weight + bias` over the last dimension; the deviation from the mean is taken before it is squared.

    out_ptr:    [R, N]  contiguous
    x_ptr:      [T, H, N]  strides (stride_xt, stride_xh, 1)
    weight_ptr, bias_ptr: [N]  model dtype or float32; bias_ptr is not read without HAS_BIAS
    ROWS, SIZE: rows of a program; N rounded up to a power of two

    Reference: oarlock.runtime.reference.layers.layer_norm.
    Cost: 7 R N FLOP; 2 R N numbers moved.
    Bound: memory.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    token, head = (row // heads).to(tl.int64), row % heads
    inside = (row < rows)[:, None] & (column < size)[None, :]
    x = tl.load(x_ptr + (token * stride_xt + head * stride_xh)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / size
    off = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(off * off, 1) / size + eps)
    y = off * scale[:, None] * tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + (row.to(tl.int64) * size)[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As the registry's. x [T, N] or [T, H, N], its last dimension of stride 1."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, heads, rows, size = _as_heads(x)
    if rows and size:
        tile = _tile(rows, size)
        layer_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            out, x, weight, weight if bias is None else bias, rows, heads, size, x.stride(0), x.stride(1), eps, HAS_BIAS=bias is not None, **tile
        )
    return out


@triton.jit(**STEPWISE)
def rotary_kernel(
    out_ptr, x_ptr, positions_ptr, table_ptr, rows, heads, stride_xt, stride_xh, stride_p,
    HALF: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(R / ROWS),). Rotates pairs (i, i + HALF), or (2i, 2i + 1) where INTERLEAVED, of each head by its token's angles; copies the rest.

    out_ptr:       [T, H, D]  contiguous
    x_ptr:         [T, H, D]  strides (stride_xt, stride_xh, 1): queries and keys inside the fused projection
    positions_ptr: [T]  int32
    table_ptr:     [max_len, 2, HALF]  float32, strides (stride_p, HALF, 1): cosines, then sines
    ROWS, PAIRS, REST: heads of a program; HALF rounded up to a power of two; D - 2 HALF likewise, 0 where all of a head is rotated

    Reference: oarlock.runtime.reference.layers.rotary.
    Cost: 3 R D FLOP; 2 R D numbers moved. Heads of a token find its angles in the cache.
    Bound: memory.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    token, head = (row // heads).to(tl.int64), row % heads
    is_row = row < rows
    inside = is_row[:, None] & (pair < HALF)[None, :]
    angle = table_ptr + (tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int64) * stride_p)[:, None] + pair[None, :]
    cosine, sine = tl.load(angle, mask=inside, other=0.0), tl.load(angle + HALF, mask=inside, other=0.0)
    if INTERLEAVED:
        first, apart = 2 * pair, 1
    else:
        first, apart = pair, HALF
    source = x_ptr + (token * stride_xt + head * stride_xh)[:, None]
    target = out_ptr + (row.to(tl.int64) * HEAD_DIM)[:, None]
    a = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + (first + apart)[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first[None, :], (a * cosine - b * sine).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + (first + apart)[None, :], (b * cosine + a * sine).to(out_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)
        inside = is_row[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(target + column[None, :], tl.load(source + column[None, :], mask=inside, other=0.0), mask=inside)


def rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """As the registry's."""
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    half, rows = table.shape[-1], tokens * heads
    pairs, rest = triton.next_power_of_2(half), head_dim - 2 * half
    per_program = max(1, min(TILE // triton.next_power_of_2(head_dim), triton.next_power_of_2(rows)))
    rotary_kernel[(triton.cdiv(rows, per_program),)](
        out, x, positions, table, rows, heads, x.stride(0), x.stride(1), table.stride(0),
        HALF=half, HEAD_DIM=head_dim, INTERLEAVED=interleaved, ROWS=per_program, PAIRS=pairs, REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return out


@triton.jit(**STEPWISE)
def activation_kernel(
    out_ptr, x_ptr, rows, size, stride_x,
    KIND: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / ROWS), ceil(N / COLUMNS)). KIND(x), or KIND(gate) * up where GATED.

    out_ptr: [T, N]  contiguous
    x_ptr:   [T, N], or [T, 2 N] with the gate first where GATED; strides (stride_x, 1)
    KIND:    0 relu, 1 gelu, 2 gelu by tanh, 3 silu

    Reference: oarlock.runtime.reference.layers.silu_and_mul, gelu_and_mul and activation.
    Cost: 4 to 8 T N FLOP; 2 T N numbers moved, 3 T N where GATED.
    Bound: memory.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    source = x_ptr + (row.to(tl.int64) * stride_x)[:, None] + column[None, :]
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        y = tl.maximum(x, 0.0)
    elif KIND == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # 0.5 (1 + tanh(z)) is the sigmoid of 2z
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = x / (1.0 + tl.exp(-x))
    if GATED:
        y *= tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + (row.to(tl.int64) * size)[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def _activate(x: torch.Tensor, kind: int, gated: bool) -> torch.Tensor:
    x = _rows_of(x)
    rows, size = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows and size:
        columns = min(triton.next_power_of_2(size), 1024)
        per_program = max(1, min(TILE // columns, triton.next_power_of_2(rows)))
        grid = (triton.cdiv(rows, per_program), triton.cdiv(size, columns))
        activation_kernel[grid](out, x, rows, size, x.stride(0), KIND=kind, GATED=gated, ROWS=per_program, COLUMNS=columns)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As the registry's."""
    return _activate(x, _KINDS["silu"], gated=True)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """As the registry's."""
    return _activate(x, _KINDS["gelu_tanh" if approximate == "tanh" else "gelu"], gated=True)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """As the registry's.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(_KINDS)}")
    return _activate(x, _KINDS[kind], gated=False)


def _tile(rows: int, size: int) -> dict[str, int]:
    """Rows and columns of a program that holds whole rows, and its warps: about 16 numbers a thread."""
    if size > MAX_ROW:
        raise ValueError(f"rows of {size} numbers exceed the {MAX_ROW} that one program holds; give this op an implementation of its own")
    columns = triton.next_power_of_2(size)
    per_program = max(1, min(TILE // columns, triton.next_power_of_2(rows)))
    return {"ROWS": per_program, "SIZE": columns, "num_warps": min(max(per_program * columns // 512, 1), 16)}


def _as_heads(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """(x as [T, H, N] with a last dimension of stride 1, H, T * H, N)."""
    size = x.shape[-1]
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif x.dim() != 3:
        x = x.reshape(-1, 1, size)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.shape[1], x.shape[0] * x.shape[1], size


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as [T, N] with a last dimension of stride 1."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
