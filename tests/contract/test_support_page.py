"""docs/support.md is what the kept reports and the sources say."""

from __future__ import annotations

import json
import subprocess
import sys

import gen_support
from source_code import ROOT


def test_the_support_page_is_up_to_date():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "gen_support.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_row_whose_package_has_changed_says_so(tmp_path, monkeypatch):
    kept = json.loads((ROOT / "docs" / "support" / "sim-static.json").read_text())
    monkeypatch.setattr(gen_support, "FOLDER", tmp_path)
    (tmp_path / "sim-static.json").write_text(json.dumps({**kept, "hashes": {**kept["hashes"], "package": "0" * 16}}))
    row = next(line for line in gen_support.render().splitlines() if line.startswith("| sim-static"))
    assert "kit: package" in row.split("|")[-2] and "never: torch's CPU operators" in row


def test_what_was_only_compiled_has_its_own_column(tmp_path, monkeypatch):
    monkeypatch.setattr(gen_support, "FOLDER", tmp_path)
    report = {"kind": "compile", "device": "far", "distribution": "oarlock-far", "version": "1", "targets": {"a1": "pass", "a2": "too large"}}
    (tmp_path / "far.compile.json").write_text(json.dumps({**report, "date": "2026-01-02T", "commit": "", "command": "", "hashes": {}}))
    assert "| far | oarlock-far 1 | - | a1, not a2: too large (2026-01-02) | never | no |" in gen_support.render()
