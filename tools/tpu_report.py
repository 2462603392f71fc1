"""Write docs/tpu.md, and docs/support/tpu.compile.json: what the conformance kit and the TPU compiler said of oarlock-tpu. No TPU is needed.

    python tools/tpu_report.py [--kit] [--compile] [--folder build/tpu]

--kit runs the kit, --compile the compiler for each machine; without either, the page is written from what the folder holds.
Run by `make test-tpu` in an environment that has oarlock-tpu's packages. Exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from oarlock.conformance.provenance import commit, source_hash

ROOT = Path(__file__).resolve().parents[1]
PAGE, BACKEND = ROOT / "docs" / "tpu.md", ROOT / "backends" / "tpu"
LEVELS = ("0-2", "3", "4")  # a process each: a fault ends one part
MACHINES = (("v5e", "v5e:2x2", 4), ("v6e", "v6e:2x2", 1), ("tpu7x", "tpu7x:2x2x1", 1))
STATES = ("pass", "fail", "error", "timeout", "unsupported", "xfail", "xpass")
BAD = ("fail", "error", "timeout", "xpass")
GIB, MIB = 2**30, 2**20


def run_kit(folder: Path) -> None:
    environment = {**os.environ, "OARLOCK_TPU_ON_HOST": "1"}
    for levels in LEVELS:
        command = [sys.executable, "-m", "oarlock.cli.main", "conformance", "--device", "tpu", "--level", levels, "--timeout", "1500"]
        subprocess.run([*command, "--format", "json", "--out", str(folder / f"kit-{levels}.json")], env=environment, check=False)


def run_compiler(folder: Path) -> None:
    for name, topology, chips in MACHINES:
        command = [sys.executable, str(ROOT / "tools" / "compile_for_tpu.py"), "--topology", topology, "--chips", str(chips)]
        subprocess.run([*command, "--out", str(folder / f"compile-{name}.json")], check=False)


# ---------------------------------------------------------------- the page
def kit_lines(parts: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The table of levels, what failed, and whether all is well."""
    results = [r for part in parts for r in part["results"]]
    bad = [r for r in results if r["status"] in BAD]
    lines = ["| level | " + " | ".join(STATES) + " | seconds |", "|---|" + "---|" * (len(STATES) + 1)]
    for level, name in enumerate(("contract", "device", "ops", "attention", "runner")):
        here = [r for r in results if r["level"] == level]
        counts = [str(sum(r["status"] == state for r in here) or "-") for state in STATES]
        lines.append(f"| {level} {name} | " + " | ".join(counts) + f" | {sum(r['seconds'] for r in here):.0f} |")
    lines.append("")
    for dtype in ("float32", "bfloat16"):
        for family in ("dense", "hybrid", "moe", "quantized"):
            ran = [r for r in results if r["level"] == 4 and r.get("family") == family and r.get("dtype") == dtype and r["status"] != "unsupported"]
            if ran:
                wrong = sum(r["status"] in BAD for r in ran)
                lines.append(f"- {family} {dtype}: {len(ran) - wrong} of {len(ran)} runner cases passed")
    lines += [f"- expected to fail: `{r['id']}`, {r.get('detail', '')}" for r in results if r["status"] == "xfail"]
    lines += [f"- **{r['status']}** `{r['id']}`: {r.get('detail', '')[:300]}" for r in bad]
    served: dict[str, set[str]] = {}
    for part in parts:
        for op, by in part["served"].items():
            served.setdefault(op, set()).update(by.values())
    own = sorted(op for op, names in served.items() if names != {"reference"})
    lines += ["", f"Own implementations serve {', '.join(f'{op} ({min(served[op])})' for op in own)}; core's references serve the rest."]
    return lines, not bad and len({r["level"] for r in results}) == 5


def targets(folder: Path) -> dict[str, str]:
    """Each machine: "pass", or why not."""
    found = {}
    for name, _, _ in MACHINES:
        path = folder / f"compile-{name}.json"
        good = path.exists() and compile_lines(json.loads(path.read_text(encoding="utf-8")))[1]
        found[name] = "pass" if good else "not compiled" if not path.exists() else "the page says what is wrong"
    return found


