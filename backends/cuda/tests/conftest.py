"""Fixtures of the cuda tests: a machine that a test describes, and a stand-in for torch.cuda."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `import cuda_stub`

import cuda_stub


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`machine(library, torch_built)`: an otherwise empty machine; gives its root."""

    def make(library: Any | None = None, *torch_built: Any) -> Path:
        cuda_stub.machine(tmp_path, monkeypatch, library, *torch_built)
        return tmp_path

    return make


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cuda_stub.StubCuda:
    """The device over host tensors."""
    return cuda_stub.put_in_place(tmp_path, monkeypatch)
