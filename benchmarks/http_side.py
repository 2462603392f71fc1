"""What serving costs beside the model's kernels: CPU time of the API process, and the engine's own time in a step.

Owns: the servers that it starts, and the reading of their processes' times.
Reads: /proc, /metrics; `oarlock bench serve` for the load; py-spy for `--profile`.
Never: passes or fails; leaves a server behind.

    python benchmarks/http_side.py [--streams 1,8,32,64] [--rounds 3] [--profile] [--core old=FOLDER --core new=core] -- MODEL [flags of oarlock serve]

A round starts a server and loads it with each number of streams; each `--core` is a folder with another package oarlock, measured in turns.
CPU seconds are the kernel's count, so a busy machine changes them less than it changes wall time. `--profile` samples the engine's main
thread and says which part of a step lies in compiled operations (kernels), in the rest of the programs (glue), and elsewhere: scheduler, batch
assembly, results and messages (engine).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

BIN = Path(sys.executable).parent
FIGURES = ("tokens/s", "API ms/token", "API ms/step", "step ms", "kernels %", "glue %", "engine %")


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, its ended threads included (Linux: a process's clock is found by its id)."""
    return 1e3 * time.clock_gettime((~pid << 3) | 2)


def child_of(pid: int) -> int:
    """The engine's process: the child of the API process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def metrics(url: str) -> dict[str, float]:
    """The page's series without other labels than the model's name."""
    page = urllib.request.urlopen(url + "/metrics").read().decode()
    return {name: float(value) for name, value in re.findall(r"^([\w:]+)\{[^},]*\} (\S+)$", page, re.MULTILINE)}


class Server:
    """`oarlock serve` in a process of its own, up when the constructor returns."""

    def __init__(self, flags: list[str], core: str | None) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        env = {**os.environ, **({"PYTHONPATH": core} if core else {})}
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "oarlock.cli.main", "serve", *flags, "--port", str(port)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                urllib.request.urlopen(self.url + "/health").read()
                break
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {self.process.returncode}") from None
                time.sleep(0.2)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def load(url: str, streams: int, tokens: int, seed: int) -> dict[str, float]:
    """The figures of one run of `oarlock bench serve`: so many requests at once, all with answers of full length."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        flags = f"--num-prompts {streams} --max-concurrency {streams} --input-len 16 --output-len {tokens} --ignore-eos --seed {seed}"
        subprocess.run([BIN / "oarlock", "bench", "serve", "--url", url, *flags.split(), "--json", file], check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def shares(stacks: str) -> tuple[float, float, float]:
    """Percentages of the main thread's samples, those that wait for requests left out: kernels, glue, engine."""
    count = {"kernels": 0, "glue": 0, "engine": 0}
    for line in stacks.splitlines():
        stack, _, samples = line.rpartition(" ")
        leaf = stack.rpartition(";")[2]
        if "EngineProcess.run" not in stack or "Poller.poll" in leaf:
            continue
        part = "kernels" if leaf.startswith("OpOverload.__call__") else "glue" if "ProgramSpec.pure" in stack else "engine"
        count[part] += int(samples)
    whole = max(1, sum(count.values()))
    return 100 * count["kernels"] / whole, 100 * count["glue"] / whole, 100 * count["engine"] / whole


def measure(server: Server, streams: int, tokens: int, seed: int, profile: bool) -> dict[str, float]:
    pid, sampler = server.process.pid, None
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        if profile:
            command = [BIN / "py-spy", "record", "-p", str(child_of(pid)), "-f", "raw", "-o", raw, "-r", "100", "-d", "600", "--nonblocking"]
            sampler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.5)
        before, counted = cpu_ms(pid), metrics(server.url)
        figures = load(server.url, streams, tokens, seed)
        api, now = cpu_ms(pid) - before, metrics(server.url)
        parts = (float("nan"),) * 3
        if sampler is not None:
            sampler.send_signal(signal.SIGINT)
            sampler.wait()
            parts = shares(raw.read_text())
    made, steps, seconds = (now[n] - counted.get(n, 0.0) for n in ("oarlock_engine_tokens_total", "oarlock_steps_total", "oarlock_step_seconds_total"))
    return dict(zip(FIGURES, (figures["output_tokens_per_s"], api / made, api / steps, 1e3 * seconds / steps, *parts), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--core", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("flags", nargs="+", help="of oarlock serve, after --")
    arguments = parser.parse_args()
    if arguments.profile and not shutil.which("py-spy", path=BIN):
        raise SystemExit("--profile: py-spy is not installed")
    cores = [name.partition("=")[::2] for name in arguments.core] or [("", "")]
    found: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for repeat in range(arguments.rounds):
        for name, folder in cores if repeat % 2 == 0 else cores[::-1]:
            server = Server(arguments.flags, folder or None)
            try:
                load(server.url, 2, 8, 0)
                for streams in map(int, arguments.streams.split(",")):
                    found[name, streams].append(measure(server, streams, arguments.tokens, repeat, arguments.profile))
            finally:
                server.close()
    print("|", " | ".join(("core", "streams", *FIGURES)), "|")
    for (name, streams), rows in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        columns = [[row[figure] for row in rows] for figure in FIGURES]
        cells = [f"{statistics.median(c):.3g} [{min(c):.3g}..{max(c):.3g}]" for c in columns]
        print("|", " | ".join((name, str(streams), *cells)), "|")


if __name__ == "__main__":
    main()
