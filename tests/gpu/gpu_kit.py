"""The conformance kit, level by level and dtype by dtype, so that a run which was cut goes on.

Owns: the parts; what they say together.
Reads: the command `oarlock conformance`, through its reports.
Never: imports torch itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gpu_results import Results

Part = tuple[str, str, str]  # name, --level, -k
AT_ONCE = 6  # parts, on a host of twice as many cores
DTYPES = ("float32", "bfloat16", "float16")
# Each dtype's cases, and those of none: together all of a level.
OF_DTYPE = {dtype: rf"[\[,]{dtype}[,\]]" for dtype in DTYPES}
OF_NONE = rf"^(?!.*[\[,]({'|'.join(DTYPES)})[,\]])"


def parts(has_server: bool) -> list[Part]:
    """In order of worth."""
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
    good = []
    for group in _groups(chosen):
        with ThreadPoolExecutor(min(AT_ONCE, max(1, (os.cpu_count() or 1) // 2))) as pool:
            good += pool.map(lambda part: results.measure(f"level {part[0]}", partial(_part, device, part, results.path)), group)
    bad = sum(figure.get("bad", 1) for figure in results.data["figures"].values())
    levels = "5" if has_server else "4"
    results.data["verdict"] = f"every case of levels 0 to {levels} passed" if all(good) and not bad and not is_tiny else f"{bad} cases are bad" if all(good) else "parts are missing"
    return all(good) and not bad


def _groups(chosen: list[Part]) -> list[list[Part]]:
    """Parts that may run beside each other: ops, attention and the runner compile more than they compute. What watches the device or serves runs alone."""
    beside = [part for part in chosen if part[1] in ("2", "3", "4")]
    alone = [[part] for part in chosen if part not in beside]
    return [*alone[:1], beside, *alone[1:]]


def _part(device: str, part: Part, beside: Path) -> dict[str, Any]:
    name, level, pattern = part
    report = beside.with_name(f"kit-report-{name.replace(', ', '-').replace(' ', '-')}.json")
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
