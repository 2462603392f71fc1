"""Several servers that are up together, measured in turns: the same prompts, medians and ranges, and the first beside each other one.

Owns: the workloads, and the order of the runs.
Reads: nothing of Oarlock but its command `oarlock bench serve`.
Never: starts a server; passes or fails.

    python benchmarks/compare_servers.py oarlock=http://127.0.0.1:8000 other=http://127.0.0.1:8001 [--repeats 3] [--only single,c32] [--stop other=PID]

Each repeat has prompts of its own, so that no prefix is met again, and every second one runs the servers in the opposite order.
A machine drifts: only figures of one run compare, and a ratio is that of two neighbouring runs, the median and the worst of such pairs.
A server that waits must use no CPU: `--stop` has its processes stopped meanwhile (SIGSTOP).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# name -> (flags of `oarlock bench serve`, what to show: (column, key of its JSON, statistic))
_RATE = ("output tokens/s", "output_tokens_per_s", "")
_TTFT = (("TTFT p50 ms", "ttft_ms", "median"), ("TTFT p99 ms", "ttft_ms", "p99"))
WORKLOADS: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "single": ("--num-prompts 2 --max-concurrency 1 --input-len 128 --output-len 128", (_RATE, ("TPOT ms", "tpot_ms", "median"))),
    "prefill": ("--num-prompts 3 --max-concurrency 1 --input-len 1024 --output-len 1", (("input tokens/s", "input_tokens_per_s", ""),)),
    "c8": ("--num-prompts 16 --max-concurrency 8 --input-len 64:512 --output-len 128", (_RATE, *_TTFT)),
    "c32": ("--num-prompts 32 --max-concurrency 32 --input-len 64:512 --output-len 128", (_RATE, *_TTFT)),
    "c64": ("--num-prompts 64 --max-concurrency 64 --input-len 64:512 --output-len 128", (_RATE, *_TTFT)),
    "prefix": ("--num-prompts 32 --max-concurrency 4 --input-len 16:64 --output-len 16 --shared-prefix 768", _TTFT[:1]),
    "no-prefix": ("--num-prompts 32 --max-concurrency 4 --input-len 784:832 --output-len 16", _TTFT[:1]),
    # For larger models: less of the same, and long contexts.
    "short1": ("--num-prompts 1 --max-concurrency 1 --input-len 64 --output-len 64", (_RATE, ("TPOT ms", "tpot_ms", "median"))),
    "short8": ("--num-prompts 8 --max-concurrency 8 --input-len 32:128 --output-len 48", (_RATE, *_TTFT)),
    "short32": ("--num-prompts 32 --max-concurrency 32 --input-len 32:128 --output-len 32", (_RATE, *_TTFT)),
    "long": ("--num-prompts 4 --max-concurrency 4 --input-len 8000 --output-len 256", (_RATE, *_TTFT, ("TPOT ms", "tpot_ms", "median"))),
}
USUAL = tuple(name for name in WORKLOADS if not name.startswith(("short", "long")))


def run(url: str, model: str | None, flags: str, seed: int) -> dict[str, Any]:
    """One run of `oarlock bench serve`. Raises SystemExit with its words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "oarlock.cli.main", "bench", "serve", "--url", url, "--ignore-eos", "--id-range", "1000", "29999"]
        command += ["--model", model] if model else []
        ran = subprocess.run([*command, *flags.split(), "--seed", str(seed), "--json", str(file)], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} {flags}\n{ran.stdout}{ran.stderr}")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def processes(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Meanwhile these, and what they have started, do not run."""
    held = [one for pid in pids for one in processes(pid)]
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)


def value(figures: dict[str, Any], key: str, statistic: str) -> float:
    found = figures[key][statistic] if statistic else figures[key]
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="LABEL=URL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(USUAL), help=f"workloads, with commas between, of {', '.join(WORKLOADS)}")
    parser.add_argument("--model", help="name to ask every server for; unset: the first that each lists")
    parser.add_argument("--stop", action="append", default=[], metavar="LABEL=PID", help="stop this server while another is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="append every run there, one object a line")
    arguments = parser.parse_args()
    servers = [tuple(server.split("=", 1)) for server in arguments.servers]
    held = {label: int(pid) for label, pid in (pair.split("=", 1) for pair in arguments.stop)}
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise SystemExit(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    seen: dict[tuple[str, str, str], list[float]] = {}
    for repeat in range(arguments.repeats):
        for number, name in enumerate(names):
            flags, columns = WORKLOADS[name]
            for label, url in servers if repeat % 2 == 0 else servers[::-1]:
                with stopped([pid for other, pid in held.items() if other != label]):
                    figures = run(url, arguments.model, flags, arguments.seed + 1000 * repeat + number)
                for column, key, statistic in columns:
                    seen.setdefault((name, column, label), []).append(value(figures, key, statistic))
                if arguments.json:
                    with open(arguments.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"workload": name, "repeat": repeat, "server": label, **figures}) + "\n")
                print(f"repeat {repeat + 1}  {name:10} {label}", file=sys.stderr)
    print(table(seen, names, [label for label, _ in servers]))


def table(seen: dict[tuple[str, str, str], list[float]], names: list[str], labels: list[str]) -> str:
    """Medians with their range, and the first server's ratio to each other one, as a Markdown table."""
    first, others = labels[0], labels[1:]
    lines = ["| workload | | " + " | ".join([*labels, *(f"{first} / {other}, worst" for other in others)]) + " |", "|---|---|" + "---|" * (len(labels) + len(others))]
    for name in names:
        for column, _, _ in WORKLOADS[name][1]:
            cells = []
            for label in labels:
                runs = sorted(seen[name, column, label])
                cells.append(f"{statistics.median(runs):.4g} [{runs[0]:.4g}..{runs[-1]:.4g}]")
            for other in others:
                pairs = [ours / theirs for ours, theirs in zip(seen[name, column, first], seen[name, column, other], strict=True)]
                worst = min(pairs) if column.endswith("/s") else max(pairs)
                cells.append(f"{statistics.median(pairs):.2f}, {worst:.2f}")
            lines.append(f"| {name} | {column} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
