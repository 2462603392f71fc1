"""Fixtures of the tpu tests: a machine with chips in a folder. What needs JAX is skipped, with the reason, where there is none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from oarlock_tpu import host

HEAVY = ("test_tpu_kernel", "test_tpu_compile", "test_tpu_spmd")
LACKING = [name for name in ("jax", "torchax", "libtpu") if importlib.util.find_spec(name) is None]
if not LACKING:  # an environment made for these tests; elsewhere other packages' tests run in this process
    os.environ[host.ON_HOST] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LACKING and item.path.stem in HEAVY and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(LACKING)} is not installed here; make test-tpu makes an environment that has it"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`machine(device_id, …)` adds a PCI function to an otherwise empty machine, and returns its folder."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    for name in (host.ON_HOST, "TPU_ACCELERATOR_TYPE", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)
    count = iter(range(16))

    def add(device_id: str = "0x0063", vendor_id: str = "0x1ae0", node: str = "vfio/{}") -> Path:
        number = next(count)
        folder = tmp_path / f"sys/bus/pci/devices/0000:00:{number + 4:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor_id}\n")
        (folder / "device").write_text(f"{device_id}\n")
        if node:
            path = tmp_path / "dev" / node.format(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return folder

    return add
