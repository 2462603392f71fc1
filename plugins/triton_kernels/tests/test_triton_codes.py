"""What the kit does not ask of quantised linears and experts: packing, programs that share outputs, chips with products of 8-bit floats, routing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oarlock.backend_api.runtime import registry
from oarlock.conformance import ops_level
from oarlock_triton_kernels import cache, codes, linear_codes, linear_w8a8, moe
from oarlock_triton_kernels.chip import chip

PACK = {"int4": codes.pack_int4, "int8": codes.pack_int8, "fp8": codes.pack_fp8}
IN_SIZE = 192
FORMS = {  # groups, and what else a weight has
    "one scale": (1, ()),
    "runs of 32": (6, ("zeros",)),
    "runs of 64": (3, ("offsets",)),
    "runs of 24": (8, ("zeros",)),  # no run that kernels take: filled up
    "scattered, uneven": (3, ("zeros", "groups")),
}


def weight_of(scheme: str, form: str, generator: torch.Generator, outs: int = 40, in_size: int = IN_SIZE) -> dict[str, torch.Tensor]:
    """A weight in core's common form."""
    count, parts = FORMS[form]
    weight = {"scales": torch.rand((outs, count), generator=generator) + 0.5}
    if scheme == "int4":
        columns = torch.randint(0, 16, (outs, in_size), generator=generator, dtype=torch.uint8)
        weight["codes"] = columns[:, 0::2] | (columns[:, 1::2] << 4)
    elif scheme == "int8":
        weight["codes"] = torch.randint(-128, 128, (outs, in_size), generator=generator).to(torch.int8)
    else:
        weight["codes"] = (torch.randn((outs, in_size), generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    if "zeros" in parts:
        weight["zeros"] = torch.randint(0, 16, (outs, count), generator=generator).to(torch.int16)
    if "offsets" in parts:
        weight["offsets"] = torch.randn((outs, count), generator=generator)
    if "groups" in parts:  # as the part that a rank of a row-parallel linear holds
        weight["groups"] = torch.randint(0, count, (in_size,), generator=generator).to(torch.int32)
        weight["groups"][:70] = 0
    return weight


@pytest.mark.parametrize(("scheme", "form"), [(scheme, form) for scheme in ("int4", "int8") for form in FORMS] + [("fp8", "one scale"), ("fp8", "runs of 64")])
def test_a_packed_weight_is_the_weight(scheme, form):
    weight = weight_of(scheme, form, torch.Generator().manual_seed(1))
    if scheme == "fp8":
        weight.pop("offsets", None)
    want = registry()[f"linear_{scheme}"].reference(torch.eye(IN_SIZE), weight).t()
    packed = PACK[scheme](weight)
    assert torch.equal(codes.rows_of(packed, torch.arange(40, dtype=torch.int32)), want)
    got = linear_codes.linear(torch.eye(IN_SIZE)[:20], packed)
    assert torch.allclose(got, want.t()[:20], rtol=1e-6, atol=0)


def test_experts_whose_groups_are_scattered_differ_in_their_runs_and_are_filled_up_to_the_longest():
    """As the part that a rank holds of them: groups of other sizes in each expert."""
    generator, experts, k = torch.Generator().manual_seed(10), 3, 2
    each = [weight_of("int4", "scattered, uneven", generator) for _ in range(experts)]
    each[1]["groups"][:] = torch.arange(IN_SIZE, dtype=torch.int32) // 64
    w13 = {name: torch.stack([weight[name] for weight in each]) for name in each[0]}
    packed = codes.pack_int4(w13)
    assert packed.order.shape == (experts, packed.width) and {int((own < IN_SIZE).sum()) for own in packed.order} == {IN_SIZE}
    w2 = {"codes": torch.randint(0, 256, (experts, IN_SIZE, 10), generator=generator, dtype=torch.uint8)}
    w2["scales"] = torch.rand((experts, IN_SIZE, 1), generator=generator)
    x, ids = torch.randn((7, IN_SIZE), generator=generator), torch.randint(0, experts, (7, k), generator=generator).to(torch.int32)
    routing = (torch.rand((7, k), generator=generator), ids, torch.arange(7) != 3)
    got = moe.moe_experts_of_codes(x, packed, codes.pack_int4(w2), *routing)
    wide = [{name: tensor.double() if tensor.dtype == torch.float32 else tensor for name, tensor in weight.items()} for weight in (w13, w2)]
    want = registry()["moe_experts_int4"].reference(x.double(), *wide, *routing)
    assert ((got.double() - want) ** 2).mean() <= 1e-9 * (want**2).mean() and not got[3].any()


def test_scales_are_kept_in_16_bits_only_where_that_keeps_each():
    weight = weight_of("int8", "one scale", torch.Generator().manual_seed(2))
    assert codes.pack_int8(weight).scales.dtype == torch.float32
    for dtype, size in ((torch.float16, 1.7), (torch.bfloat16, 1e-20)):
        assert codes.pack_int8(weight | {"scales": (weight["scales"] * size).to(dtype).float()}).scales.dtype == dtype


def test_programs_that_share_outputs_give_the_same_sum_again_and_leave_no_count_behind():
    generator = torch.Generator().manual_seed(3)
    weight = codes.pack_int4(weight_of("int4", "one scale", generator, 100, 1024))
    x = torch.randn((5, 1024), generator=generator)
    (_, _, shared), _, _ = linear_codes.launch_of(5, weight, 1024, 4, codes.form_of(weight, 1024), x)
    assert shared > 1
    found = [linear_codes.linear(x, weight) for _ in range(2)]
    assert torch.equal(*found)
    assert not weight.counters.any()
    alone = linear_codes.linear(x, dataclasses.replace(weight, counters=weight.counters[:0]))
    assert torch.allclose(found[0], alone, rtol=1e-5, atol=1e-3)


def test_a_row_means_the_same_however_many_come_with_it():
    """Tiles of 16, 32, 64 and 128 rows sum the same products in the same order of runs."""
    generator = torch.Generator().manual_seed(4)
    weight = dataclasses.replace(codes.pack_int4(weight_of("int4", "runs of 64", generator)), counters=torch.zeros(0, dtype=torch.int32))
    x = torch.randn((130, IN_SIZE), generator=generator)
    most = linear_codes.linear(x, weight)
    for rows in (1, 20, 40):
        assert torch.allclose(linear_codes.linear(x[:rows], weight), most[:rows], rtol=1e-5, atol=1e-4)


def test_a_chip_with_products_of_8_bit_floats_computes_the_same(subject, passed, monkeypatch):
    monkeypatch.setattr(cache, "chip", lambda: dataclasses.replace(chip(), fp8=frozenset({"fp8e4nv"})))
    ids = passed(list(ops_level.cases()), r"^(linear_fp8|linear_w8a8_fp8)\[bfloat16,tokens=(16|7|5)(?!.*#)")
    assert len(ids) > 3
    weight = linear_w8a8.pack_fp8(weight_of("fp8", "runs of 64", torch.Generator().manual_seed(5)))
    assert weight.weight.kind == cache.E4M3


def test_a_float8_weight_whose_runs_no_kernel_takes_is_left_to_the_reference_and_that_is_logged(caplog):
    weight = weight_of("fp8", "runs of 24", torch.Generator().manual_seed(11)) | {"scales": torch.rand(40, 8)}
    assert linear_w8a8.pack_fp8(weight) is weight
    assert "a scale for 24 columns are multiplied by the plain reference" in caplog.text
    x = torch.randn((3, IN_SIZE), generator=torch.Generator().manual_seed(12))
    assert torch.equal(linear_w8a8.linear_fp8(x, weight), registry()["linear_w8a8_fp8"].reference(x, weight))


def test_a_weight_that_does_not_fit_is_named():
    weight = codes.pack_int8(weight_of("int8", "one scale", torch.Generator().manual_seed(6)))
    with pytest.raises(RuntimeError, match=r"x \[num_tokens, 160\] does not fit a weight of \[40, 192\]"):
        linear_codes.linear(torch.zeros(2, 160), weight)


@pytest.mark.parametrize("rows", [16, 32])
def test_every_pair_has_one_place_in_a_tile_of_its_expert(rows):
    """Experts without pairs, with whole tiles, with one more, and the last of all."""
    wanted = [0, rows, 0, rows + 1, 1, 2 * rows, 0, 7]
    ids = torch.repeat_interleave(torch.arange(len(wanted)), torch.tensor(wanted)).to(torch.int32)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(7))]
    ids = torch.cat((ids, ids[: len(ids) % 2]))[:, None].view(-1, 2)
    valid = torch.arange(len(ids)) % 5 != 3
    places, owners = moe.placed(ids, valid, len(wanted), rows)
    pairs, of = ids.numel(), ids.flatten()
    used = owners >= 0
    real = places[used][places[used] < pairs]
    assert sorted(real.tolist()) == torch.arange(pairs)[valid.repeat_interleave(2)].tolist()
    for tile, owner in zip(places[used], owners[used], strict=True):
        assert (of[tile[tile < pairs].long()] == owner).all()
    needed = sum(-(-int((of[real.long()] == expert).sum()) // rows) for expert in range(len(wanted)))
    assert used.tolist() == [n < needed for n in range(len(owners))]


@pytest.mark.full
def test_codes_become_numbers_in_the_registers_that_they_are_multiplied_from():
    """At 3.6 TB/s of int4 a unit has about four instructions for each code: more, and a row alone would be bound by them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).parent / "code_loop.py", "int4", "int8", "fp8"]
    costs = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert all(cost["from_registers"] and cost["stores"] <= 1 for cost in costs.values())
    assert costs["int4"]["instructions"] < 3 and costs["fp8"]["instructions"] < 5 and costs["int8"]["instructions"] < 7
