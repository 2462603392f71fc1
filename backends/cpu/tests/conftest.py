"""Shared by this backend's tests: skips those of the kernels where they were not built, and says so."""

from __future__ import annotations

import pytest

from oarlock_cpu import native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = native.problem()
    for item in items:
        if problem and item.get_closest_marker("kernels"):
            item.add_marker(pytest.mark.skip(reason=problem))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: needs the compiled kernels")


@pytest.fixture(params=["generic", "avx2", "avx512", "amx"])
def isa(request: pytest.FixtureRequest):
    """Each instruction set that this processor has, one after another."""
    import torch

    before = native.isa()
    if not torch.ops.oarlock_cpu.set_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    torch.ops.oarlock_cpu.set_isa(before)
