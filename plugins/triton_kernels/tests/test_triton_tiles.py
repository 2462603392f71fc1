"""Linears of 8 bits by descriptors and a persistent grid: the products of the definition, taken by name alone, and copied as they should be."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import registry
from oarlock.conformance import ops_level
from oarlock_triton_kernels import cache, linear_tiles, linear_w8a8, plugin
from oarlock_triton_kernels.chip import chip

ROWS, OUTS, IN_SIZE = 300, 328, 192
OPS = {"int8": "linear_w8a8", "fp8": "linear_w8a8_fp8"}


@pytest.fixture(autouse=True)
def chip_that_multiplies_8_bit_floats(monkeypatch):
    of = dataclasses.replace(chip(), fp8=frozenset({"fp8e4nv"}))
    monkeypatch.setattr(cache, "chip", lambda: of)


def weight_of(scheme: str, runs: int, static: bool = False) -> dict[str, torch.Tensor]:
    """In core's common form."""
    random = torch.Generator().manual_seed(8)
    codes = torch.randint(-128, 128, (OUTS, IN_SIZE), generator=random)
    found = {"codes": codes.to(torch.int8) if scheme == "int8" else codes.to(torch.float8_e4m3fn), "scales": torch.rand((OUTS, runs), generator=random) + 0.5}
    return found | ({"input_scale": torch.tensor([2.5 / 448])} if static else {})


@pytest.mark.parametrize("op", OPS.values())
def test_the_kits_cases_hold(monkeypatch, subject_by_descriptors, passed, launched, op):
    """All that are not left to `linear_w8a8` because of their number of outputs."""
    monkeypatch.setattr(linear_tiles, "MIN_ROWS", 1)
    assert ("triton-descriptors",) == tuple({by for name, by, _ in subject_by_descriptors.ops("float32").table if name == op})
    assert len(passed(list(ops_level.cases()), rf"^{op}\[(?!coverage)", subject_by_descriptors)) > 3
    assert "linear_tiles_kernel" in launched


@pytest.mark.parametrize(("scheme", "runs", "static"), [("int8", 1, False), ("fp8", 1, True), ("fp8", 3, False)])
def test_tiles_that_are_not_whole_and_more_of_them_than_programs(monkeypatch, launched, scheme, runs, static):
    """9 tiles over 4 programs, of which rows, outputs and groups of tiles are not whole."""
    monkeypatch.setattr(linear_tiles, "GROUP", 2)
    weight, random = weight_of(scheme, runs, static), torch.Generator().manual_seed(9)
    x, bias = (torch.randn(shape, generator=random).to(torch.bfloat16) for shape in ((ROWS, IN_SIZE), (OUTS,)))
    multiply, plain = (getattr(module, f"linear_{scheme}") for module in (linear_tiles, linear_w8a8))
    packed = getattr(linear_tiles, f"pack_{scheme}")(weight)
    got = multiply(x, packed, bias)
    assert launched == {"round_rows_kernel": launched["round_rows_kernel"], "linear_tiles_kernel": chip().units}
    wide = {name: tensor.double() if tensor.dtype == torch.float32 else tensor for name, tensor in weight.items()}
    want = registry()[OPS[scheme]].reference(x.double(), wide, bias.double())
    assert ((got.double() - want) ** 2).mean() <= 2e-3**2 * (want**2).mean()
    assert torch.equal(got, plain(x, packed, bias)), "one definition, whatever the number of rows"
    few = x[: linear_tiles.MIN_ROWS - 1]
    assert not linear_tiles.is_served(few, packed) and torch.equal(multiply(few, packed, bias), got[: len(few)])


def test_lines_that_no_descriptor_takes_are_left_to_the_other():
    packed = linear_tiles.pack_int8({name: tensor[:-1] for name, tensor in weight_of("int8", 1).items()})
    assert not linear_tiles.is_served(torch.zeros(ROWS, IN_SIZE), packed)
    assert linear_tiles.linear_int8(torch.zeros(ROWS, IN_SIZE), packed).shape == (ROWS, OUTS - 1)


def test_they_are_taken_by_name_alone_and_refused_where_there_are_no_descriptors(subject, subject_by_descriptors, monkeypatch):
    assert {impl.name for impl in plugin.kernels(subject.device)} == {"triton"}
    assert {impl.op for impl in plugin.kernels(subject_by_descriptors.device) if impl.name == "triton-descriptors"} == set(OPS.values())
    assert [option.flag for option in plugin.options()] == ["triton-descriptors"] and not plugin.options()[0].default
    monkeypatch.setattr(linear_tiles, "chip", lambda: dataclasses.replace(chip(), has_descriptors=False))
    for scheme in OPS:
        with pytest.raises(RuntimeError, match="--triton-descriptors: this device copies no tiles by descriptors"):
            getattr(linear_tiles, f"pack_{scheme}")(weight_of(scheme, 1))
    without = SimpleNamespace(options={"triton_descriptors": True}, capabilities=Capabilities(triton=False))
    with pytest.raises(RuntimeError, match="--triton-descriptors needs a device that runs Triton"):
        plugin.kernels(without)


@pytest.mark.parametrize(("typed", "settings", "problems"), [(True, None, 1), (True, {"quant_method": "compressed-tensors"}, 0), (False, None, 0)])
def test_a_checkpoint_without_linears_of_8_bits_is_refused(typed, settings, problems):
    config = SimpleNamespace(device=SimpleNamespace(options={"triton_descriptors": typed}))
    assert len(plugin.check_model(SimpleNamespace(quantization_config=settings), config, None)) == problems
