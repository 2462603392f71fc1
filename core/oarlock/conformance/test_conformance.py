"""Every case of the kit as a test; see `pytest_plugin`. Part of the package, so that `--pyargs oarlock.conformance` finds it.

Owns: how a result becomes a test's outcome.
Reads: `cases`, `kit`.
Never: selects cases.
"""

from __future__ import annotations

from typing import Any

import pytest


def test_case(oarlock_case: Any, oarlock_subject: Any, pytestconfig: pytest.Config) -> None:
    from oarlock.conformance.cases import CASE_LIMIT_S, run_case
    from oarlock.conformance.kit import expected_failure

    limit_s = pytestconfig.getoption("--oarlock-timeout") or CASE_LIMIT_S
    result = run_case(oarlock_case, oarlock_subject, expected_failure(oarlock_case.id, oarlock_subject), limit_s)
    if result.status == "unsupported":
        pytest.skip(result.detail)
    if result.status == "xfail":
        pytest.xfail(result.detail)
    if result.is_bad:
        pytest.fail(f"{result.detail}\n{result.trace}".strip(), pytrace=False)
