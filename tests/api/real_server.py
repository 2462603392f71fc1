"""A real `oarlock serve` process on a free port, and the macros of bank.yaml against it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tied import tied
from toy_server import refused, strict

START_S = 120.0
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
FLAGS = ("--dtype", "float32", "--max-num-seqs", "32", "--kv-cache-memory", "64MiB", "--threads", "1")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def null_server(model: str | Path, key: str, *flags: str, log: Path) -> Iterator[RealServer]:
    """A server of the null device whose own client has the key."""
    flags = ("--device", "null", "--served-model-name", "tiny", "--api-key", key, *flags)
    with RealServer(model, *flags, log=log, defaults=()) as started:
        started.http.headers["Authorization"] = f"Bearer {key}"
        yield started


@contextlib.contextmanager
def openai_client(server: RealServer, key: str) -> Iterator[Any]:
    """OpenAI's own client, and afterwards no block that is still held."""
    import openai  # slow, and few ask for it

    with openai.OpenAI(api_key=key, base_url=f"{server.base_url}/v1", max_retries=0) as made:
        yield made
    server.kv_idle()


class RealServer:
    """One server process in a session of its own. Use as a context manager."""

    def __init__(
        self, model: str | Path, *flags: str, log: Path, port: int | None = None, defaults: tuple[str, ...] = FLAGS, python: str | Path = sys.executable
    ) -> None:
        self.model, self.log = str(model), log
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.base_url, timeout=httpx.Timeout(120.0, connect=5.0))
        self._command = [str(python), "-m", "oarlock.cli.main", "serve", self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += [*defaults, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        self.kill()

    # ---------------------------------------------------------------- process
    def launch(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(tied(self._command), stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def wait_ready(self, timeout_s: float = START_S) -> None:
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output()}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready within {timeout_s} s:\n{self.output()}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def session_pids(self) -> list[int]:
        """Every living process of the server's session, itself included."""
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.pid and fields[0] != "Z":
                        pids.append(int(entry.name))
        return pids

    def lasting_pids(self) -> list[int]:
        """Without the processes of grammars, which come and go; one that is just ending has no command line any more."""
        lasting = []
        for pid in self.session_pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if command and b"oarlock_structured_output" not in command:
                    lasting.append(pid)
        return lasting

    def engine_pid(self) -> int:
        return next(pid for pid in self.session_pids() if b"oarlock.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def wait_exit(self, timeout_s: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def wait_no_process(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.session_pids():
            assert time.monotonic() < deadline, f"processes left after {timeout_s} s: {left}"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        for pid in self.session_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    # ---------------------------------------------------------------- requests
    def cmp_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": PROMPT, **fields}

    def cht_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": MESSAGES, **fields}

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def cmp(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        return ok(self.post("/v1/completions", self.cmp_body(**fields)))

    def cht(self, **fields: Any) -> dict[str, Any]:
        return ok(self.post("/v1/chat/completions", self.cht_body(**fields)))

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return ok(self.post(path, body))

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All payloads of a stream that must succeed, "[DONE]" checked and taken off."""
        payloads = list(self.iterate(path, body))
        assert payloads and payloads[-1] == "[DONE]", payloads[-3:]
        assert "[DONE]" not in payloads[:-1]
        return payloads[:-1]

    def iterate(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(f"{response.status_code}: {response.text}")
            assert response.headers["content-type"].startswith("text/event-stream")
            yield from payloads_of(response)

    def tokenize(self, **fields: Any) -> list[int]:
        return ok(self.post("/tokenize", {"model": self.model, **fields}))["tokens"]

    # ---------------------------------------------------------------- macros of the bank
    def metrics(self) -> dict[str, float]:
        """Series summed over their labels, by sample name."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def alive(self, text_before: str | None = None) -> str:
        assert self.http.get("/health", timeout=10.0).status_code == 200
        text = self.cmp(temperature=0, max_tokens=4)["choices"][0]["text"]
        assert text_before is None or text == text_before
        return text

    def kv_idle(self, timeout_s: float = 10.0) -> None:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        wait_until(lambda: all(self.metrics()[name] == 0 for name in names), timeout_s, lambda: str({n: self.metrics()[n] for n in names}))


def payloads_of(response: httpx.Response) -> Iterator[Any]:
    """The events of an open stream. Every line is valid UTF-8, every payload strict JSON without lone surrogates."""
    buffer = b""
    for piece in response.iter_raw():
        buffer += piece
        while b"\n\n" in buffer:
            event, buffer = buffer.split(b"\n\n", 1)
            line = event.decode("utf-8")
            assert line.startswith("data: "), line
            text = line.removeprefix("data: ")
            if text == "[DONE]":
                yield text
                continue
            payload = strict(text)
            text.encode("utf-8")
            assert "\\ud8" not in text.lower()
            yield payload
    assert not buffer, buffer


def wait_until(condition: Any, timeout_s: float, explain: Any = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {explain()}"
        time.sleep(0.05)


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return strict(response.text)


def is_bad_request(response: httpx.Response, param: str) -> dict[str, Any]:
    return refused(response, param)


def join(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice over all chunks."""
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in parts)


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def reasons(chunks: list[Any], index: int = 0) -> list[str]:
    """Non-null finish reasons of one choice; checks the key is in every choice and that nothing follows the end."""
    found, ended = [], False
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
            if choice["index"] != index:
                continue
            content = choice["delta"].get("content") if "delta" in choice else choice["text"]
            assert not (ended and content), "content after the finish reason"
            if choice["finish_reason"] is not None:
                assert not content, "the finish reason comes in a chunk of its own"
                found.append(choice["finish_reason"])
                ended = True
    return found
