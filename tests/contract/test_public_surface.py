"""The plugin surface changes only on purpose, with a version."""

from __future__ import annotations

import difflib

from public_surface import COMMITTED, describe


def test_public_surface_is_the_committed_one():
    committed, now = COMMITTED.read_text(encoding="utf-8"), describe()
    difference = "\n".join(difflib.unified_diff(committed.splitlines(), now.splitlines(), "committed", "now", lineterm="", n=1))
    assert not difference, (
        "oarlock.backend_api changed. Raise API_VERSION (minor for an addition, major for anything that breaks a plugin), "
        "then run: python tests/contract/public_surface.py --write"
    )


def test_public_surface_names_everything_exported():
    import oarlock.backend_api as light
    from oarlock.backend_api import runtime
    from oarlock.backend_api.runtime import model

    text = describe()
    for module in (light, runtime, model):
        for name in module.__all__:
            assert f"{module.__name__}.{name}\n" in text
