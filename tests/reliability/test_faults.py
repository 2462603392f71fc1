"""Faults, one by one, in a real server or in its parts: what the client is told, what goes on, and that nobody waits for ever.

docs/reliability.md has the table of all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty_device import AFTER, TOKEN, install
from oarlock.config.sections import ServerConfig
from oarlock.server import connection
from oarlock.server.http import HttpServer
from real_server import RealServer, ok, wait_until
from test_security import whole_server
from tiny_model import make_tiny_model
from toy_frontend import ToyTokenizer, says
from toy_server import MODEL, events, refused, toy_server

CMP, CHT = "/v1/completions", "/v1/chat/completions"
GOOD = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("faulty"))


@pytest.fixture
def start(model: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RealServer]]:
    """Servers over the faulty device."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")])))
    with contextlib.ExitStack() as stack:

        def make(*flags: str, seats: int = 2) -> RealServer:
            every = ("--device", "null", "--max-num-seqs", str(seats), *flags)
            return stack.enter_context(RealServer(model, *every, log=tmp_path / "server.log", defaults=()))

        yield make


class Asked:
    """One request in a thread of its own: the response, or its events, or what the connection said."""

    def __init__(self, server: RealServer, prompt: list[int], *, stream: bool = False, **fields: Any) -> None:
        self.body = server.cmp_body(**{"prompt": prompt, "max_tokens": 40, "ignore_eos": True, **fields})
        self.stream, self.result = stream, None
        self._server = server
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if not self.stream:
                self.result = self._server.post(CMP, self.body)
            else:
                with self._server.http.stream("POST", CMP, json={**self.body, "stream": True}) as response:
                    response.read()
                    self.result = response
        except httpx.TransportError as error:
            self.result = error

    def answer(self, timeout_s: float = 10.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "nobody was told anything"
        return self.result

    def end(self, timeout_s: float = 10.0) -> tuple[int, str]:
        """(status, code) of how it ended: in a stream, of its last event. Exactly one end."""
        response = self.answer(timeout_s)
        if not self.stream or response.status_code != 200:
            return response.status_code, (response.json().get("error") or {}).get("code", "")
        payloads = events(response)
        assert payloads.count("[DONE]") == 1 and payloads[-1] == "[DONE]"
        errors = [payload["error"] for payload in payloads[:-1] if "error" in payload]
        reasons = [choice["finish_reason"] for payload in payloads[:-1] for choice in payload.get("choices", ()) if choice["finish_reason"]]
        assert len(errors) + len(reasons) == 1
        return (500 if errors[0]["type"] == "server_error" else 400, errors[0]["code"]) if errors else (200, reasons[0])


STEP_FAULTS = ("raises", "raises late", "no memory on the device", "no memory on the host")


def test_step_that_fails_ends_its_own_requests_and_nobody_elses(start: Callable[..., RealServer]) -> None:
    """Two seats: the faulty request and a stream run in one step, a third waits. After each fault the same server serves as before."""
    server = start()
    before = ok(server.post(CMP, server.cmp_body(prompt=GOOD, max_tokens=8)))["choices"]
    for fault in STEP_FAULTS:
        beside = Asked(server, GOOD, stream=True, max_tokens=1500)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1, 5)
        broken = Asked(server, [TOKEN[fault], 5])
        waiting = [Asked(server, [9, 9]), Asked(server, [8, 8], stream=True)]
        assert broken.end() == (500, "step_failed"), fault
        assert "secret" not in broken.answer().text
        assert beside.end() == (500, "step_failed"), fault
        assert [each.end() for each in waiting] == [(200, ""), (200, "length")]
        assert server.http.get("/health").status_code == 200
        assert ok(server.post(CMP, server.cmp_body(prompt=GOOD, max_tokens=8)))["choices"] == before
    server.kv_idle()
    counts = server.http.get("/metrics").text
    assert f'outcome="error"}} {2.0 * len(STEP_FAULTS)}' in counts


def test_row_that_is_not_finite_ends_its_own_request_alone(start: Callable[..., RealServer]) -> None:
    server = start()
    for fault, status in (("not finite", 400), ("no answer for a row", 500)):
        for stream in (False, True):
            beside = Asked(server, GOOD, stream=True, max_tokens=200)
            broken = Asked(server, [TOKEN[fault], 5], stream=stream)
            assert broken.end()[0] == status
            assert beside.end() == (200, "length")
    shown = ok(server.post(CMP, server.cmp_body(prompt=[TOKEN["not finite logprobs"], 5], max_tokens=AFTER + 3, logprobs=1, ignore_eos=True)))
    assert None in shown["choices"][0]["logprobs"]["token_logprobs"]  # finite or null, as JSON has nothing else
    server.kv_idle()