def keep_targets(folder: Path) -> None:
    """What `tools/gen_support.py` shows in its column `compiled`."""
    report = {
        "kind": "compile", "device": "tpu", "distribution": "oarlock-tpu", "version": metadata.version("oarlock-tpu"), "targets": targets(folder),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "commit": commit([BACKEND]), "command": "python tools/compile_for_tpu.py",
        "hashes": {"package": source_hash(BACKEND)},
    }  # fmt: skip
    (ROOT / "docs" / "support" / "tpu.compile.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def compile_lines(found: dict[str, Any]) -> tuple[list[str], bool]:
    """One machine: the plan, then a line for each program."""
    programs, per = found["programs"], found["available_bytes"] // found["chips"]
    heaviest = max(p["peak_bytes"] for p in programs)
    plan = {what: size for what, size, _ in found["memory_plan"]}
    planned = sum(plan.get(what, 0) for what in ("weights", "activations", "KV cache")) // found["chips"]
    copies = sum(p["cache_copies"] or 0 for p in programs)
    unread = [p["program"] for p in programs if p["cache_copies"] is None]
    wide = [p["program"] for p in programs if p["has_wide_numbers"]]
    fits = heaviest <= min(planned, per)
    lines = [
        f"### {found['topology']}, {found['chips']} device{'s' if found['chips'] > 1 else ''}",
        "",
        f"- plan: weights {plan['weights'] / GIB:.2f} GiB, activations {plan['activations'] / GIB:.2f}, KV cache {plan['KV cache'] / GIB:.2f}, "
        + f"{found['num_blocks']} blocks of {found['block_size']} tokens, of {found['available_bytes'] / GIB:.2f} GiB; a device's part is {planned / GIB:.2f}",
        f"- largest program, a device: {heaviest / GIB:.2f} GiB: {'within the plan' if fits else '**beyond the plan**'}",
        f"- whole-cache copies: {copies}; programs with 64-bit numbers: {', '.join(wide) or 'none'}"
        + (f"; not readable by this jaxlib, so not searched: {', '.join(unread)}" if unread else ""),
        f"- {len(programs)} programs, {sum(p['cpu_seconds'] for p in programs):.0f} s of a processor in all",
        "",
        "| program | s (of a processor) | arguments MiB | donated | temporary | code | GFLOP | copies | all-reduce | kernels |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in programs:
        axes = ", ".join(f"{name} {value}" for name, value in p["axes"].items() if value)
        sizes = " | ".join(f"{p[name] / MIB:.1f}" for name in ("argument_bytes", "donated_bytes", "temporary_bytes", "code_bytes"))
        copied = "?" if p["cache_copies"] is None else p["cache_copies"]
        lines.append(
            f"| {p['program']} ({axes}) | {p['seconds']:.1f} ({p['cpu_seconds']:.1f}) | {sizes} | {p['flops'] / 1e9:.2f} | {copied} "
            f"| {p['all_reduces']} | {p['kernels']} |"
        )
    return [*lines, ""], fits and not copies and not wide


def render(folder: Path) -> tuple[str, bool]:
    parts = [json.loads(path.read_text(encoding="utf-8")) for levels in LEVELS if (path := folder / f"kit-{levels}.json").exists()]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchax", "jax", "jaxlib", "libtpu"))
    lines = [
        "# TPU: what was tested, and over what",
        "",
        "Written by `make test-tpu` (`tools/tpu_report.py`). Do not edit.",
        "",
        "**No program has ever run on a TPU.** The kit ran the same programs on JAX's CPU, with the Pallas kernel interpreted; libtpu compiled every",
        "program of a Llama-3-8B shape for chips that were only described to it.",
        "",
        f"Versions: {versions}.",
        "",
        "## Conformance kit, on JAX's CPU",
        "",
    ]
    good = True
    if parts:
        commits = ", ".join(sorted({part["commit"] for part in parts}))
        lines += [f"`OARLOCK_TPU_ON_HOST=1 oarlock conformance --device tpu`, levels {', '.join(LEVELS)}, quick, at {commits}, {parts[0]['date'][:10]}", ""]
        found, good = kit_lines(parts)
        lines += found
    missing = [levels for levels in LEVELS if not (folder / f"kit-{levels}.json").exists()]
    if missing:
        lines.append(f"- **not run**: levels {', '.join(missing)}")
    lines += ["", "## Compiled for TPUs", ""]
    lines += [
        "`python tools/compile_for_tpu.py` for each machine: Llama-3-8B's shape in bfloat16, 8,192 tokens of context, 32 sequences, chunks of up to",
        "512 tokens. Layers are one loop over packed weights; decode and chunk regions are apart. Bytes and FLOP are one device's, and FLOP do not",
        "count the kernel's or a loop's repetitions. A tpu7x chip is two devices.",
        "",
    ]
    done = not missing
    for name, _, _ in MACHINES:
        path = folder / f"compile-{name}.json"
        if not path.exists():
            lines += [f"### {name}", "", "- **not compiled**", ""]
            done = False
            continue
        found, ok = compile_lines(json.loads(path.read_text(encoding="utf-8")))
        lines, good = lines + found, good and ok
    return "\n".join(lines).rstrip() + "\n", good and done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tpu")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.kit:
        run_kit(arguments.folder)
    if arguments.compile:
        run_compiler(arguments.folder)
    page, good = render(arguments.folder)
    PAGE.write_text(page, encoding="utf-8")
    if arguments.compile:
        keep_targets(arguments.folder)
    print(f"{PAGE.relative_to(ROOT)}: {'all is well' if good else 'something failed or did not run; the page says what'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
