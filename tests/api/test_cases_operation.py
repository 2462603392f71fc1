"""Cases of bank.yaml: abort, overload, health, metrics, request ids, API keys."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_server import MESSAGES, RealServer, wait_until
from toy_server import refused

CMP, CHT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 1800, "ignore_eos": True}


def running(server: RealServer, at_least: int = 1) -> Callable[[], bool]:
    return lambda: server.metrics()["vllm:num_requests_running"] >= at_least


def hang_up(server: RealServer, path: str, body: dict[str, Any], when: Callable[[], bool]) -> None:
    """Send a request, and when the moment has come close the socket without reading the answer."""
    content = httpx.Request("POST", server.base_url, json=body).content
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + content)
        wait_until(when, 20)


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 4, "temperature": 1.0}, {"prompt": ["Apples are", "Rivers flow", "Two plus two"]}, {"stream": True}, {"stream": True, "n": 3}],
    ids=["plain", "n", "batch", "stream", "stream-n"],
)
def test_abort_nonstream(server: RealServer, fields: dict[str, Any]) -> None:
    aborted = server.http.get("/metrics").text
    started = re.findall(r'oarlock_requests_total\{.*outcome="abort"\} (\S+)', aborted)[0]
    hang_up(server, CMP, server.cmp_body(**LONG, **fields), running(server))
    closed = time.monotonic()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0, 3)
    server.kv_idle(3)
    assert time.monotonic() - closed < 3
    tokens = server.metrics()["oarlock_engine_tokens_total"]
    time.sleep(0.3)
    assert server.metrics()["oarlock_engine_tokens_total"] == tokens
    now = re.findall(r'oarlock_requests_total\{.*outcome="abort"\} (\S+)', server.http.get("/metrics").text)[0]
    assert float(now) - float(started) == len(fields.get("prompt", [""]))


def test_abort_of_a_chat_and_of_a_waiting_request(start_server: Callable[..., RealServer]) -> None:
    server = start_server("--max-num-seqs", "2")
    enough = threading.Event()
    holders = [threading.Thread(target=hang_up, args=(server, CHT, server.cht_body(**LONG), enough.is_set)) for _ in range(2)]
    for holder in holders:
        holder.start()
    wait_until(running(server, 2), 10)
    hang_up(server, CHT, server.cht_body(**LONG), lambda: server.metrics()["vllm:num_requests_waiting"] == 1)
    wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 0, 1.0)
    assert server.metrics()["vllm:num_requests_running"] == 2
    enough.set()
    for holder in holders:
        holder.join()
    server.kv_idle(3)


async def burst(server: RealServer, count: int, body: dict[str, Any]) -> list[tuple[int, bytes, bytes]]:
    """(status, head, body) of `count` requests sent at once, each on its own connection."""
    content = httpx.Request("POST", server.base_url, json=body).content
    head = f"POST {CMP} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"

    async def one() -> tuple[int, bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        top, _, rest = answer.partition(b"\r\n\r\n")
        return int(top.split(None, 2)[1]), top.lower(), rest

    return await asyncio.gather(*(one() for _ in range(count)))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_overload_bounded(start_server: Callable[..., RealServer]) -> None:
    """Two thousand requests within about a second on a queue of 32 and a batch of 8."""
    server = start_server("--max-waiting-requests", "32", "--max-num-seqs", "8")
    text, before = server.alive(), resident_bytes(server.pid)
    most, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            now = server.metrics()
            most = max(most, now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    responses = asyncio.run(burst(server, 2000, server.cmp_body(max_tokens=64, ignore_eos=True)))
    done.set()
    watcher.join()
    accepted = [json.loads(body) for status, _, body in responses if status == 200]
    assert len(accepted) >= 32
    assert all(answer["usage"]["completion_tokens"] == 64 for answer in accepted)
    for status, head, body in responses:
        if status != 200:
            assert status == 429 and b"retry-after: " in head
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
    assert most <= 40
    assert resident_bytes(server.pid) - before < 128 << 20
    server.alive(text)
    server.kv_idle()


def test_overload_refusals_are_quick_and_batches_count(start_server: Callable[..., RealServer]) -> None:
    server = start_server("--max-waiting-requests", "2", "--max-num-seqs", "1")
    enough = threading.Event()
    holders = [threading.Thread(target=hang_up, args=(server, CMP, server.cmp_body(**LONG), enough.is_set)) for _ in range(3)]
    holders[0].start()
    wait_until(running(server), 10)
    for holder in holders[1:]:
        holder.start()
    wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 2, 10)
    for stream in (False, True):
        started = time.monotonic()
        refused(server.post(CMP, server.cmp_body(stream=stream)), None, status=429)
        assert time.monotonic() - started < 0.2
    enough.set()
    for holder in holders:
        holder.join()
    server.kv_idle(3)
    refused(server.post(CMP, server.cmp_body(prompt=["a"] * 4)), "prompt")  # more than are ever inside
    assert len(server.cmp(prompt=["a"] * 3, max_tokens=1)["choices"]) == 3  # one seat and two in the queue


def test_health_engine_dead(start_server: Callable[..., RealServer]) -> None:
    server = start_server()
    results: list[Any] = []

    def stream() -> None:
        results.append(list(server.iterate(CMP, server.cmp_body(**LONG))))

    def whole() -> None:
        results.append(server.post(CHT, server.cht_body(**LONG)))

    threads = [threading.Thread(target=target) for target in (stream, stream, whole, whole)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 4, 5)
    killed = time.monotonic()
    os.kill(server.engine_pid(), signal.SIGKILL)
    while time.monotonic() - killed < 2:
        try:
            if server.http.get("/health").status_code == 503:
                break
        except httpx.TransportError:
            break  # the server has exited
    else:
        raise AssertionError("/health was not 503 within 2 s")
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "a request hangs"
    assert time.monotonic() - killed < 5
    for result in results:
        if isinstance(result, list):
            assert result[-1] == "[DONE]" and result[-2]["error"]["type"] == "server_error"
        else:
            refused(result, None, status=503)
    assert server.wait_exit(10) == 1
    server.wait_no_process(5)


def test_health_engine_dead_or_stopped(start_server: Callable[..., RealServer]) -> None:
    """A stopped engine turns /health to 503 within --stall-time; when it goes on, so does everything."""
    server = start_server("--stall-time", "1")
    events = server.iterate(CMP, server.cmp_body(max_tokens=300, ignore_eos=True))
    next(events)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: server.http.get("/health").status_code == 503, 3)
        error = server.http.get("/health").json()["error"]
        assert error["code"] == "engine_stalled"
    finally:
        os.kill(engine, signal.SIGCONT)
    assert list(events)[-1] == "[DONE]"
    wait_until(lambda: server.http.get("/health").status_code == 200, 3)
    time.sleep(1.2)
    assert server.http.get("/health").status_code == 200  # silence without requests is no sickness


def test_metrics_add_up(server: RealServer) -> None:
    before = server.metrics()
    usages = []
    for index in range(12):
        fields = {"n": 3, "temperature": 0.9} if index < 5 else {}
        usages.append(server.cmp(prompt=f"mix {index}", max_tokens=5 + index, **fields)["usage"])
    for index in range(5):
        body = server.cht_body(max_tokens=4 + index, stream_options={"include_usage": True})
        usages.append(server.stream(CHT, body)[-1]["usage"])
    for fields in ({"n": 0}, {"temperature": -1}, {"nonsense": 1}):
        refused(server.post(CMP, server.cmp_body(**fields)), next(iter(fields)))
    after = server.metrics()

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert rise("vllm:request_success_total") == 17
    assert rise("oarlock_requests_total") == 20
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n"):
        assert rise(f"vllm:{name}_count") == 17
    assert rise("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert rise("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert rise("vllm:prompt_tokens_by_source_total") == rise("vllm:prompt_tokens_total")
    assert rise("vllm:prompt_tokens_cached_total") == cached
    assert rise("vllm:request_prefill_kv_computed_tokens_sum") == rise("vllm:prompt_tokens_total") - cached
    assert rise("oarlock_engine_prompt_tokens_total") == rise("vllm:prompt_tokens_total") - cached + 5 * 2  # of n choices each computes the last token
    assert rise("vllm:iteration_tokens_total_sum") == rise("oarlock_engine_prompt_tokens_total") + rise("oarlock_engine_tokens_total") - 17 - 5 * 2
    assert rise("vllm:request_params_max_tokens_sum") == sum(range(5, 17)) + sum(range(4, 9))
    assert rise("vllm:request_max_num_generation_tokens_sum") <= rise("vllm:request_params_max_tokens_sum")
    times = [rise(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode", "inference")]
    assert times[1] + times[2] == pytest.approx(times[3]) and 0 < sum(times[::3]) <= rise("vllm:e2e_request_latency_seconds_sum")
    assert rise("oarlock_engine_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert rise("vllm:inter_token_latency_seconds_count") > 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["oarlock_compiles_after_warmup"] == 0
    assert after["vllm:cache_config_info"] == after["oarlock_device_info"] == 1
    events = server.iterate(CMP, server.cmp_body(**LONG))
    next(events)
    assert server.metrics()["vllm:num_requests_running"] == 1
    assert server.metrics()["vllm:kv_cache_usage_perc"] > 0
    events.close()
    labels = {s.labels.get("model_name") for f in text_string_to_metric_families(server.http.get("/metrics").text) for s in f.samples}
    assert labels == {server.model}


def test_metrics_label_is_escaped_and_stays_without_log_stats(start_server: Callable[..., RealServer]) -> None:
    name = 'odd "name" \\ {x}'
    server = start_server("--device", "null", "--served-model-name", name, "second", "--disable-log-stats")
    models = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [name, "second"]
    for alias in (name, "second"):
        body = {"model": alias, "prompt": "x", "max_tokens": 1}
        assert server.answer(CMP, body)["model"] == name
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    assert {s.labels["model_name"] for f in families for s in f.samples} == {name}
    assert server.metrics()["vllm:request_success_total"] == 2
    assert server.http.get("/v1/models/second").json()["id"] == "second"
    refused(server.http.get("/v1/models/third"), "model", status=404)


def test_request_id_hygiene(server: RealServer) -> None:
    def post(sent: str | None, **fields: Any) -> httpx.Response:
        headers = {} if sent is None else {"X-Request-Id": sent}
        return server.http.post(CMP, json=server.cmp_body(max_tokens=1, **fields), headers=headers)

    kept = post("abc-123")
    assert kept.headers["x-request-id"] == "abc-123" and kept.json()["id"] == "cmpl-abc-123"
    fresh = {post(None).headers["x-request-id"] for _ in range(3)}
    assert len(fresh) == 3
    usual = len(post(None, stream=True).text)
    for odd in ("x" * 1000000, "a\tb", "prefill_addr_127.0.0.1:9___decode_addr_127.0.0.1:9_1", "x" * 129, "a b", "a,b"):
        response = post(odd, stream=True)
        assert response.status_code == (200 if len(odd) < 1000 else 400) and response.headers["x-request-id"] != odd
        assert len(response.text) < usual + 2048
    assert server.http.get("/v1/nothing", headers={"X-Request-Id": "err-1"}).headers["x-request-id"] == "err-1"
    assert server.http.get("/health").headers["x-request-id"]
    named = post(None, request_id="mine-1")
    assert named.json()["id"] == "cmpl-mine-1"
    assert "127.0.0.1:9" not in server.output()


def test_the_same_request_id_twice_at_once(server: RealServer) -> None:
    first = server.iterate(CMP, server.cmp_body(max_tokens=200, ignore_eos=True, request_id="twin"))
    next(first)
    assert server.cmp(max_tokens=2, request_id="twin", ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert list(first)[-1] == "[DONE]"


def test_auth_every_route(start_server: Callable[..., RealServer]) -> None:
    key = "sk-oarlock-test-key"
    server = start_server("--device", "null", "--api-key", key, "--api-key", "second-key")
    right = {"Authorization": f"Bearer {key}"}
    spec = server.http.get("/openapi.json", headers=right).json()
    routes = {(method.upper(), path.replace("{name}", "x")) for path, methods in spec["paths"].items() for method in methods}
    assert {path for _, path in routes} >= {CMP, CHT, "/v1/models", "/tokenize", "/detokenize", "/metrics", "/health", "/version"}
    opened = {"/health", "/ping", "/version"}
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": key}, {"Authorization": f"Basic {key}"}, {"Authorization": "Bearer"}]
    wrong += [{"Authorization": f"Bearer {key}x"}, {"Authorization": f"Bearer {key[:-1]}"}, {"X-Api-Key": key}]
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nothing"), ("OPTIONS", CMP)]:
        for headers in wrong:
            response = server.http.request(method, path, headers=headers, json={} if method == "POST" else None)
            if path in opened:
                assert response.status_code == 200
                continue
            if path.startswith("/v1/messages"):  # a plugin's, whose clients may send X-API-Key and read another form of errors
                assert (response.status_code == 401) is ("X-Api-Key" not in headers), (path, headers)
                continue
            error = refused(response, None, status=401)
            assert error["type"] == "invalid_request_error" and error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == ("Bearer" if path != "/" else 'Basic realm="Oarlock", charset="UTF-8"')
        assert server.http.request(method, path, headers=right, json={} if method == "POST" else None).status_code != 401
    for path in ("//v1/completions", "/v1/../v1/completions", "/V1/completions", CMP + "/", "/health/../v1/models", "/health//", "/health;/v1/models", "/%68ealth/x", "/metrics?a=/health", "//health"):
        for method in ("GET", "POST", "HEAD"):
            raw = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(raw.encode())
                status = int(sock.recv(64).split()[1])
            assert status != 200, path
    assert server.http.post(CMP, json=server.cmp_body(max_tokens=1), headers={"Authorization": "bearer second-key"}).status_code == 200
    assert key not in server.output() and key not in server.http.get("/metrics", headers=right).text
    for path in ("/v1/load_lora_adapter", "/sleep", "/reset_prefix_cache", "/start_profile", "/collective_rpc"):
        assert server.http.post(path, headers=right, json={}).status_code == 404
    assert MESSAGES