def test_device_that_is_lost_ends_the_engine_for_all_at_once(start: Callable[..., RealServer]) -> None:
    for fault in ("canary fails", "ends"):
        server = start(seats=4)
        open_ones = [Asked(server, GOOD, stream=True, max_tokens=1500), Asked(server, [TOKEN[fault], 5]), Asked(server, [9, 9], max_tokens=1500)]
        started = time.monotonic()
        ends = [each.end(5.0) for each in open_ones]
        assert all(status in (500, 503) for status, _ in ends), (fault, ends)
        assert time.monotonic() - started < 5
        with contextlib.suppress(httpx.TransportError):  # it may have gone by now
            assert server.http.get("/health").status_code == 503
        assert server.wait_exit(10) == 1
        server.wait_no_process(5)


def test_step_that_never_ends_shows_in_health_and_a_drain_ends_it(start: Callable[..., RealServer]) -> None:
    server = start("--stall-time", "1", "--drain-grace", "1", seats=4)
    open_ones = [Asked(server, [TOKEN["hangs"], 5]), Asked(server, GOOD, stream=True), Asked(server, [9, 9])]
    wait_until(lambda: server.http.get("/health").status_code == 503, 5)
    assert server.http.get("/health").json()["error"]["code"] == "engine_stalled"
    os.kill(server.pid, signal.SIGTERM)
    ends = [each.end(6.0) for each in open_ones]
    assert all(end in ((503, "shutting_down"), (500, "shutting_down")) for end in ends), ends
    assert server.wait_exit(10) == 0
    server.wait_no_process(5)


# ---------------------------------------------------------------- the front end's own
class Panic(BaseException):
    """As a library written in Rust raises it: no Exception."""


class FailingTokenizer(ToyTokenizer):
    """Fails at texts with an X: when it reads one, and when it writes one."""

    error: BaseException = ValueError("no tokens for this")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if "X" in text:
            raise self.error
        return super().encode(text, add_special_tokens)

    def make_stream(self, *arguments: Any, **settings: Any) -> Any:
        stream, error = super().make_stream(*arguments, **settings), self.error
        step, flush = stream.step, stream.flush

        def failing(ids: list[int]) -> str:
            if ord("X") in ids:
                stream.flush = lambda: failing([ord("X")])
                raise error
            return step(ids)

        stream.step, stream.flush = failing, flush
        return stream


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ValueError("no tokens"), Panic("index out of bounds")], ids=["exception", "panic"])
async def test_tokenizer_that_fails_at_a_prompt_fails_that_request(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingTokenizer, "error", error)
    async with toy_server(says("hello"), tokenizer=FailingTokenizer()) as toy:
        others = [asyncio.create_task(toy.completion(prompt="fine", stream=stream)) for stream in (False, True)]
        for fields in ({}, {"stream": True}, {"prompt": ["a", "X"]}, {"prompt": ["a", "X"], "stream": True}, {"prompt": "X" * 200_000}):
            async with asyncio.timeout(5):
                found = refused(await toy.completion(**{"prompt": "aX", **fields}), None if "XXX" not in str(fields) else "prompt", 500 if "XXX" not in str(fields) else 400)
            assert "no tokens" not in found["message"] and "bounds" not in found["message"]
        for path, body in (("/tokenize", {"prompt": "X"}), (CHT, {"model": MODEL, "messages": [{"role": "user", "content": "X"}]})):
            refused(await toy.http.post(path, json=body), None, 500)
        assert [(await other).status_code for other in others] == [200, 200]
        assert toy.state.num_prompts == 0 and not toy.engine.open


@pytest.mark.asyncio
async def test_tokenizer_that_fails_at_a_prompt_of_another_routes_fails_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("no tokens"), Panic("index out of bounds")):
        monkeypatch.setattr(ToyTokenizer, "encode", lambda *arguments, error=error, **settings: (_ for _ in ()).throw(error))
        async with whole_server() as toy:
            for path, body in (("/v1/responses", {"model": MODEL, "input": "X"}), ("/v1/messages", {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "X"}]})):
                for stream in (False, True):
                    async with asyncio.timeout(5):
                        assert (await toy.http.post(path, json={**body, "stream": stream})).status_code == 500
            assert toy.state.num_prompts == 0


