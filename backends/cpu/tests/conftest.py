"""Shared by this backend's tests: skips those of the kernels where they were not built, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from oarlock_cpu import native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem, here = native.problem(), Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("alone")
        if problem and item.get_closest_marker("kernels"):
            item.add_marker(pytest.mark.skip(reason=problem))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: needs the compiled kernels")
    config.addinivalue_line("markers", "alone: uses all cores")


def _use(name: str):
    import torch

    before = native.isa()
    if not torch.ops.oarlock_cpu.set_isa(name):
        pytest.skip(f"this processor has no {name}")
    yield name
    torch.ops.oarlock_cpu.set_isa(before)


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest):
    """Each instruction set that this processor has, one after another."""
    yield from _use(request.param)


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512_vnni", "avx512_fp16", "amx"])
def linear_isa(request: pytest.FixtureRequest):
    """The same for linears over packed weights and codes, the only kernels that AMX and AVX-512 FP16 change."""
    yield from _use(request.param)
