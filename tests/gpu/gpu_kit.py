"""The conformance kit, level by level and dtype by dtype, so that a run which was cut goes on.

Owns: the parts; what they say together.
Reads: the command `oarlock conformance`, through its reports.
Never: imports torch itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_results import Results

DTYPES = ("float32", "bfloat16", "float16")
# Each dtype's cases, and those of none: together all of a level.
OF_DTYPE = {dtype: rf"[\[,]{dtype}[,\]]" for dtype in DTYPES}
OF_NONE = rf"^(?!.*[\[,]({'|'.join(DTYPES)})[,\]])"


def parts(has_server: bool) -> list[tuple[str, str, str]]:
    """(name, --level, -k), in order of worth."""
    found = [("0 and 1", "0-1", "")]
    for level in ("2", "3", "4"):
        found += [(f"{level}, {dtype}", level, OF_DTYPE[dtype]) for dtype in DTYPES]
        found.append((f"{level}, others", level, OF_NONE))
    return [*found, ("5", "5", "")] if has_server else found


def run(results: Results, device: str, has_server: bool, is_tiny: bool) -> bool:
    """Whether every part is there and nothing failed."""
    chosen = parts(has_server)
    if is_tiny:
        chosen = [("0 and 1", "0-1", "contract|verify"), ("2, float32", "2", r"silu_and_mul\[float32")]
    good = [results.measure(f"level {name}", lambda level=level, pattern=pattern: _part(device, level, pattern, results.path)) for name, level, pattern in chosen]
    bad = sum(figure.get("bad", 1) for figure in results.data["figures"].values())
    levels = "5" if has_server else "4"
    results.data["verdict"] = f"every case of levels 0 to {levels} passed" if all(good) and not bad and not is_tiny else f"{bad} cases are bad" if all(good) else "parts are missing"
    return all(good) and not bad


def _part(device: str, level: str, pattern: str, beside: Path) -> dict[str, Any]:
    report = beside.with_name(f"kit-report-{level}.json")
    command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", device, "--level", level, "--keep-going", "--format", "json", "--out", str(report)]
    done = subprocess.run([*command, *(("-k", pattern) if pattern else ())], capture_output=True, text=True, check=False)
    if not report.is_file():
        if "no case matches" in done.stderr + done.stdout:
            return {"value": 0, "unit": "cases", "bad": 0, "counts": {}}
        raise RuntimeError(f"no report (exit {done.returncode}): {(done.stderr or done.stdout).strip().splitlines()[-3:]}")
    found = summary(json.loads(report.read_text(encoding="utf-8")))
    report.unlink()
    return found


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Of one report of the kit: how many cases, which of them are bad and why, who served."""
    counts: dict[str, int] = {}
    bad = []
    for result in report["results"]:
        counts[result["status"]] = counts.get(result["status"], 0) + 1
        if result["status"] in ("fail", "error", "timeout", "xpass"):
            bad.append({"id": result["id"], "status": result["status"], "detail": result.get("detail", "")[:500]})
    return {"value": len(report["results"]), "unit": "cases", "counts": counts, "bad": len(bad), "details": bad[:40], "served": report["served"]}
