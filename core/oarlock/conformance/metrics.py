"""How far a result is from the oracle's.

Owns: the metrics (normalised mean square error, largest absolute error), bit equality, and what counts as equal for integers.
Reads: `cases`.
Never: knows a device; tensors given here are on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from oarlock.conformance.cases import CheckFailed, Measure, worst

FLOOR = 1e-30  # mean squares below this count as this: denormals may be flushed to zero
PEAK = 3.0  # a single error may be so many times what the NMSE limit would allow to all, measured at the reference's largest number
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, as integers: NaN equals NaN, 0.0 differs from -0.0."""
    x = x.contiguous()
    return x.view(_BITS[x.element_size()])


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Floating tensors in float64: what the oracle is given."""
    return x.double() if x.is_floating_point() else x


def measure(got: torch.Tensor, want: torch.Tensor, limit: float, what: str) -> Measure:
    """Compare one floating result with the oracle's float64.

    NaN and infinities must stand in the same places with the same sign. The mean error must keep `limit`; the largest one must keep
    PEAK * sqrt(limit) of the oracle's largest number, so that one wrong number among many right ones is seen.

    Raises:
        CheckFailed: they do not, or an error is above its limit.
    """
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        wrong = int((got.isfinite() != finite).sum())
        raise CheckFailed(f"{what}: {wrong} of {want.numel()} numbers are finite where the reference is not, or the reverse")
    if not want.numel() or not bool(finite.any()):
        return Measure(0.0, limit, 0.0)
    error, size = (got - want)[finite], want[finite]
    return judge(error, size, limit, what)


def judge(error: torch.Tensor, size: torch.Tensor, limit: float, what: str) -> Measure:
    """The measure of finite float64 errors against the finite numbers that they belong to. Raises as `measure`."""
    peak = PEAK * math.sqrt(limit) * max(float(size.abs().max()), math.sqrt(FLOOR))
    found = Measure(float(error.pow(2).mean() / size.pow(2).mean().clamp(min=FLOOR)), limit, float(error.abs().max()), peak)
    if not found.nmse <= limit:
        raise CheckFailed(f"{what}: nmse {found.nmse:.2g} > {limit:.2g} (max abs {found.max_abs:.2g})", found)
    if not found.max_abs <= peak:
        raise CheckFailed(f"{what}: max abs {found.max_abs:.2g} > {peak:.2g} (nmse {found.nmse:.2g}, limit {limit:.2g})", found)
    return found


def compare(got: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor], limit: float) -> Measure:
    """Compare all results of one op.

    `reference` has the op's own dtypes: it says what shape and dtype each result has, and what integers must be equal to.
    Where the reference's and the oracle's integers differ, the case is a near-tie and either is right.

    Raises:
        CheckFailed: shape, dtype, places of non-finite numbers, integers or error are wrong.
    """
    if len(got) != len(reference):
        raise CheckFailed(f"{len(got)} results instead of {len(reference)}")
    found = [Measure(0.0, limit, 0.0)]
    for n, (mine, ref, want) in enumerate(zip(got, reference, oracle, strict=True)):
        what = f"result {n}" if len(got) > 1 else "result"
        if mine.shape != ref.shape or mine.dtype != ref.dtype:
            raise CheckFailed(f"{what}: {mine.dtype} {tuple(mine.shape)} instead of {ref.dtype} {tuple(ref.shape)}")
        if not ref.is_floating_point():
            wrong = (mine != ref) & (mine != want)
            if bool(wrong.any()):
                at = int(wrong.flatten().to(torch.int8).argmax())
                first = f"first at {at}: {mine.flatten()[at]} instead of {ref.flatten()[at]}"
                raise CheckFailed(f"{what}: {int(wrong.sum())} of {ref.numel()} integers differ, {first}")
            continue
        found.append(measure(mine, want, limit, what))
    return worst(found)
