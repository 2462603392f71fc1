"""Engines that several end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(autouse=True)
def _near_ties_in_the_report(record_property: Callable[[str, str], None]) -> Iterator[None]:
    """For tools/equivalence_report.py, which may not run in the process of the test."""
    from checkpoints import NEAR_TIES

    known = len(NEAR_TIES)
    yield
    for tie in NEAR_TIES[known:]:
        record_property("near_tie", tie)


@pytest.fixture(scope="session")
def engines() -> Iterator[object]:
    """equivalence.Engines; its last engine ends with the session."""
    from equivalence import Engines

    found = Engines()
    yield found
    found.close()
