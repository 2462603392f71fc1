"""Cases of bank.yaml: startup and shutdown."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from real_server import RealServer, free_port, wait_until
from tied import tied

CMP, CHT = "/v1/completions", "/v1/chat/completions"
NULL = ("--device", "null")  # arithmetic instead of a model: where only the server's own part is looked at


class Open:
    """Requests that run in threads while the server is stopped."""

    def __init__(self, server: RealServer, streams: int, wholes: int, max_tokens: int) -> None:
        self.results: list[Any] = []
        self._server = server
        body = server.cht_body(max_tokens=max_tokens, ignore_eos=True)
        self._threads = [threading.Thread(target=self._stream, args=(body,)) for _ in range(streams)]
        self._threads += [threading.Thread(target=self._whole, args=(body,)) for _ in range(wholes)]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == streams + wholes, 20)

    def _stream(self, body: dict[str, Any]) -> None:
        self.results.append(list(self._server.iterate(CHT, body)))

    def _whole(self, body: dict[str, Any]) -> None:
        self.results.append(self._server.post(CHT, body))

    def join(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a request hangs"
        return self.results


def stop(server: RealServer, number: int = signal.SIGTERM) -> None:
    os.kill(server.pid, number)


@pytest.mark.parametrize(
    ("send", "number"),
    [(os.kill, signal.SIGTERM), (os.kill, signal.SIGINT), (os.killpg, signal.SIGTERM), (os.killpg, signal.SIGINT)],
    ids=["term", "int", "term-group", "int-group"],
)
def test_sigterm_drain(start_server: Callable[..., RealServer], send: Callable[[int, int], None], number: int) -> None:
    server = start_server()
    opened = Open(server, streams=4, wholes=2, max_tokens=900)  # long enough that all run at once
    send(server.pid, number)
    signalled = time.monotonic()
    with httpx.Client(base_url=server.base_url) as http:  # a new connection
        try:
            wait_until(lambda: http.get("/health").status_code == 503, 5)  # a signal is taken between two requests
            assert http.post(CMP, json=server.cmp_body()).status_code == 503
        except httpx.TransportError:
            pass  # refused is as good
    for result in opened.join(30):
        if isinstance(result, list):
            assert result[-1] == "[DONE]" and "error" not in result[-2]
            assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in result[:-1]) > 200
        else:
            assert result.status_code == 200 and result.json()["usage"]["completion_tokens"] == 900
    assert server.wait_exit(35) == 0
    assert time.monotonic() - signalled < 35
    server.wait_no_process(2)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", server.port))


def test_sigterm_drain_without_grace(start_server: Callable[..., RealServer]) -> None:
    server = start_server("--drain-grace", "0")
    opened = Open(server, streams=2, wholes=2, max_tokens=1800)
    stop(server)
    for result in opened.join(5):
        if isinstance(result, list):
            assert result[-1] == "[DONE]" and result[-2]["error"]["code"] == "shutting_down"
        else:
            assert result.status_code == 503 and result.json()["error"]["code"] == "shutting_down"
    assert server.wait_exit(5) == 0
    server.wait_no_process(2)


def test_sigterm_drain_second_signal(start_server: Callable[..., RealServer]) -> None:
    server = start_server()
    hung = threading.Thread(target=lambda: _ignore(lambda: list(server.iterate(CMP, server.cmp_body(max_tokens=1900, ignore_eos=True)))))
    hung.start()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1, 20)
    stop(server)
    time.sleep(0.3)
    assert server.process is not None and server.process.poll() is None
    stop(server, signal.SIGINT)
    assert server.wait_exit(5) != 0
    server.wait_no_process(2)
    hung.join(5)


def _ignore(call: Callable[[], Any]) -> None:
    try:
        call()
    except (httpx.TransportError, AssertionError):
        pass


def test_kill_leaves_no_orphan(start_server: Callable[..., RealServer]) -> None:
    server = start_server()
    opened = threading.Thread(target=lambda: _ignore(lambda: server.cmp(max_tokens=1900, ignore_eos=True)))
    opened.start()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1, 20)
    assert len(server.session_pids()) >= 2
    stop(server, signal.SIGKILL)
    server.wait_no_process(10)
    opened.join(5)
    again = start_server(port=server.port)
    again.alive()


@pytest.mark.parametrize("depth", [1, 100], ids=["short", "too-long-for-a-socket"])
def test_kill_leaves_no_file(start_server: Callable[..., RealServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    folder = tmp_path / ("t" * depth)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    server = start_server(*NULL)
    server.cmp(max_tokens=2)
    stop(server, signal.SIGKILL)
    server.wait_no_process(10)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["int", "term", "kill"])
@pytest.mark.parametrize("engine_started", [False, True], ids=["early", "loading"])
def test_kill_leaves_no_orphan_while_loading(start_server: Callable[..., RealServer], number: int, engine_started: bool) -> None:
    server = start_server(ready=False)
    if engine_started:
        wait_until(lambda: len(server.session_pids()) >= 2, 20)
        time.sleep(0.3)
    else:
        time.sleep(0.2)
    stop(server, number)
    server.wait_exit(5)
    server.wait_no_process(10)


def test_an_engine_that_dies_while_loading_ends_the_server(start_server: Callable[..., RealServer]) -> None:
    server = start_server(ready=False)
    wait_until(lambda: len(server.session_pids()) >= 2, 20)
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait_exit(10) == 1
    server.wait_no_process(5)
    assert "signal 9" in server.output().strip().splitlines()[-1] and "Traceback" not in server.output()


def test_a_worker_that_dies_ends_every_request_and_the_server(start_server: Callable[..., RealServer]) -> None:
    server = start_server("--tensor-parallel-size", "2")
    opened = Open(server, streams=1, wholes=1, max_tokens=1800)
    engine = server.engine_pid()
    workers = [pid for pid in server.session_pids() if pid not in (server.pid, engine)]
    assert len(workers) >= 1
    os.kill(workers[-1], signal.SIGKILL)
    for result in opened.join(5):
        if isinstance(result, list):
            assert result[-1] == "[DONE]" and result[-2]["error"]["type"] == "server_error"
        else:
            assert result.status_code == 503
    assert server.wait_exit(10) == 1
    server.wait_no_process(5)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """(key, certificate) for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return key, certificate


