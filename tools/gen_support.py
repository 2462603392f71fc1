"""Write docs/support.md from the reports in docs/support/.

    python tools/gen_support.py                     write the page
    python tools/gen_support.py --check             only compare, for tests and CI
    python tools/gen_support.py --add REPORT.json   keep a report of `oarlock conformance --format json`, then write the page
    python tools/gen_support.py --run DEVICE...     run the kit on devices that are here, keep the reports, then write the page

A kept report has the state of each case, no times and no figures. `docs/support/DEVICE.json` is the kit's;
`docs/support/DEVICE.compile.json` says for which targets a package's programs were compiled without the hardware:
{"kind": "compile", "device", "distribution", "version", "targets": {name: "pass" | why not}, "date", "commit", "command",
"hashes": {"package"}}. A row is stale when the sources of its package, or of the kit, are no longer those of the report.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from oarlock.conformance.provenance import KIT, source_hash

ROOT = Path(__file__).resolve().parents[1]
FOLDER, TARGET = ROOT / "docs" / "support", ROOT / "docs" / "support.md"
KEPT = (
    "device", "distribution", "version", "api", "core", "core_api", "torch", "mode", "levels", "device_text", "stands_in", "commit", "command", "date",
    "hashes", "verdict", "reasons", "verdicts", "loosened",
)  # fmt: skip
FAMILIES = {"dense": "dense", "hybrid": "with windows", "moe": "mixture of experts", "quantized": "quantized"}
HEAD = """# Support

Written by `tools/gen_support.py` from the reports in `docs/support/`. Do not edit.

**Numerics**: the [conformance kit](conformance.md) ran on the device, or on what stands in for it. RUNS: ops are right, and a model of
the family gave the right log-probabilities. CORRECT: so are attention, cache, every arrangement of steps, preemption. SERVES: so is a
server under mixed load; one model is served, dense. **Compiled**: programs were compiled for the target without its hardware. **On
hardware**: where and when the kit ran on the device itself. A row is **stale** when its package or the kit has changed since.

| device | package | numerics | compiled | on hardware | stale |
| --- | --- | --- | --- | --- | --- |
"""


def compact(report: dict[str, Any]) -> dict[str, Any]:
    """A full report as it is kept.

    Raises:
        ValueError: the run was filtered, or stopped before its end: it says nothing of the device.
    """
    if report["filtered"] or report["stopped"]:
        raise ValueError(
            f"the report on {report['device']} is of a run that was {'filtered' if report['filtered'] else 'stopped'}; keep a whole one"
        )
    return {"kind": "kit", **{key: report[key] for key in KEPT}, "cases": {r["id"]: r["status"] for r in report["results"]}}


def differences(report: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """What a full report of now says otherwise than the kept one, over the levels that now were run: sources, states of cases, verdicts."""
    now = compact(report)
    found = [
        f"sources of the {what}: {digest} now, {kept['hashes'].get(what)} kept"
        for what, digest in now["hashes"].items()
        if kept["hashes"].get(what) != digest
    ]
    part = set(report["levels"]) != set(kept["levels"])
    old = {case: state for case, state in kept["cases"].items() if not (part and case.startswith("serve["))}
    for case in sorted(old.keys() | now["cases"].keys()):
        states = (now["cases"].get(case, "not there"), old.get(case, "not there"))
        if states[0] != states[1]:
            found.append(f"{case}: {states[0]} now, {states[1]} kept")
    tiers = [{(v["family"], v["dtype"]): _without_serving(v["tier"]) if part else v["tier"] for v in r["verdicts"]} for r in (now, kept)]
    found += [
        f"{' in '.join(pair)}: {tiers[0].get(pair)} now, {tiers[1].get(pair)} kept"
        for pair in sorted(tiers[0].keys() | tiers[1].keys())
        if tiers[0].get(pair) != tiers[1].get(pair)
    ]
    return found


def _without_serving(tier: str) -> str:
    return "CORRECT" if tier == "SERVES" else tier


def project_of(distribution: str) -> Path | None:
    """The folder in this repository that builds a distribution."""
    for path in sorted(ROOT.glob("*/*/pyproject.toml")):
        if tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}).get("name") == distribution:
            return path.parent
    return None


def stale(report: dict[str, Any]) -> str:
    """What has changed since; "" when nothing has."""
    now = {"package": source_hash(project_of(report["distribution"])), "kit": source_hash(KIT)}
    changed = [what for what, digest in report["hashes"].items() if digest != now.get(what)]
    return ", ".join(changed)


def kept_reports() -> dict[str, dict[str, dict[str, Any]]]:
    """device -> kind -> report."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(report["device"], {})[report["kind"]] = report
    return found


