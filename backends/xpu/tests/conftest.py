"""Fixtures of the xpu tests: a machine with a card in a folder, and a stand-in for torch.xpu."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `import xpu_stub`

from xpu_stub import Machine, StubXpu, put_in_place


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(device_id, ...)` adds a PCI function to an otherwise empty machine."""
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubXpu:
    """The device over host tensors."""
    return put_in_place(tmp_path, monkeypatch)