def test_https(start_server: Callable[..., RealServer], tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    server = start_server(*NULL, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), ready=False)
    with httpx.Client(base_url=server.base_url.replace("http", "https"), verify=ssl.create_default_context(cafile=str(certificate))) as http:
        wait_until(lambda: _status(http) == 200, 60)
        body = server.cmp_body(max_tokens=3, ignore_eos=True)
        assert http.post(CMP, json=body).json()["usage"]["completion_tokens"] == 3
        assert http.post(CMP, json={**body, "stream": True}).text.endswith("data: [DONE]\n\n")
    wait_until(lambda: server.base_url.replace("http", "https") in server.output(), 2)


def test_https_that_asks_clients_for_a_certificate(start_server: Callable[..., RealServer], tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    server = start_server(*NULL, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--ssl-ca-certs", str(certificate), "--ssl-cert-reqs", "2", ready=False)
    url, known, stranger = server.base_url.replace("http", "https"), *(ssl.create_default_context(cafile=str(certificate)) for _ in range(2))
    known.load_cert_chain(certificate, key)
    with httpx.Client(base_url=url, verify=known) as http:
        wait_until(lambda: _status(http) == 200, 60)
        assert http.get("/v1/models").status_code == 200
    with httpx.Client(base_url=url, verify=stranger) as http:
        assert _status(http) == 0, "a client without a certificate is not answered"


def test_port_in_use_early(tiny_model: Path) -> None:
    for listening in (False, True):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            if listening:
                taken.listen()
            port = taken.getsockname()[1]
            started = time.monotonic()
            done = cli("serve", str(tiny_model), "--host", "127.0.0.1", "--port", str(port))
            assert done.returncode != 0 and time.monotonic() - started < 5
            lines = done.stderr.strip().splitlines()
            assert "Traceback" not in done.stderr
            assert "127.0.0.1" in lines[-1] and str(port) in lines[-1] and "uses it" in lines[-1]


def cli(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oarlock.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def copy_of(model: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(model, folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_startup_errors_readable(tiny_model: Path, tmp_path: Path) -> None:
    strange = copy_of(tiny_model, tmp_path / "strange", architectures=["NoSuchForCausalLM"])
    no_tokenizer = copy_of(tiny_model, tmp_path / "no-tokenizer")
    (no_tokenizer / "tokenizer.json").unlink()
    truncated = copy_of(tiny_model, tmp_path / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    bad_key = tmp_path / "bad.pem"
    bad_key.write_text("no certificate")
    steps: list[tuple[list[str], list[str]]] = [
        ([str(tiny_model), "--device", "none-such"], ["none-such", "cpu"]),
        ([str(strange)], ["NoSuchForCausalLM", "LlamaForCausalLM"]),
        ([str(tiny_model), "--kv-cache-memory", "64KiB"], ["needs 1.0 MiB", "available are", "--max-model-len 112"]),
        ([str(tiny_model), "--max-modl-len", "100"], ["--max-modl-len", "--max-model-len"]),
        ([str(no_tokenizer), *NULL], ["tokenizer"]),
        ([str(truncated)], ["model.safetensors"]),
        ([str(tmp_path / "nowhere")], ["nowhere"]),
        ([str(tiny_model), *NULL, "--chat-template", str(tmp_path / "no.jinja")], ["no.jinja", "--chat-template"]),
        ([str(tiny_model), *NULL, "--ssl-certfile", str(bad_key), "--ssl-keyfile", str(bad_key)], ["bad.pem", "--ssl-certfile"]),
        ([str(tiny_model), *NULL, "--middleware", "no.such.Thing"], ["no.such.Thing", "--middleware"]),
        ([str(tiny_model), "--host", "no such host"], ["no such host", "--host"]),
        ([str(tiny_model), "--uds", str(tmp_path / "no" / "folder.sock")], ["folder.sock", "--uds"]),
    ]

    def refusal(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        port = [] if "--uds" in arguments else ["--port", str(free_port())]
        return cli("serve", *arguments, *port, timeout_s=120)

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(refusal, [arguments for arguments, _ in steps]))
    for (arguments, words), ended in zip(steps, done, strict=True):
        assert ended.returncode != 0, arguments
        assert "Traceback" not in ended.stderr, ended.stderr[-2000:]
        last = ended.stderr.strip().splitlines()[-1]
        for word in words:
            assert word in last, (arguments, last)
        assert ended.stderr.count(last.partition("error: ")[2]) == 1, ended.stderr  # said once


def test_a_loading_server_says_so(start_server: Callable[..., RealServer]) -> None:
    server = start_server(ready=False)
    seen = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            response = server.http.get("/health")
        except httpx.TransportError:
            continue
        seen.add(response.status_code)
        if response.status_code == 200:
            break
        assert response.json()["error"]["code"] == "loading" and response.headers["retry-after"]
        assert server.http.post(CMP, json={}).status_code in (503, 400)  # 400: it has become ready in between
    assert seen == {200, 503}
    wait_until(lambda: "ready after" in server.output(), 2)
    (line,) = [line for line in server.output().splitlines() if "ready after" in line]
    assert server.base_url in line and server.model in line and "cpu" in line


def test_the_module_entry_point_a_unix_socket_and_json_logs(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "oarlock.sock"
    command = [sys.executable, "-m", "oarlock.entrypoints.openai.api_server", "--model", str(tiny_model), "--uds", str(path), "--log-json", *NULL]
    command += ["--served-model-name", "tiny", "--root-path", "/llm"]
    for attempt in range(2):  # the second run finds the socket file that a killed server leaves behind
        process = subprocess.Popen(tied(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=60) as http:
                wait_until(lambda http=http: path.exists() and _status(http) == 200, 60)
                assert http.get("/llm/v1/models").json()["data"][0]["id"] == "tiny"
                assert http.post(CMP, json={"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200
            for words in (["complete", "a", "--max-tokens", "2"], ["bench", "serve", "--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--id-range", "3", "300"]):
                own = subprocess.run([sys.executable, "-m", "oarlock.cli.main", *words, "--url", f"unix:{path}"], capture_output=True, text=True, timeout=60, check=False)
                assert own.returncode == 0 and own.stdout.strip(), own.stderr
        finally:
            process.send_signal(signal.SIGKILL if attempt == 0 else signal.SIGTERM)
            lines = process.communicate(timeout=20)[1].splitlines()
    assert process.returncode == 0 and not path.exists()
    assert lines and all({"time", "level", "logger", "message"} <= set(json.loads(line)) for line in lines)
    assert all(json.loads(line)["logger"].startswith("oarlock.") for line in lines), "the HTTP library's lines have our name, too"


def _status(http: httpx.Client) -> int:
    try:
        return http.get("/health").status_code
    except httpx.TransportError:
        return 0


def test_requests_are_logged_only_when_asked(start_server: Callable[..., RealServer], server: RealServer) -> None:
    server.cmp(prompt="a prompt nobody logs", max_tokens=1)
    assert "nobody logs" not in server.output()
    logging = start_server(*NULL, "--enable-log-requests", "--max-log-len", "12")
    logging.cmp(prompt="line one\nline two and much more", max_tokens=1)
    (line,) = [line for line in logging.output().splitlines() if "oarlock.server.requests" in line]
    assert "line one\\nlin" in line and "much more" not in line


def test_the_openai_client(server: RealServer) -> None:
    client = OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0)
    stream = client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == chat.choices[0].message.content
    completion = client.completions.create(model=server.model, prompt="Hi", max_tokens=5, n=2, logprobs=2, extra_body={"top_k": 5})
    assert len(completion.choices) == 2
    assert client.models.list().data[0].id == server.model