def render() -> str:
    """The whole page."""
    reports = kept_reports()
    lines = [_row(device, kinds) for device, kinds in reports.items()]
    sections = [text for device, kinds in reports.items() if "kit" in kinds for text in _section(kinds["kit"])]
    return HEAD + "".join(f"{line}\n" for line in lines) + "".join(f"{text}\n" for text in sections)


def _row(device: str, kinds: dict[str, dict[str, Any]]) -> str:
    kit, compiled = kinds.get("kit"), kinds.get("compile")
    some: dict[str, Any] = kit or compiled or {}
    cells = [device, f"{some['distribution']} {some['version']}", _tiers(kit) if kit else "-"]
    cells.append(f"{_targets(compiled['targets'])} ({compiled['date'][:10]})" if compiled else "-")
    if kit and not kit["stands_in"]:
        cells.append(f"{kit['device_text']} ({kit['date'][:10]})")
    else:
        cells.append("never" + (f": {kit['stands_in']}" if kit else ""))
    cells.append("; ".join(f"{kind}: {changed}" for kind, report in kinds.items() if (changed := stale(report))) or "no")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _targets(targets: dict[str, str]) -> str:
    return ", ".join(name if state == "pass" else f"not {name}: {state}" for name, state in targets.items())


def _tiers(report: dict[str, Any]) -> str:
    """Tier: family and dtype, family and dtype; tier: ..."""
    by_tier: dict[str, list[str]] = {}
    for v in report["verdicts"]:
        by_tier.setdefault(v["tier"] or "nothing", []).append(f"{FAMILIES.get(v['family'], v['family'])} {v['dtype']}")
    return "; ".join(
        f"{tier}: {', '.join(pairs)}"
        for tier, pairs in sorted(by_tier.items(), key=lambda item: -("nothing", "RUNS", "CORRECT", "SERVES").index(item[0]))
    )


def _section(report: dict[str, Any]) -> list[str]:
    states: dict[str, int] = {}
    for state in report["cases"].values():
        states[state] = states.get(state, 0) + 1
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    lines = [
        "",
        f"## {report['device']}",
        "",
        f"- {report['device_text']}; torch {report['torch']}, core {report['core']}, {report['date'][:10]}",
    ]
    lines += [f"- `{report['command']}` at {report['commit']}: {counted}"]
    lines += [f"- {reason}" for reason in report["reasons"]]
    lines += [f"- `{case}`: {state}" for case, state in report["cases"].items() if state not in ("pass", "unsupported")]
    return [*lines, *(f"- {op} {dtype}: limit loosened to {limit:.2g}, {reason}" for op, dtype, limit, reason in report["loosened"])]


def add(report: dict[str, Any]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{report['device']}.json").write_text(json.dumps(compact(report), indent=1) + "\n", encoding="utf-8")


def run(device: str) -> None:
    """The quick kit, all levels, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        arguments = ["conformance", "--device", device, "--format", "json"]
        done = subprocess.run([sys.executable, "-m", "oarlock.cli.main", *arguments, "--out", str(file)], check=False)
        if not file.exists():
            raise SystemExit(f"gen_support: no report on {device} (exit code {done.returncode})")
        report = json.loads(file.read_text(encoding="utf-8"))
    for result in report["results"]:
        if result["status"] not in ("pass", "unsupported"):
            print(f"{result['status']} {result['id']}: {result.get('detail', '')}", file=sys.stderr)
    add({**report, "command": f"oarlock conformance --device {device}"})


def main() -> int:
    """Exit code 1 when --check finds the page out of date."""
    parser = argparse.ArgumentParser(description="Write docs/support.md from the reports in docs/support/.")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--add", nargs="+", default=[], metavar="REPORT", help="keep these JSON reports of `oarlock conformance`")
    parser.add_argument("--run", nargs="+", default=[], metavar="DEVICE", help="run the kit on these devices and keep the reports")
    arguments = parser.parse_args()
    for path in arguments.add:
        add(json.loads(Path(path).read_text(encoding="utf-8")))
    for device in arguments.run:
        run(device)
    page = render()
    if not arguments.check:
        TARGET.write_text(page, encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != page:
        print(f"{TARGET.name} is not what docs/support/ and the sources say; run: python tools/gen_support.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
