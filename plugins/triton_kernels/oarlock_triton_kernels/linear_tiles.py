"""The linears of `linear_w8a8` for many rows, by what Hopper and Blackwell have for it. Taken only with `--triton-descriptors`: never measured.

Owns: the second implementation of linear_w8a8 and linear_w8a8_fp8.
Reads: `linear_w8a8` (packing, the rounding of activations, and everything that is not served here), `codes`, `chip`.
Never: means another number than `linear_w8a8` does; packs a weight in a second form.

Legend: M rows of x, N outputs, K inputs, G runs of RUN inputs that share a scale.

Three things differ from `linear_8bit_kernel`, whose sums these are:

- **Descriptors.** A tile of codes is copied into shared memory by one instruction of one thread, which computes the addresses, fills up what lies
  beyond the edges with zeros and lays the tile out as the matrix units want it. Results go the other way.
- **A persistent grid.** As many programs as units, each with every so many-th tile of the result, so that the copies for the next tile begin while
  the last one is being scaled and stored. Tiles run through groups of GROUP tiles of rows, whose codes L2 holds while they pass over the weight.
- **Divided warps**, where Triton can divide them: one copies, one multiplies, the others scale and store.

Source: persistent grids and grouped tiles, Triton's tutorials 03 and 09; sums of 8-bit floats that are added in float32 after 128 inputs, DeepSeek-V3,
arXiv:2412.19437, section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from oarlock_triton_kernels import codes, linear_w8a8
from oarlock_triton_kernels.cache import E4M3
from oarlock_triton_kernels.chip import chip
from oarlock_triton_kernels.codes import INT8
from oarlock_triton_kernels.linear_w8a8 import Packed8
from oarlock_triton_kernels.stepwise import STEPWISE

BM, BN, GROUP, WARPS = 128, 128, 8, 8
MIN_ROWS = 256  # fewer are bound by memory, or are too few tiles for the chip: `linear_w8a8` shares inputs between programs
_INT8 = tl.constexpr(INT8)
_MAX_SHARED = 0.98


@triton.jit(**STEPWISE)
def linear_tiles_kernel(
    out_desc, x_desc, codes_desc, x_scales_ptr, scales_ptr, bias_ptr, num_rows, out_size, steps,
    KIND: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Grid: (min(units, ceil(M / BM) ceil(N / BN)),). Codes of x times codes of the weight, both copied by descriptors, tile after tile.

    out_desc:     [M, N]  any float, tiles [BM, BN]
    x_desc:       [M, K]  int8 or float8_e4m3fn, tiles [BM, STEP]; zeros beyond the last row
    codes_desc:   [N, K]  the same, tiles [BN, STEP]
    x_scales_ptr: [G, M]  float32, contiguous
    scales_ptr:   [G, N]  contiguous
    bias_ptr:     [N]
    DIVIDED:      Triton gives copies, products and the rest to warps of their own

    Reference: `linear_w8a8` and `linear_w8a8_fp8` of core's schemes, after activations are rounded.
    Cost: 2 M N K FLOP; (M + N) K bytes and M N numbers moved, and about M N K (1 / BM + 1 / BN) bytes between L2 and the units.
    Bound: the matrix units: from MIN_ROWS rows on a code of the weight takes part in more products than its byte costs.
    """
    across, over = tl.cdiv(out_size, BN), tl.cdiv(num_rows, BM)
    for tile in tl.range(tl.program_id(0), across * over, tl.num_programs(0), flatten=True, warp_specialize=DIVIDED):
        group, within = tile // (GROUP * across), tile % (GROUP * across)
        height = tl.minimum(GROUP, over - group * GROUP)
        first_row, first_out = (group * GROUP + within % height) * BM, within // height * BN
        row, out = first_row + tl.arange(0, BM), first_out + tl.arange(0, BN)
        total = tl.zeros([BM, BN], tl.int32 if KIND == _INT8 else tl.float32)
        for step in range(steps):
            x, weight = x_desc.load([first_row, step * STEP]), codes_desc.load([first_out, step * STEP])
            if KIND == _INT8:
                total = tl.dot(x, weight.T, total, out_dtype=tl.int32)
            elif RUN == 0:
                total = tl.dot(x, weight.T, total, max_num_imprecise_acc=STEP)
            else:
                run = step * STEP // RUN
                product = tl.dot(x, weight.T)
                product *= tl.load(scales_ptr + run * out_size + out, mask=out < out_size, other=0.0).to(tl.float32)[None, :]
                product *= tl.load(x_scales_ptr + run * num_rows + row, mask=row < num_rows, other=0.0)[:, None]
                total += product
        result = total.to(tl.float32)
        if RUN == 0:
            result *= tl.load(scales_ptr + out, mask=out < out_size, other=0.0).to(tl.float32)[None, :]
            result *= tl.load(x_scales_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        if HAS_BIAS:
            result += tl.load(bias_ptr + out, mask=out < out_size, other=0.0).to(tl.float32)[None, :]
        out_desc.store([first_row, first_out], result.to(out_desc.dtype))


def pack_int8(weight: dict[str, torch.Tensor]) -> Packed8:
    """As `linear_w8a8.pack_int8`.

    Raises:
        RuntimeError: the chip has no descriptors.
    """
    _check_chip()
    return linear_w8a8.pack_int8(weight)


def pack_fp8(weight: dict[str, torch.Tensor]) -> Packed8 | dict[str, torch.Tensor]:
    """As `linear_w8a8.pack_fp8`. Raises as `pack_int8`."""
    _check_chip()
    return linear_w8a8.pack_fp8(weight)


def _check_chip() -> None:
    if not chip().has_descriptors:
        raise RuntimeError("--triton-descriptors: this device copies no tiles by descriptors (NVIDIA's do from compute capability 9.0 on); leave it out")


def linear_int8(x: torch.Tensor, weight: Packed8, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear_w8a8."""
    return _multiply(x, weight, bias) if is_served(x, weight) else linear_w8a8.linear_int8(x, weight, bias)


def linear_fp8(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the registry's linear_w8a8_fp8."""
    return _multiply(x, weight, bias) if is_served(x, weight) else linear_w8a8.linear_fp8(x, weight, bias)


def is_served(x: torch.Tensor, weight: Any) -> bool:
    """Whether this product is computed here: rows enough, codes that the matrix units take, and lines of whole 16 bytes."""
    if not isinstance(weight, Packed8) or x.shape[0] < MIN_ROWS or weight.weight.kind not in (INT8, E4M3):
        return False
    return weight.weight.out_size * x.element_size() % 16 == 0 and weight.weight.codes.data_ptr() % 16 == 0


def _multiply(x: torch.Tensor, packed: Packed8, bias: torch.Tensor | None) -> torch.Tensor:
    weight, rows, is_int8 = packed.weight, x.shape[0], packed.weight.kind == INT8
    rounded, scales = linear_w8a8.rounded(x, packed)
    out = torch.empty((rows, weight.out_size), dtype=x.dtype, device=x.device)
    step = codes.form_of(weight, weight.width)["STEP"]
    tiles = triton.cdiv(rows, BM) * triton.cdiv(weight.out_size, BN)
    kept = torch.int8 if is_int8 else torch.float8_e4m3fn
    linear_tiles_kernel[(min(chip().units, tiles),)](
        TensorDescriptor.from_tensor(out, [BM, BN]), TensorDescriptor.from_tensor(rounded.view(kept), [BM, step]),
        TensorDescriptor.from_tensor(weight.codes.view(kept), [BN, step]), scales, weight.scales, out if bias is None else bias,
        rows, weight.out_size, triton.cdiv(weight.width, step), KIND=weight.kind, RUN=weight.run, HAS_BIAS=bias is not None, STEP=step,
        BM=BM, BN=BN, GROUP=GROUP, DIVIDED=chip().divides_warps and weight.run == 0 and not is_int8, num_warps=WARPS, num_stages=_stages(step, out),
    )  # fmt: skip
    return out


def _stages(step: int, out: torch.Tensor) -> int:
    """Of copies in flight, beside the tile of results."""
    return max(1, min(4, int(chip().shared_bytes * _MAX_SHARED - BM * BN * out.element_size()) // (step * (BM + BN))))
