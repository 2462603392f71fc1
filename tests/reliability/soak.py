"""Many short requests to one server of the null device, each answer held against arithmetic: memory stays flat, health stays quick, nothing is left.

    python tests/reliability/soak.py --requests 100000 --out docs/reliability/soak.json

Owns: the load, the expected answers, the report.
Reads: `wire`, `fuzz` (the measures of memory).
Never: sends what the server may refuse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit"), str(HERE.parent / "api")]

from fuzz import resident_bytes, slope
from oarlock.conformance.null_answers import answer
from oarlock.conformance.provenance import commit
from real_server import RealServer
from tiny_model import make_tiny_model
from wire import Closed, Link, Message, plain

WORKERS = 32
MODEL = "tiny"
FLAGS = ("--device", "null", "--served-model-name", MODEL, "--max-num-seqs", "32", "--responses-max-stored", "100", "--num-blocks-override", "2000")
MAX_SLOPE = 256.0  # bytes a request over the last half
JUDGED_FROM = 20_000
HEALTH_S = 0.1
JSON = [(b"content-type", b"application/json")]


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def make(index: int, vocab_size: int) -> tuple[str, dict[str, Any], list[int]]:
    """(path, body, the tokens of the answer), by the request's number."""
    rng = random.Random(index)
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice((1, 3, 8, 20)))]
    count = rng.choice((1, 2, 4, 8))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, "stream": index % 3 == 0}
    if index % 7 == 0:
        body |= {"n": 2, "temperature": 1}
    if index % 11 == 0:
        body["logprobs"] = 2
    return "/v1/completions", body, answer(prompt, count, vocab_size)


def tokens_of(body: bytes, choices: int) -> list[list[int]]:
    """The token ids of each choice, of a whole answer or of a stream."""
    found: list[list[int]] = [[] for _ in range(choices)]
    if body.startswith(b"{"):
        payloads = [body]
    else:
        assert body.endswith(b"data: [DONE]\n\n")
        payloads = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-2]]
    for payload in payloads:
        for choice in json.loads(payload)["choices"]:
            found[choice["index"]] += choice.get("token_ids") or []
    return found


class Soak:
    """One run against one server."""

    def __init__(self, server: RealServer, pause: Path | None = None) -> None:
        self.server, self.pause = server, pause
        self.vocab_size = json.loads(Path(server.model_folder, "config.json").read_text())["vocab_size"]  # type: ignore[attr-defined]
        self.pids = server.lasting_pids()
        self.done, self.wrong = 0, []
        self.memory: list[tuple[int, int, int]] = []
        self.health: list[float] = []
        self.seconds = 0.0

    async def run(self, count: int) -> None:
        numbers, started = iter(range(count)), time.monotonic()
        command = [sys.executable, "-S", "-E", str(HERE / "watch_health.py"), str(self.server.port)]
        pipe = asyncio.subprocess.PIPE
        watcher = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._work(numbers, max(1, count // 200)))
            self.seconds = time.monotonic() - started
            self.health = json.loads((await asyncio.wait_for(watcher.communicate(b""), 30))[0])
        finally:
            if watcher.returncode is None:
                watcher.kill()

    async def _work(self, numbers: Iterator[int], sample_every: int) -> None:
        link = await Link.open(self.server.port)
        for index in numbers:
            while self.pause is not None and self.pause.exists():
                await asyncio.sleep(1)
            path, body, expected = make(index, self.vocab_size)
            message = Message(b"POST", path.encode(), JSON, json.dumps(body).encode())
            try:
                found = await asyncio.wait_for(plain(link, message, random.Random(0)), 30)
            except Closed:  # it was idle for long
                link = await Link.open(self.server.port)
                found = await asyncio.wait_for(plain(link, message, random.Random(0)), 30)
            choices = body.get("n", 1)
            if found is None or found.status != 200 or tokens_of(found.body, choices) != [expected] * choices:
                self.wrong.append(f"request {index}: {found}")
            self.done += 1
            if self.done % sample_every == 0:
                own = resident_bytes(self.server.pid)
                self.memory.append((self.done, own, sum(map(resident_bytes, self.pids)) - own))
        link.close()

    def report(self) -> dict[str, Any]:
        half = [sample for sample in self.memory if sample[0] >= self.done / 2]
        rises = [slope([(n, (api, rest)[at]) for n, api, rest in half]) for at in (0, 1)]
        quick = sorted(self.health)
        return {
            "commit": commit([HERE.parent.parent]),
            "requests": self.done,
            "wrong": self.wrong[:20],
            "seconds": round(self.seconds, 1),
            "requests_a_second": round(self.done / self.seconds, 1),
            "memory_slope_bytes_a_request": {"api": round(rises[0], 1), "engine": round(rises[1], 1), "both": round(sum(rises), 1)},
            "memory_mib": [[n, api >> 20, rest >> 20] for n, api, rest in self.memory[:: max(1, len(self.memory) // 20)]],
            "health_ms": {
                "asked": len(quick), "median": round(1000 * statistics.median(quick), 1), "p99": round(1000 * quick[int(0.99 * len(quick))], 1), "slowest": round(1000 * quick[-1], 1),
                f"over_{HEALTH_S * 1000:.0f}": sum(each > HEALTH_S for each in quick),
            },
        }  # fmt: skip


def soaked_server(folder: Path) -> RealServer:
    """A server, not yet started, that knows where its model lies."""
    server = RealServer(make_tiny_model(folder / "tiny"), *FLAGS, log=folder / "server.log", defaults=())
    server.model_folder, server.model = folder / "tiny", MODEL  # type: ignore[attr-defined]
    return server


def main() -> int:
    """0: every answer was right and memory was flat."""
    parser = argparse.ArgumentParser(description="Soak a server of the null device.")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--out", type=Path, help="where the report goes; else it is printed")
    parser.add_argument("--pause", type=Path, help="send nothing while this file exists")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, soaked_server(Path(folder)) as server:
        server.alive()
        soak = Soak(server, given.pause)
        before = [descriptors(pid) for pid in soak.pids]
        asyncio.run(soak.run(given.requests))
        server.kv_idle()
        report = {**soak.report(), "descriptors": {"before": before, "after": [descriptors(pid) for pid in soak.pids]}}
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(report, indent=1)) + "\n"
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")
    print(text)
    grows = given.requests >= JUDGED_FROM and report["memory_slope_bytes_a_request"]["both"] > MAX_SLOPE
    return 1 if report["wrong"] or grows else 0


if __name__ == "__main__":
    sys.exit(main())
