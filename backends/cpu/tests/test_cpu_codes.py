"""Linears over int4 and int8 weights against core's references in float64, on every instruction set; and batch invariance."""

from __future__ import annotations

import pytest
import torch
from oarlock.conformance.references import schemes, weight_of

pytestmark = pytest.mark.kernels
CASES = {
    "groups of 32": {"group": 32},
    "one group": {},
    "zeros": {"group": 64, "zeros": 1},
    "scattered": {"group": 32, "zeros": 1, "order": 1},
    "odd groups": {"group": 12},
}


@pytest.fixture(scope="module")
def codes():
    from oarlock_cpu import codes

    return codes


def made(codes, scheme: str, case: dict, out: int, columns: int, halves: bool = False):
    """(weight in the common form, packed)."""
    weight = weight_of(scheme, (out, columns), case, torch.Generator().manual_seed(out + columns))
    if halves:
        weight["scales"] = weight["scales"].half().float()
    return weight, getattr(codes, f"pack_{scheme}")({name: tensor.clone() for name, tensor in weight.items()})


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).square().sum() / want.square().sum().clamp(min=1e-30))


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, columns] float32, each 32 columns of a row rounded to whole multiples of their largest over 127."""
    blocks = x.float().unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1
    unit = torch.full_like(largest, 127) / torch.ldexp(largest, -exponent)
    codes = (torch.ldexp(blocks, -exponent) * unit).round()
    return torch.where(largest > 0, codes * torch.ldexp(torch.ldexp(largest, -exponent) / 127, exponent), 0).flatten(1)


def multiplied(x: torch.Tensor, packed, isa: str) -> torch.Tensor:
    """What of x is multiplied with these weights, float64."""
    if x.dtype != torch.bfloat16 or isa not in ("avx512_vnni", "avx512_fp16") or (packed.ends % 32).any():
        return x.double()
    if packed.order is None:
        return in_bytes(x).double()
    seen, there = x.new_zeros(x.shape, dtype=torch.float64), packed.order < packed.in_size
    seen[:, packed.order[there]] = in_bytes(torch.nn.functional.pad(x, (0, 1))[:, packed.order]).double()[:, there]
    return seen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 8, 13, 100])
def test_against_the_reference(codes, linear_isa, case, scheme, dtype, rows):
    weight, packed = made(codes, scheme, CASES[case], 97, 192)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)).to(dtype)
    bias = torch.randn(97, generator=torch.Generator().manual_seed(3)).to(dtype)
    seen = multiplied(x, packed, linear_isa)
    want = getattr(schemes, f"linear_{scheme}")(seen, weight, bias.double())
    got = codes.linear(x, packed, bias)
    assert got.dtype == dtype and got.shape == want.shape
    head = codes.multiply(x, packed, bias, True)  # not rounded, but for runs of binary16 products, which cost as much
    assert head.dtype == torch.float32
    is_exact = dtype == torch.float32 or linear_isa not in ("avx512_fp16", "amx") or not torch.equal(seen, x.double())
    assert error(head, want) < (1e-11 if is_exact else 4e-6)
    assert error(got, want) < (1e-5 if dtype == torch.bfloat16 else 1e-12)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_what_rounding_rows_to_8_bits_costs(codes, linear_isa, scheme):
    """No more than rounding a weight to 8 bits does, whatever the numbers: with one that hides the others, of any size, and of a token's alone."""
    generator = torch.Generator().manual_seed(2)
    weight, packed = made(codes, scheme, {"group": 32, "zeros": 1}, 97, 256)
    normal = torch.randn(20, 256, generator=generator)
    hidden = normal.clone()
    hidden[:, ::32] *= 100
    for x, limit in ((normal, 5e-5), (hidden, 3e-4), (normal * 2.0**-120, 5e-5), (normal * 2.0**120, 5e-5), (normal * torch.logspace(-30, 30, 20)[:, None], 5e-5)):
        x = x.bfloat16()
        got = codes.multiply(x, packed, None, True)
        want = getattr(schemes, f"linear_{scheme}")(x.double(), weight)
        assert ((got - want).square().sum(1) / want.square().sum(1)).max() < 3 * limit and error(got, want) < limit
    assert not codes.linear(torch.zeros(3, 256).bfloat16(), packed).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_row_alone(codes, linear_isa, bad):
    _, packed = made(codes, "int4", {"group": 32}, 40, 96)
    x = torch.randn(15, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    want = codes.linear(x, packed)
    x[4, 50] = bad
    got = codes.linear(x, packed)
    assert not got[4].isfinite().any()
    assert torch.equal(got[[0, 3, 5, 14]], want[[0, 3, 5, 14]])


@pytest.mark.parametrize("group", [48, 32])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_do_not_depend_on_the_others(codes, linear_isa, scheme, dtype, group):
    _, packed = made(codes, scheme, {"group": group, "zeros": 1}, 200, 480)
    x = torch.randn(130, 480, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = codes.linear(x, packed)
    for low, high in ((0, 1), (5, 7), (9, 12), (20, 24), (100, 113)):
        assert torch.equal(codes.linear(x[low:high], packed).view(torch.uint8), whole[low:high].view(torch.uint8))  # zeros have signs


@pytest.mark.parametrize("zero", [0, 20, 100, -128])
def test_zero_points_far_from_the_middle_cost_nothing(codes, linear_isa, zero):
    """Rows whose mean is not 0 add up whatever a group's weights are wrong by together."""
    generator = torch.Generator().manual_seed(0)
    held = (zero + torch.randn(64, 4096, generator=generator) * 16).round().clamp(-128, 127).to(torch.int8)
    weight = {"codes": held, "scales": (torch.rand(64, 1, generator=generator) + 0.5) * 1e-3, "zeros": torch.full((64, 1), zero, dtype=torch.int16)}
    x = (torch.randn(16, 4096, generator=generator) + 1).bfloat16()
    packed = codes.pack_int8(weight)
    assert error(codes.multiply(x, packed, None, True), schemes.linear_int8(multiplied(x, packed, linear_isa), weight)) < 1e-5


def test_a_group_without_numbers_may_have_any_scale(codes, linear_isa):
    held = torch.full((32, 64), 8, dtype=torch.uint8)
    held[:, 32:] = 11
    scales = torch.ones(32, 2)
    scales[:, 0] = 1e9
    packed = codes.pack_int4({"codes": held[:, 0::2] | held[:, 1::2] << 4, "scales": scales})
    assert torch.equal(codes.linear(torch.ones(1, 64).bfloat16(), packed), torch.full((1, 32), 96.0).bfloat16())
    same = codes.pack_int8({"codes": torch.full((32, 64), 100, dtype=torch.int8), "scales": torch.full((32, 1), 1 / 3), "zeros": torch.full((32, 1), 100, dtype=torch.int16)})
    assert codes.multiply(torch.ones(1, 64).bfloat16(), same, None, True).abs().max() < 1e-3


def test_scales_are_kept_in_halves_only_where_that_keeps_every_bit(codes):
    weight, packed = made(codes, "int4", {"group": 32}, 64, 96, halves=True)
    assert packed.scales.dtype == torch.float16 and packed.offsets is None
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    assert error(codes.linear(x, packed), schemes.linear_int4(x.double(), weight)) < 1e-12
    assert made(codes, "int4", {"group": 32}, 64, 96)[1].scales.dtype == torch.float32


def test_halves_are_read_exactly_on_every_instruction_set(codes, isa):
    """Subnormals too: a scale may be as small as that."""
    every = torch.tensor([1.0, 2**-14, 2**-15, 2**-24, 3 * 2**-24, 65504.0, -0.5, 1 / 3]).half().float()
    weight = {"codes": torch.ones(8, 32, dtype=torch.int8), "scales": every[:, None]}
    packed = codes.pack_int8(weight)
    assert packed.scales.dtype == torch.float16
    assert torch.equal(codes.linear(torch.eye(1, 32), packed)[0], every)


def test_what_does_not_fit_is_refused(codes):
    _, packed = made(codes, "int4", {"group": 32}, 64, 96)
    with pytest.raises(RuntimeError, match=r"x \[num_tokens, 97\] does not fit a weight of \[64, 96\]"):
        codes.linear(torch.zeros(1, 97), packed)
    with pytest.raises(RuntimeError, match="ascending multiples of 8"):
        codes._linear(torch.zeros(1, 96), packed.panels, packed.scales, None, torch.tensor([32, 36, 96], dtype=torch.int32), packed.exponents, 4, 64, 8.0, None, False, False)
    with pytest.raises(RuntimeError, match="one dtype"):
        codes._linear(torch.zeros(1, 96), packed.panels, packed.scales.double(), None, packed.ends, packed.exponents, 4, 64, 8.0, None, False, False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_rows_are_those_of_the_weight(codes, case, scheme):
    weight, packed = made(codes, scheme, CASES[case], 70, 96)
    ids = torch.tensor([69, 0, 33, 33])
    assert torch.equal(codes.rows(ids.int(), packed), codes.linear(torch.eye(96), packed).T[ids])
    assert error(codes.rows(ids.int(), packed), getattr(schemes, f"linear_{scheme}")(torch.eye(96).double(), weight).T[ids]) < 1e-12
    with pytest.raises(RuntimeError, match="id 70 of 70"):
        codes.rows(torch.tensor([70], dtype=torch.int32), packed)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9, 40])
def test_activations_of_8_bits(codes, linear_isa, rows, dtype, static):
    weight = weight_of("w8a8", (70, 96), {"static": static}, torch.Generator().manual_seed(1))
    packed = codes.pack_w8a8(weight)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[: rows // 3] = 0
    bias = torch.randn(70, generator=torch.Generator().manual_seed(3)).to(dtype)
    got, want = codes.linear_w8a8(x, packed, bias), schemes.linear_w8a8(x, weight, bias)
    assert got.dtype == dtype and got.shape == want.shape
    assert error(got, want.double()) < (1e-5 if dtype == torch.bfloat16 else 1e-12)
    assert torch.equal(codes.linear_w8a8(x[:1], packed, bias), got[:1])
