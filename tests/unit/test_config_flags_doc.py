"""docs/flags.md is what the option table says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from oarlock.config.option import flag
from oarlock.config.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_flags_doc", ROOT / "tools" / "gen_flags_doc.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_current(generator: ModuleType) -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == generator.render(), "run: python tools/gen_flags_doc.py"


def test_every_spelling_is_on_the_page(generator: ModuleType) -> None:
    page = generator.render()
    assert [name for option in OPTIONS for name in option.names if f"`{flag(name)}`" not in page] == []
