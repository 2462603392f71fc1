"""Engines that several end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def engines() -> Iterator[object]:
    """equivalence.Engines; its last engine ends with the session."""
    from equivalence import Engines

    found = Engines()
    yield found
    found.close()
