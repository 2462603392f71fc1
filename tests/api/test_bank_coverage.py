"""Every case of bank.yaml is tested here, or waits for a feature that this version does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
CASES = yaml.safe_load((HERE / "bank.yaml").read_text())["cases"]
LATER = {
    # A case's id, and the feature that it waits for. That the feature's fields are refused by name is tested in
    # test_guided_legacy_ignored_and_other_missing_features.
    "lora-cache-isolation": "LoRA",
    "lora-load-errors": "LoRA",
}
TESTS = {name for path in HERE.glob("test_cases_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}


def test_the_list_of_later_cases_names_real_ones() -> None:
    assert set(LATER) <= {case["id"] for case in CASES}
    assert len(CASES) == 59


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case_is_covered(case: dict[str, object]) -> None:
    test = "test_" + str(case["id"]).replace("-", "_")
    covered = any(name == test or name.startswith(test + "_") for name in TESTS)
    if case["id"] in LATER:
        assert not covered, f"{case['id']} has a test; take it off the list of later ones"
        pytest.skip(f"waits for {LATER[str(case['id'])]}")
    assert covered, f"no test named {test} in tests/api/test_cases_*.py"
