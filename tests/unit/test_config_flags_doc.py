"""docs/flags.md is what the option table says."""

from __future__ import annotations

from pathlib import Path

import gen_flags_doc
from oarlock.config.option import flag
from oarlock.config.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_current() -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == gen_flags_doc.render(), "run: python tools/gen_flags_doc.py"


def test_every_spelling_is_on_the_page() -> None:
    page = gen_flags_doc.render()
    assert [name for option in OPTIONS for name in option.names if f"`{flag(name)}`" not in page] == []
