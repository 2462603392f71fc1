"""tests/unit stays quick because nothing in it imports torch."""

from __future__ import annotations

from source_code import ROOT, imports, is_within, python_files, shown, tree


def test_unit_tests_import_no_torch():
    heavy = ("torch", "transformers", "oarlock.runtime", "oarlock.backend_api.runtime")
    wrong = [
        f"{shown(p)}:{i.line} imports {i.name}"
        for p in python_files(ROOT / "tests" / "unit")
        for i in imports(tree(p))
        if is_within(i.name, *heavy)
    ]
    assert not wrong