@pytest.mark.asyncio
async def test_tokenizer_that_fails_at_an_answer_fails_that_request() -> None:
    """And not the front end, which reads every other answer in the same place."""
    async with toy_server(lambda request, index: [97, 97, ord("X"), 97] if request.prompt_token_ids[0] == 98 else [97], tokenizer=FailingTokenizer(), step_s=0.001) as toy:
        others = [asyncio.create_task(toy.completion(prompt="c", max_tokens=40, stream=stream)) for stream in (False, True)]
        for fields in ({}, {"n": 3, "temperature": 1}, {"stop": "aXa"}):
            refused(await toy.completion(prompt="b", max_tokens=9, **fields), None, 500)
        payloads = events(await toy.completion(prompt="b", max_tokens=9, stream=True))
        assert payloads[-1] == "[DONE]" and payloads[-2]["error"]["code"] == "step_failed"
        assert [(await other).status_code for other in others] == [200, 200]
        async with asyncio.timeout(5):
            while toy.engine.open:
                await asyncio.sleep(0.01)
        assert toy.state.num_prompts == 0 and len(toy.state.llm._outputs) == 0


@pytest.mark.asyncio
async def test_client_that_never_reads_frees_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.3)
    async with toy_server(lambda request, index: [97], max_model_len=1 << 20, step_s=0.0002) as toy:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = HttpServer(toy.app, ServerConfig())
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            client = socket.socket()
            for end, option in ((sock, socket.SO_SNDBUF), (client, socket.SO_RCVBUF)):
                end.setsockopt(socket.SOL_SOCKET, option, 4096)  # or megabytes are on their way before anybody waits
            client.connect(sock.getsockname())
            _, writer = await asyncio.open_connection(sock=client, limit=1 << 10)
            body = b'{"model":"%b","prompt":"x","max_tokens":1000000,"ignore_eos":true,"stream":true,"logprobs":5}' % MODEL.encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(20):
                while not toy.engine.open:
                    await asyncio.sleep(0.01)
                while toy.engine.open or toy.state.open:  # until its buffers are full, and then as long as the server's patience
                    await asyncio.sleep(0.05)
            assert toy.state.num_prompts == 0 and 'outcome="abort"} 1.0' in toy.state.metrics.page().decode()
            writer.transport.abort()
            server.finish()
            await serving


@pytest.mark.asyncio
async def test_template_that_fails_at_a_message_is_the_messages_fault() -> None:
    class Tokenizer(ToyTokenizer):
        chat_template = "{% for m in messages %}{{ 1 // (m.content | length - 3) }}{{ m.content.upper() }}{{ m.name.x.y }}{% endfor %}"

    async with toy_server(says("hello"), tokenizer=Tokenizer()) as toy:
        for message in ({"role": "user", "content": "abc"}, {"role": "user", "content": "ab", "name": "n"}):
            response = await toy.http.post(CHT, json={"model": MODEL, "messages": [message]})
            assert response.status_code == 400, response.text


# ---------------------------------------------------------------- the system's
@pytest.mark.parametrize("kind", ["full disk", "reader that went"])
def test_log_that_cannot_be_written_is_no_reason_to_stop(kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RealServer(model, "--device", "null", log=tmp_path / "none", defaults=())
    if kind == "full disk":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        read, target = os.pipe()
        os.close(read)
    monkeypatch.setattr(RealServer, "output", lambda self: "")
    monkeypatch.setattr(Path, "open", lambda self, mode="r", *rest: os.fdopen(os.dup(target), "wb"))
    try:
        server.launch()
    finally:
        monkeypatch.undo()
        os.close(target)
    try:
        server.wait_ready()
        assert server.http.post(CMP, content=b"\x00" * 10, headers={"Content-Type": "application/json"}).status_code == 400
        server.alive()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit(10) == 0
    finally:
        server.http.close()
        server.kill()


def test_descriptors_that_run_out_are_waited_for(model: Path, tmp_path: Path) -> None:
    with RealServer(model, "--device", "null", log=tmp_path / "server.log", defaults=()) as server:
        before = server.alive()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (100, 100))
        idle = []
        with contextlib.suppress(OSError):
            for _ in range(300):
                idle.append(socket.create_connection(("127.0.0.1", server.port), timeout=2))
        time.sleep(0.5)
        assert server.process is not None and server.process.poll() is None
        for sock in idle:
            sock.close()
        wait_until(lambda: _is_healthy(server), 10)
        server.alive(before)
        server.kv_idle()


def _is_healthy(server: RealServer) -> bool:
    try:
        return httpx.get(f"{server.base_url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
