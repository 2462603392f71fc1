"""A few of the kit's cases under compute-sanitizer: reads and writes out of bounds, races in shared memory.

Owns: which cases, which tools; where the tool is looked for.
Reads: the command `oarlock conformance`.
Never: says that something is clean which was not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_results import Results

CASES = (
    ("attention", "3", r"attention\[bfloat16,(decode|mixed|padding|window)"),
    ("layers", "2", r"^(rms_norm|fused_add_rms_norm|rotary|silu_and_mul|linear_int4|moe_experts)\[bfloat16"),
    ("sampling", "2", r"^(sample|greedy|logprobs|apply_penalties)\["),
)
TOOLS = ("memcheck", "racecheck")
# The command `oarlock` without graphs: none can be recorded where tensors are allocated one by one.
EAGER = (
    "import oarlock.conformance.subject as subject\n"
    "from oarlock.backend_api.runtime import EagerRunner\n"
    "subject.choose_graph_runner = lambda records, device: EagerRunner(device)\n"
    "from oarlock.cli.main import main\n"
    "raise SystemExit(main())"
)
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def find() -> str:
    """Where compute-sanitizer is; "": nowhere."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [str(home / "bin") for home in (*homes, Path("/usr/local/cuda"))]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places)) or ""


def run(results: Results, device: str) -> bool | None:
    """Whether nothing was found; None: it cannot be run here, and the file says why."""
    tool = find()
    if not tool:
        results.data["status"], results.data["reason"] = "unavailable", "compute-sanitizer is neither in PATH nor below CUDA_HOME or /usr/local/cuda; it comes with the CUDA toolkit"
        print(f"unavailable: {results.data['reason']}")
        return None
    done = []
    for kind in TOOLS:
        for name, level, pattern in CASES:
            done.append(results.measure(f"{kind}, {name}", lambda kind=kind, level=level, pattern=pattern: _case(tool, kind, device, level, pattern)))
    return all(done) and not any(figure.get("value", 1) for figure in results.data["figures"].values())


def _case(tool: str, kind: str, device: str, level: str, pattern: str) -> dict[str, Any]:
    kit = [sys.executable, "-c", EAGER, "conformance", "--device", device, "--level", level, "-k", pattern, "--keep-going"]
    # Not the compilers that this process starts; and each tensor in memory of its own, else what lies behind it is another's and nothing is out of bounds.
    command = [tool, "--tool", kind, "--target-processes", "application-only", *kit]
    ran = subprocess.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, check=False)
    return summary(ran.stdout + ran.stderr, ran.returncode)


def summary(said: str, code: int) -> dict[str, Any]:
    """What the tool said of one run.

    Raises:
        RuntimeError: it gave no summary, or the cases did not pass, so that nothing is known.
    """
    counts = [int(a or b) for a, b in FOUND.findall(said)]
    if not counts:
        raise RuntimeError(f"no summary (exit {code}): {said.strip().splitlines()[-3:]}")
    if code and not sum(counts):
        raise RuntimeError(f"nothing was found in cases that did not all pass (exit {code}): {said.strip().splitlines()[-6:]}")
    lines = [text for text in said.splitlines() if text.startswith("=========")]
    return {"value": sum(counts), "unit": "errors", "said": lines[:40] if sum(counts) else []}
