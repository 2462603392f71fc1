"""A real `oarlock serve` process on a free port of the loopback, and a small client of the standard library.

Owns: the process, its log, requests and streams.
Reads: `executor.parent` (in the child).
Never: outlives this process; imports what only the server needs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oarlock.conformance.cases import CheckFailed

START_S, END_S, ANSWER_S = 240.0, 45.0, 120.0
NAME = "tiny"
_CHILD = """
import sys
from oarlock.executor.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
from oarlock.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # finish reasons; exactly one in a good answer


@dataclass
class Answer:
    """What one request got."""

    status: int
    body: Any = None  # of an answer in one piece
    choices: dict[int, Choice] = field(default_factory=dict)

    def add(self, choice: dict[str, Any]) -> None:
        """One choice of a body, or one chunk of a stream.

        Raises:
            CheckFailed: something came after the end of the choice.
        """
        found = self.choices.setdefault(choice["index"], Choice())
        if found.ends and (choice["text"] or choice.get("token_ids")):
            raise CheckFailed(f"choice {choice['index']} goes on after its finish_reason")
        found.text += choice["text"]
        found.token_ids += choice.get("token_ids") or []
        found.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        if choice["finish_reason"] is not None:
            found.ends.append(choice["finish_reason"])


class Server:
    """One process. `start` waits until it is ready; `end` asks it to stop and says how it did."""

    def __init__(self, model: Path, flags: Sequence[str], log: Path) -> None:
        self.model, self.flags, self.log = model, list(flags), log
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Returns the seconds until /health answered.

        Raises:
            CheckFailed: it ended, or was not ready in time; with the end of its log.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", str(self.model), "--served-model-name", NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.flags]
        started = time.monotonic()
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        while time.monotonic() < started + START_S:
            if self.process.poll() is not None:
                raise CheckFailed(f"oarlock serve ended with {self.process.returncode}: {self.last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health", timeout_s=5.0)[0] == 200:
                    return time.monotonic() - started
            time.sleep(0.05)
        self.kill()
        raise CheckFailed(f"oarlock serve was not ready within {START_S:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "it said nothing"

    def end(self) -> int:
        """SIGTERM, and the exit code.

        Raises:
            CheckFailed: it did not end.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CheckFailed(f"oarlock serve did not end within {END_S:.0f} s of SIGTERM") from None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    # ---------------------------------------------------------------- requests
    def request(self, method: str, path: str, body: Any = None, timeout_s: float = ANSWER_S) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def complete(self, **fields: Any) -> Answer:
        """A completion, in one piece or as a stream, with the token ids.

        Raises:
            CheckFailed: a stream that does not end with exactly one [DONE].
        """
        body = {"model": NAME, "return_token_ids": True, **fields}
        if body.get("stream"):
            answer = Answer(200)
            payloads = list(self.events(body, answer))
            if answer.status != 200:
                return answer
            if payloads.count("[DONE]") != 1 or payloads[-1] != "[DONE]":
                raise CheckFailed(
                    f"a stream must end with one [DONE]; it had {payloads.count('[DONE]')}, its last event was {payloads[-1:]}"
                )
            for payload in payloads[:-1]:
                event = json.loads(payload)
                if "choices" not in event:
                    raise CheckFailed(f"a stream carried {payload[:300]}")
                for choice in event["choices"]:
                    answer.add(choice)
            return answer
        status, text = self.request("POST", "/v1/completions", body)
        answer = Answer(status, json.loads(text))
        for choice in answer.body.get("choices", ()):
            answer.add(choice)
        return answer

    def events(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        """The payloads of a stream as they come; closing the iterator hangs up. `answer.status` is set before the first."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps({"model": NAME, **body, "stream": True}), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            answer.status = response.status
            if response.status != 200:
                answer.body = json.loads(response.read())
                return
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Series of /metrics, summed over their labels; with the outcome label kept as name:outcome."""
        found: dict[str, float] = {}
        for line in self.request("GET", "/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                outcome = labels.partition('outcome="')[2].partition('"')[0]
                for key in {name, f"{name}:{outcome}" if outcome else name}:
                    found[key] = found.get(key, 0.0) + float(value)
        return found

    def wait_idle(self, within_s: float) -> None:
        """Raises CheckFailed unless every block is free and nothing runs or waits within so many seconds."""
        names = ("oarlock_kv_blocks_used", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped")
        deadline = time.monotonic() + within_s
        while True:
            now = self.metrics()
            held = {name: now[name] for name in names if now[name]}
            if not held:
                return
            if time.monotonic() > deadline:
                raise CheckFailed(
                    f"{within_s:.0f} s after the last request was over, {', '.join(f'{n} is {v:.0f}' for n, v in held.items())}"
                )
            time.sleep(0.02)
