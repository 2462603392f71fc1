"""Many mutated requests to one server, and a verdict: no 5xx, no hang, no crash, no leaked block, no growing memory.

    python tests/reliability/fuzz.py --requests 50000 --seed 1 --out docs/reliability/fuzz.null.json
    python tests/reliability/fuzz.py --seed 1 --only 17,4711      # send these again and show them

Owns: the server that is fuzzed, the pace, the judgement of each answer, the report.
Reads: `corpus`, `mutations`, `wire`.
Never: takes more than its share of a core; changes what a seed and a number stand for while it runs, known names apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit"), str(HERE.parent / "api")]

import mutations
from corpus import GENERATING, MODEL, TEMPLATE, Asked, Corpus
from oarlock.conformance.provenance import commit
from real_server import FLAGS, RealServer
from tiny_model import make_tiny_model
from wire import WAYS, Answer, Closed, Link, Message, NoHttp
from wire import plain as plain_way

WORKERS = 12
SHARE = 0.25  # of one core
HANG_S = 40.0
SLOW_HEALTH_S = 5.0
MAX_DEFECTS = 50
MAX_SLOPE = 1024.0  # bytes of memory a request over the last half
JUDGED_FROM = 20_000  # requests; before that, stores and the allocator's pools are still filling up
SERVER = (
    "--served-model-name", MODEL, "--max-num-seqs", "16", "--num-blocks-override", "400", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    "--responses-max-stored", "40", "--batches-max-files", "30", "--batches-max-batches", "10", "--max-body-bytes", "1MiB", "--grammar-time", "2",
)  # fmt: skip
MAY_CLOSE = frozenset({"half_closed", "half_closed_body", "many_headers", "odd_headers", "wrong_length", "no_http"})


@contextlib.contextmanager
def fuzzed_server(device: str, folder: Path) -> Iterator[RealServer]:
    """A server whose model knows tools, with small stores and a small cache, so that all of them fill up."""
    model = make_tiny_model(folder / "tiny", template=TEMPLATE)
    defaults = () if device == "null" else FLAGS
    with RealServer(model, "--device", device, *SERVER, log=folder / "server.log", defaults=defaults) as server:
        server.model = MODEL
        yield server


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def slope(samples: Sequence[tuple[int, int]]) -> float:
    """Bytes a request, by least squares over (requests, bytes)."""
    mean_x, mean_y = (sum(values) / len(samples) for values in zip(*samples, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


@dataclass
class Tally:
    """What has happened so far."""

    asked: int = 0
    reached: int = 0  # requests that the engine answered; those it answered nobody, or refused, are not in it
    outcomes: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)  # requests so far, bytes of the API process, of all others
    slowest_s: float = 0.0
    slowest_health_s: float = 0.0

    def defect(self, index: int | None, text: str) -> None:
        if len(self.defects) < MAX_DEFECTS:
            self.defects.append(text if index is None else f"request {index}: {text}")


def make(seed: int, index: int, corpus: Corpus) -> tuple[Asked, Message, str, Any, random.Random]:
    """(what was asked, what is sent, the way's name, the way, the rest of its luck)."""
    rng = random.Random(f"{seed}-{index}")
    asked = corpus.ask(rng)
    (way,) = rng.choices([way for _, way in WAYS], [weight for weight, _ in WAYS])
    body = asked.body
    if asked.fields is not None:
        tree = copy.deepcopy(asked.fields)
        if rng.random() < 0.5:
            mutations.vary_texts(tree, rng)
        else:
            mutations.mutate(tree, rng, rng.choice((1, 1, 1, 2, 2, 4)))
        body = mutations.encode(tree, rng)
    if rng.random() < 0.05 or (asked.fields is None and body and rng.random() < 0.3):
        body = mutations.spoil(body, rng)
    kind = asked.content_type if rng.random() < 0.985 else rng.choice(("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=latin-1"))
    headers = [(b"content-type", kind.encode())] if body or rng.random() < 0.5 else []
    return asked, Message(asked.method.encode(), asked.path.encode("utf-8", "surrogatepass"), headers, body), way.__name__, way, rng


def fault(asked: Asked, answer: Answer) -> str:
    """What is wrong with an answer; "" for nothing."""
    if answer.status >= 500:
        return f"{answer.status}: {answer.body[:300]!r}"
    if b"x-request-id" not in answer.headers:
        return f"{answer.status} without X-Request-Id"
    if answer.status >= 400 and asked.method != "HEAD":
        error = error_of(answer)
        if not isinstance(error.get("message"), str) or not error["message"]:
            return f"{answer.status} without the envelope: {answer.body[:200]!r}"
        if "Traceback" in error["message"] or " object at 0x" in error["message"] or "/site-packages/" in error["message"]:
            return f"{answer.status} shows the inside: {error['message'][:300]}"
    if answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        if b'"server_error"' in answer.body or b'"api_error"' in answer.body:
            return f"an error of the server's in a stream: {answer.body[-400:]!r}"
        if asked.path in GENERATING[:2] and not answer.body.endswith(b"data: [DONE]\n\n"):
            return f"a stream without its end: {answer.body[-200:]!r}"
    return ""


def error_of(answer: Answer) -> dict[str, Any]:
    try:
        error = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


class Fuzz:
    """One run against one server."""

    def __init__(self, server: RealServer, seed: int, pause: Path | None = None) -> None:
        self.server, self.seed, self.pause = server, seed, pause
        self.tally = Tally()
        self.corpus = Corpus(server.http.get("/openapi.json").json())
        self._pids = server.lasting_pids()
        self._idle_links: list[Link] = []
        self._started, self._used = time.monotonic(), time.process_time()

    # ---------------------------------------------------------------- one request
    async def send(self, index: int) -> tuple[Asked, Message, str, Answer | None]:
        asked, message, name, way, rng = make(self.seed, index, self.corpus)
        self.tally.ways[name] += 1
        self.tally.routes[_route(asked.path)] += 1
        started = time.monotonic()
        answer, outcome = None, ""
        for attempt in (0, 1):
            link, fresh = await self._link(fresh=attempt > 0 or name not in ("plain", "chunked", "slow", "pipelined"))
            try:
                async with asyncio.timeout(HANG_S):
                    answer = await way(link, message, rng)
                outcome = "left" if answer is None else ""
            except TimeoutError:
                outcome = "hang"
                self.tally.defect(index, f"no answer within {HANG_S:g} s ({name} {asked.path})")
            except NoHttp as error:
                outcome = "no HTTP"
                self.tally.defect(index, f"an answer that is no HTTP: {error} ({name} {asked.path})")
            except Closed:
                outcome = "closed"
                if name not in MAY_CLOSE:
                    link.close()
                    if not fresh:
                        continue  # the server had closed the idle connection
                    self.tally.defect(index, f"the connection was closed without an answer ({name} {asked.path})")
            if outcome or link.spent:
                link.close()
            else:
                self._idle_links.append(link)
            break
        if answer is not None:
            outcome = self._judge(index, asked, name, answer)
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - started)
        self.tally.outcomes[outcome] += 1
        self.tally.asked += 1
        return asked, message, name, answer

    async def _link(self, *, fresh: bool) -> tuple[Link, bool]:
        while self._idle_links and not fresh:
            link = self._idle_links.pop()
            if not link.reader.at_eof():
                return link, False
            link.close()
        return await Link.open(self.server.port), True

    def _judge(self, index: int, asked: Asked, name: str, answer: Answer) -> str:
        problem = fault(asked, answer)
        if problem and not (name == "no_http" and "without the envelope" in problem):
            self.tally.defect(index, f"{problem} ({name} {asked.method} {asked.path[:80]})")
        if answer.status == 200 and asked.path in GENERATING and asked.method == "POST":
            self.tally.reached += 1
        if answer.status == 200 and answer.headers.get(b"content-type") == b"application/json":
            with contextlib.suppress(ValueError):
                self.corpus.known.learn(json.loads(answer.body))
        code = error_of(answer).get("code") if answer.status >= 400 else None
        return f"{answer.status}{f' {code}' if code else ''}"

    # ---------------------------------------------------------------- all of them
    async def run(self, first: int, count: int) -> None:
        """Send requests `first` to `first + count - 1`, several at once, at a pace that leaves the cores to the server."""
        numbers = iter(range(first, first + count))
        watcher = asyncio.create_task(self._watch_health())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._work(numbers, max(1, count // 400)))
        finally:
            watcher.cancel()
            for link in self._idle_links:
                link.close()
            self._idle_links.clear()

    async def _work(self, numbers: Iterator[int], sample_every: int) -> None:
        for index in numbers:
            while self.pause is not None and self.pause.exists():
                await asyncio.sleep(1)
                self._started += 1
            if self.server.process is not None and self.server.process.poll() is not None:
                self.tally.defect(index, "the server has ended")
                return
            await self.send(index)
            if self.tally.asked % sample_every == 0:
                own = resident_bytes(self.server.pid)
                self.tally.memory.append((self.tally.asked, own, sum(map(resident_bytes, self._pids)) - own))
            ahead = (time.process_time() - self._used) / SHARE - (time.monotonic() - self._started)
            if ahead > 0:
                await asyncio.sleep(ahead)

    async def _watch_health(self) -> None:
        message = Message(b"GET", b"/health", [], b"")
        while True:
            started = time.monotonic()
            link = await Link.open(self.server.port)
            answer = await plain_way(link, message, random.Random(0))
            link.close()
            took = time.monotonic() - started
            self.tally.slowest_health_s = max(self.tally.slowest_health_s, took)
            if answer is None or answer.status != 200 or took > SLOW_HEALTH_S:
                self.tally.defect(None, f"/health took {took:.1f} s: {answer}")
            await asyncio.sleep(0.2)

    def core_share(self) -> float:
        return (time.process_time() - self._used) / (time.monotonic() - self._started)

    def settle(self) -> None:
        """After the last request: nothing runs, no block is held, the same processes are there, and the log has no error."""
        self._wait_idle()
        if sorted(self.server.lasting_pids()) != sorted(self._pids):
            self.tally.defect(None, "a process of the server ended or was started anew")
        for line in self.server.output().splitlines():
            if "Traceback" in line or " error   " in line or "Task exception" in line:
                self.tally.defect(None, f"in the server's log: {line[:300]}")

    def _wait_idle(self, timeout_s: float = 60.0) -> None:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "oarlock_kv_blocks_used")
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.server.metrics()
            left = {name: now[name] for name in names if now[name]}
            if not left:
                return
            if time.monotonic() > deadline:
                self.tally.defect(None, f"not idle after {timeout_s:g} s: {left}")
                return
            time.sleep(0.2)

    def report(self) -> dict[str, Any]:
        """Everything that a reader may want to know of the run."""
        tally = self.tally
        half = [sample for sample in tally.memory if sample[0] >= tally.asked / 2]
        rises = [slope([(n, (api, rest)[at]) for n, api, rest in half]) if len(half) > 2 else 0.0 for at in (0, 1)]
        return {
            "seed": self.seed,
            "commit": commit([HERE.parent.parent]),
            "requests": tally.asked,
            "reached_engine": round(tally.reached / max(1, tally.asked), 4),
            "fuzzer_share_of_a_core": round(self.core_share(), 3),
            "seconds": round(time.monotonic() - self._started, 1),
            "memory_slope_bytes_a_request": {"api": round(rises[0], 1), "engine": round(rises[1], 1), "both": round(sum(rises), 1)},
            "memory_mib": [[n, api >> 20, rest >> 20] for n, api, rest in tally.memory[:: max(1, len(tally.memory) // 20)]],
            "slowest_request_s": round(tally.slowest_s, 2),
            "slowest_health_s": round(tally.slowest_health_s, 3),
            "defects": tally.defects,
            "outcomes": dict(tally.outcomes.most_common()),
            "routes": dict(tally.routes.most_common()),
            "ways": dict(tally.ways.most_common()),
        }


def _route(path: str) -> str:
    """The route's name, what is chosen by chance left out."""
    parts = path.partition("?")[0].split("/")
    known = {"v1", "completions", "chat", "responses", "messages", "count_tokens", "files", "batches", "cancel", "content", "models", "tokenize", "detokenize", "embeddings"}
    shown = "/".join(part if part in known else "…" for part in parts[1:])
    return "/" + shown if parts[1:] and parts[1] in known else "other"


async def show(fuzz: Fuzz, numbers: Sequence[int]) -> None:
    for number in numbers:
        asked, message, name, answer = await fuzz.send(number)
        print(f"--- {number}: {name} {asked.method} {asked.path}\n{message.whole()[:2000]!r}\n{answer}")


def main() -> int:
    """0: nothing was found."""
    parser = argparse.ArgumentParser(description="Fuzz a server of the tiny model.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="null")
    parser.add_argument("--out", type=Path, help="where the report goes; else it is printed")
    parser.add_argument("--only", help="numbers with commas: send these and show them")
    parser.add_argument("--pause", type=Path, help="send nothing while this file exists")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fuzzed_server(given.device, Path(folder)) as server:
        before = server.alive()
        fuzz = Fuzz(server, given.seed, given.pause)
        if given.only:
            asyncio.run(show(fuzz, [int(number) for number in given.only.split(",")]))
            return 0
        asyncio.run(fuzz.run(0, given.requests))
        report = fuzz.report()  # before the wait for what is left
        fuzz.settle()
        if server.alive() != before:
            fuzz.tally.defect(None, "the same request has another answer than before")
        rise = report["memory_slope_bytes_a_request"]["both"]
        if rise > MAX_SLOPE and given.requests >= JUDGED_FROM:
            fuzz.tally.defect(None, f"memory grows by {rise:.0f} bytes a request over the last half")
        report = {"device": given.device, **report, "defects": fuzz.tally.defects}
        text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(report, indent=1, ensure_ascii=False)) + "\n"
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(text, encoding="utf-8")
        print(text if not given.out else "\n".join(report["defects"]) or f"{report['requests']} requests, no defect; {given.out}")
        if fuzz.tally.defects:
            (Path(tempfile.gettempdir()) / "fuzz-server.log").write_text(server.output(), encoding="utf-8")
    return 1 if report["defects"] else 0


if __name__ == "__main__":
    sys.exit(main())
