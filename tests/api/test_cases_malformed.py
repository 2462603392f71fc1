"""Cases of bank.yaml: malformed requests, error envelopes, fields that ask for too much."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import RealServer, is_bad_request
from toy_server import refused

CMP, CHT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_n_huge(server: RealServer) -> None:
    before = rss_bytes(server.pid)
    slowest = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal slowest
        with httpx.Client(base_url=server.base_url) as http:
            while not done.is_set():
                started = time.monotonic()
                assert http.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - started)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for path, n in ((CMP, 1000000000), (CHT, 5000000), (CHT, 0), (CHT, -1), (CHT, 1.5), (CHT, "2"), (CMP, True), (CMP, 129), (CMP, 2**80)):
            body = server.cmp_body() if path == CMP else server.cht_body()
            for stream in (False, True):
                started = time.monotonic()
                is_bad_request(server.post(path, {**body, "n": n, "max_tokens": 1, "stream": stream}), "n")
                assert time.monotonic() - started < 1
        is_bad_request(server.post(CMP, server.cmp_body(best_of=1000000000)), "best_of")
        is_bad_request(server.post(CMP, server.cmp_body(prompt=["a"] * 1025)), "prompt")
    finally:
        done.set()
        watcher.join()
    assert slowest < 1
    assert rss_bytes(server.pid) - before < 32 << 20


RAW = ['"temperature":NaN', '"temperature":Infinity', '"top_p":NaN', '"repetition_penalty":-Infinity', '"temperature":1e400', '"seed":1e400']
VALUES = [
    ("temperature", 2.5), ("temperature", -0.1), ("top_p", -0.1), ("top_p", 1.01), ("top_p", 0), ("top_k", -7), ("top_k", 1.5), ("presence_penalty", 10),
    ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("min_p", 1.5), ("temperature", "0.5"), ("temperature", True), ("seed", 2**63),
    ("seed", 1.0), ("max_tokens", -1), ("max_tokens", "ten"), ("max_tokens", 2**40), ("min_tokens", -1), ("ignore_eos", 1),
    ("stream", "true"), ("echo", "yes"), ("temperature", 10**400), ("length_penalty", 2), ("early_stopping", True), ("truncate_prompt_tokens", 0),
    ("logit_bias", [1]), ("bad_words", [""]), ("bad_words", "x"), ("priority", 3), ("cache_salt", ""), ("request_id", "a b"), ("stop", 5),
]  # fmt: skip


def test_non_finite_sampling_params(server: RealServer) -> None:
    for fields in RAW:
        for path, start in ((CMP, '"prompt":"x"'), (CHT, '"messages":[{"role":"user","content":"x"}]')):
            content = f'{{"model":{json.dumps(server.model)},{start},{fields}}}'
            error = refused(server.http.post(path, content=content, headers=JSON), None)
            assert error["code"] == "invalid_json"
    for name, value in VALUES:
        is_bad_request(server.post(CMP, server.cmp_body(**{name: value})), name)
        is_bad_request(server.post(CHT, server.cht_body(**{name: value})), name)
    is_bad_request(server.post(CMP, server.cmp_body(min_tokens=17)), "min_tokens")  # max_tokens is 16


def test_logit_bias_out_of_vocab(server: RealServer) -> None:
    steps: list[dict[str, Any]] = [
        {"logit_bias": {"386": 5}}, {"logit_bias": {"-1": 5}}, {"logit_bias": {"abc": 5}}, {"logit_bias": {"1": 101}}, {"logit_bias": {"1": None}},
        {"logit_bias": {"1": "5"}}, {"logit_bias": {"1.0": 5}}, {"logit_bias": {" 1": 5}}, {"logit_bias": {"9" * 30: 5}}, {"logit_bias": {"1": 5, "01": 6}},
        {"logit_bias": {str(i): 1 for i in range(1025)}}, {"allowed_token_ids": []}, {"allowed_token_ids": [386]}, {"allowed_token_ids": [-1]},
        {"allowed_token_ids": ["1"]},
    ]  # fmt: skip
    for fields in steps:
        name = next(iter(fields))
        for path, body in ((CHT, server.cht_body()), (CMP, server.cmp_body())):
            error = is_bad_request(server.post(path, {**body, **fields, "max_tokens": 4}), name)
            assert error["param"] == name


def test_json_too_deep(server: RealServer) -> None:
    model = json.dumps(server.model)
    bodies = [
        (CHT, f'{{"model":{model},"tools":{"[" * 3000}{"]" * 3000}}}'),
        (CMP, f'{{"model":{model},"x":{"[" * 100000}{"]" * 100000}}}'),
        (CMP, f'{{"model":{model},"x":{"[" * 100000}'),
        (CMP, f'{{"model":{model},"prompt":{"[" * 100}{"]" * 100}}}'),
        (CHT, '{"messages":' + '{"a":' * 50000 + "1" + "}" * 50000 + "}"),
        (CHT, f'{{"model":{model},"metadata":{"[" * 70}{"]" * 70}}}'),
        ("/tokenize", '{"prompt":' + "[" * 100000 + "]" * 100000 + "}"),
    ]
    for path, content in bodies:
        started = time.monotonic()
        response = server.http.post(path, content=content, headers=JSON)
        assert response.status_code == 400 and response.json()["error"]["message"]
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("path", [CMP, CHT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [b"not json", b"", b"[]", b'"x"', b"null", b'{"model":', b"{'model': 1}", b"\xff\xfe", b'{"a":1,"a":2}', b'{"prompt":"\\ud800"}', b"\xef\xbb\xbf{}",
     b'{"n":' + b"9" * 5000 + b"}", b"{}{}", b'{"prompt":"a\x01b"}'],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_error_envelope_of_what_is_no_json_object(server: RealServer, path: str, content: bytes) -> None:
    response = server.http.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_error_envelope(server: RealServer) -> None:
    is_bad_request(server.post(CHT, {"model": server.model}), "messages")
    is_bad_request(server.post(CMP, {"prompt": "x"}), "model")
    is_bad_request(server.post(CMP, {"model": server.model}), "prompt")
    is_bad_request(server.post(CMP, {"model": 5, "prompt": "x"}), "model")
    is_bad_request(server.post(CMP, server.cmp_body(max_tokens="ten")), "max_tokens")
    is_bad_request(server.post(CHT, {"model": server.model, "messages": "hi"}), "messages")
    for method, path, status in (("POST", "/v1/nothing", 404), ("GET", CMP, 405), ("DELETE", "/v1/models", 405), ("POST", "/v1/audio/speech", 404), ("GET", "/v1", 404)):
        refused(server.http.request(method, path, json={}), None, status=status)
    assert server.http.get(CMP).headers["allow"] == "POST"
    error = refused(server.http.post(CMP, content=json.dumps(server.cmp_body()), headers={"Content-Type": "text/plain"}), None)
    assert "application/json" in error["message"]


def test_unknown_and_foreign_fields_are_named(server: RealServer) -> None:
    for name, hint in (("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("num_beams", "use_beam_search"), ("do_sample", "temperature")):
        for path, body in ((CMP, server.cmp_body()), (CHT, server.cht_body())):
            error = is_bad_request(server.post(path, {**body, name: 1}), name)
            assert hint in error["message"]
    no_effect = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"}
    assert server.cmp(max_tokens=1, **no_effect)["usage"]["completion_tokens"] == 1
    assert server.cht(max_tokens=1, **no_effect)["usage"]["completion_tokens"] == 1


NOT_BUILT = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required", "parallel_tool_calls": True,
    "functions": [{"name": "f"}], "function_call": {"name": "f"}, "suffix": "x", "audio": {"voice": "a"}, "modalities": ["audio"],
    "prediction": {"type": "content"}, "reasoning_effort": "low", "web_search_options": {}, "documents": [{"text": "a"}], "logits_processors": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_BUILT)
def test_guided_legacy_ignored_and_other_missing_features(server: RealServer, name: str) -> None:
    """A feature that is not built is a 400 that names its field, on every route that might take it."""
    is_bad_request(server.post(CHT, server.cht_body(**{name: NOT_BUILT[name]})), name)
    is_bad_request(server.post(CMP, server.cmp_body(**{name: NOT_BUILT[name]})), name)


def test_what_asks_for_nothing_is_accepted(server: RealServer) -> None:
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "function_call": "auto", "documents": []}
    for name, value in neutral.items():
        assert server.cht(**{name: value}, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert server.cht(tool_choice="auto", max_tokens=1) and server.cmp(suffix="", max_tokens=1)


def test_body_too_large(server: RealServer) -> None:
    announced = server.http.post(CMP, content=b"{" + b" " * (32 << 20), headers=JSON)
    refused(announced, None, status=413)

    def pieces() -> Any:
        for _ in range(40):
            yield b" " * (1 << 20)

    try:
        response = server.http.post(CMP, content=pieces(), headers=JSON)  # no length announced
    except httpx.WriteError:
        return  # the server answered and closed before everything was sent
    refused(response, None, status=413)
