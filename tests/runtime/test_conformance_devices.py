"""Every device of this repository that can run here passes the kit's quick cases, all levels, through the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from oarlock.conformance import LEVELS


@pytest.mark.parametrize("device", ["cpu", "sim-eager", "sim-static"])
def test_device_conforms(device, tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", device, "--format", "json", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    report = json.loads(file.read_text())
    bad = [(r["id"], r["detail"]) for r in report["results"] if r["status"] in ("fail", "error", "xpass")]
    assert (done.returncode, bad) == (0, []), report["verdict"]
    assert report["verdict"].startswith("CORRECT for ") and "float32" in report["verdict"]
    assert all(report["counts"][level]["pass"] >= 10 for level in LEVELS)
    assert report["loosened"] == [], "a device of this repository keeps core's own limits"
