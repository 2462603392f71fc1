"""Every device of this repository that can run here passes the kit's quick cases, and docs/support.md says what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gen_support
import pytest
from oarlock.conformance import LEVELS

ROOT = Path(__file__).resolve().parents[2]

# Level 5 of the simulated devices takes half a minute each: they are served in tests/e2e, and here with --full.
RUNS = [("cpu", "0-5"), ("sim-eager", "0-4"), ("sim-static", "0-4"), ("template", "0-4")]
RUNS += [pytest.param(device, "5", marks=pytest.mark.full) for device in ("sim-eager", "sim-static")]


@pytest.mark.parametrize(("device", "levels"), RUNS)
def test_device_conforms_as_its_kept_report_says(device, levels, tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", device, "--level", levels, "--format", "json", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    report = json.loads(file.read_text())
    bad = [(r["id"], r["detail"]) for r in report["results"] if r["status"] in ("fail", "error", "timeout", "xpass")]
    assert (done.returncode, bad) == (0, []), report["verdict"]
    assert all(report["counts"][level]["pass"] >= 7 for level in LEVELS if level in report["levels"])
    assert report["loosened"] == [], "a device of this repository keeps core's own limits"
    if levels == "5" or device == "template":  # a package to start from has no row on the page
        return
    kept = json.loads((ROOT / "docs" / "support" / f"{device}.json").read_text())
    found = gen_support.differences(report, kept)
    assert not found, "\n".join([f"run: python tools/gen_support.py --run {device}", *found[:20]])


REPORT = {
    **{key: "" for key in gen_support.KEPT}, "device": "d", "filtered": False, "stopped": "", "levels": list(LEVELS), "hashes": {"package": "1", "kit": "2"},
    "verdicts": [{"family": "dense", "dtype": "float32", "tier": "SERVES"}],
    "results": [{"id": "linear[x]", "status": "pass"}, {"id": "serve[starts]", "status": "pass"}],
}  # fmt: skip


def test_a_kept_report_differs_when_a_source_a_state_or_a_verdict_does():
    kept = gen_support.compact(REPORT)
    assert gen_support.differences(REPORT, kept) == []
    assert gen_support.differences({**REPORT, "date": "x", "commit": "y"}, kept) == []
    for changed, words in (
        ({"hashes": {"package": "3", "kit": "2"}}, "sources of the package: 3 now, 1 kept"),
        ({"results": [{"id": "linear[x]", "status": "unsupported"}, REPORT["results"][1]]}, "linear[x]: unsupported now, pass kept"),
        ({"results": [*REPORT["results"], {"id": "new", "status": "pass"}]}, "new: pass now, not there kept"),
        ({"verdicts": [{"family": "dense", "dtype": "float32", "tier": "CORRECT"}]}, "dense in float32: CORRECT now, SERVES kept"),
    ):
        assert gen_support.differences({**REPORT, **changed}, kept) == [words]


def test_a_run_without_level_5_is_compared_as_far_as_it_goes():
    part = {**REPORT, "levels": list(LEVELS[:5]), "results": REPORT["results"][:1], "verdicts": [{"family": "dense", "dtype": "float32", "tier": "CORRECT"}]}
    kept = gen_support.compact(REPORT)
    assert gen_support.differences(part, kept) == []
    assert gen_support.differences({**part, "verdicts": [{"family": "dense", "dtype": "float32", "tier": "RUNS"}]}, kept) == ["dense in float32: RUNS now, CORRECT kept"]


@pytest.mark.parametrize("field", ["filtered", "stopped"])
def test_a_run_that_says_nothing_of_the_device_is_not_kept(field):
    with pytest.raises(ValueError, match=field):
        gen_support.compact({**REPORT, field: "x"})
