"""Every device of this repository that can run here passes the kit's quick cases, all levels, through the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from oarlock.conformance import LEVELS


# Level 5 of the simulated devices takes half a minute each: they are served in tests/e2e, and here with --full.
RUNS = [("cpu", "0-5"), ("sim-eager", "0-4"), ("sim-static", "0-4")]
RUNS += [pytest.param(device, "5", marks=pytest.mark.full) for device in ("sim-eager", "sim-static")]


@pytest.mark.parametrize(("device", "levels"), RUNS)
def test_device_conforms(device, levels, tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", device, "--level", levels, "--format", "json", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    report = json.loads(file.read_text())
    bad = [(r["id"], r["detail"]) for r in report["results"] if r["status"] in ("fail", "error", "xpass")]
    assert (done.returncode, bad) == (0, []), report["verdict"]
    assert all(report["counts"][level]["pass"] >= 7 for level in LEVELS if level in report["levels"])
    assert report["loosened"] == [], "a device of this repository keeps core's own limits"
