"""Cases of bank.yaml: streaming, unicode, long prompts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from real_server import MESSAGES, RealServer, join, reasons, text_of, wait_until
from toy_server import refused

BOTH = ("/v1/completions", "/v1/chat/completions")
MONTHS = "List the months of the year:"


def body_for(server: RealServer, path: str, **fields: object) -> dict[str, object]:
    return server.cmp_body(**{"prompt": MONTHS, **fields}) if path == BOTH[0] else server.cht_body(**fields)


@pytest.mark.parametrize("path", BOTH)
def test_str_finish_reason_shape(server: RealServer, path: str) -> None:
    body = body_for(server, path, max_tokens=3, temperature=0)
    whole = server.answer(path, body)["choices"][0]
    assert reasons(server.stream(path, body)) == [whole["finish_reason"]] == ["length"]
    text = text_of(server.answer(path, {**body, "max_tokens": 12})["choices"][0])
    stopped = {**body, "max_tokens": 12, "stop": [text[3:5]]}
    assert reasons(server.stream(path, stopped)) == ["stop"]
    assert server.answer(path, stopped)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", BOTH)
def test_str_finish_reason_of_a_natural_end(server: RealServer, path: str) -> None:
    """The end-of-text token is forced; its text never shows."""
    eos = server.tokenize(prompt="<|im_end|>")
    body = body_for(server, path, max_tokens=9, temperature=0, allowed_token_ids=eos)
    whole = server.answer(path, body)
    chunks = server.stream(path, body)
    assert text_of(whole["choices"][0]) == join(chunks) == ""
    assert reasons(chunks) == [whole["choices"][0]["finish_reason"]] == ["stop"]
    assert whole["choices"][0]["stop_reason"] is None
    assert whole["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 64])
def test_str_concat_equals(server: RealServer, path: str, max_tokens: int) -> None:
    for extra in ({}, {"stop": ["\x01never"]}, {"stream_options": {"include_usage": True}}, {"n": 2, "temperature": 0.7, "seed": 11}):
        body = body_for(server, path, **{"max_tokens": max_tokens, "temperature": 0, **extra})
        chunks = server.stream(path, body)
        whole = server.answer(path, {name: value for name, value in body.items() if name != "stream_options"})
        assert {choice["index"] for choice in whole["choices"]} == set(range(body.get("n", 1)))  # type: ignore[call-overload]
        for choice in whole["choices"]:
            assert join(chunks, choice["index"]) == text_of(choice)
            assert reasons(chunks, choice["index"]) == [choice["finish_reason"]]


@pytest.mark.parametrize("path", BOTH)
def test_streamed_logprobs_and_tokens_equal_the_whole_answer(server: RealServer, path: str) -> None:
    logprobs = {"logprobs": 3} if path == BOTH[0] else {"logprobs": True, "top_logprobs": 3}
    body = body_for(server, path, max_tokens=16, temperature=0.8, seed=4, n=2, return_token_ids=True, **logprobs)
    whole, chunks = server.answer(path, body), server.stream(path, body)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [i for c in mine for i in c.get("token_ids") or []] == choice["token_ids"]
        shapes = [c["logprobs"] for c in mine if c["logprobs"]]
        if path == BOTH[0]:
            for name in ("tokens", "text_offset"):
                assert [item for shape in shapes for item in shape[name]] == choice["logprobs"][name]
            streamed = [item for shape in shapes for item in shape["token_logprobs"]]
            assert streamed == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        else:
            streamed = [item for shape in shapes for item in shape["content"]]
            assert [item["token"] for item in streamed] == [item["token"] for item in choice["logprobs"]["content"]]
            assert [len(item["top_logprobs"]) for item in streamed] == [3] * len(streamed)


def test_str_utf8_split(server: RealServer) -> None:
    ids = server.tokenize(prompt="😀 歪 Ťď")
    body = server.cmp_body(prompt="Repeat: 😀 歪 Ťď 😀", max_tokens=24, temperature=0.7, seed=3)
    for force in ({"logit_bias": {str(i): 100 for i in set(ids)}}, {"allowed_token_ids": ids}):
        text = server.answer(BOTH[0], {**body, **force})["choices"][0]["text"]
        assert join(server.stream(BOTH[0], {**body, **force})) == text  # `stream` checks UTF-8, strict JSON and surrogates
        assert not text.isascii()
        chat = server.cht_body(max_tokens=24, temperature=0.7, seed=3, **force)
        assert join(server.stream(BOTH[1], chat)) == text_of(server.answer(BOTH[1], chat)["choices"][0])


def test_str_utf8_whole_characters_are_not_replaced(server: RealServer) -> None:
    """Bytes forced in the order of one character, one token at a time, arrive as that character."""
    ids = server.tokenize(prompt="😀")
    assert len(ids) > 1
    text = server.cmp(prompt=[*server.tokenize(prompt="smile "), *ids[:-1]], max_tokens=1, allowed_token_ids=[ids[-1]])["choices"][0]["text"]
    assert text in ("", "\ufffd") or not text.isascii()  # the end of a character that the prompt began has no text of its own
    streamed = server.stream(BOTH[0], server.cmp_body(prompt="smile", max_tokens=8, allowed_token_ids=[ids[0]]))
    assert set(join(streamed)) == {"\ufffd"}


def test_str_error_midway_engine_killed(start_server: Callable[..., RealServer]) -> None:
    """A stream whose engine dies ends with an error event and [DONE]; the process exits non-zero, and leaves nothing behind."""
    server = start_server()
    events, killed_at = [], 0.0
    for event in server.iterate(BOTH[1], server.cht_body(max_tokens=1900, ignore_eos=True)):
        events.append(event)
        if len(events) == 5:
            os.kill(server.engine_pid(), signal.SIGKILL)
            killed_at = time.monotonic()
    assert time.monotonic() - killed_at < 5
    assert events[-1] == "[DONE]"
    assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
    assert events[-2]["error"]["type"] == "server_error"
    assert server.wait_exit(10) != 0
    server.wait_no_process(5)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(BOTH[1], {"n": 0}, "n"), (BOTH[1], {"messages": [{"role": "user", "content": "x " * 200000}]}, "messages"), (BOTH[0], {"temperature": -1}, "temperature")],
    ids=["n", "too-long", "temperature"],
)
def test_str_invalid_is_400(server: RealServer, path: str, fields: dict[str, object], param: str) -> None:
    started = time.monotonic()
    refused(server.post(path, {**(server.cmp_body() if path == BOTH[0] else server.cht_body()), **fields, "stream": True}), param)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("path", BOTH)
def test_str_usage_chunk(server: RealServer, path: str) -> None:
    body = body_for(server, path, n=2, seed=11, temperature=0.8, max_tokens=9, ignore_eos=True)
    usage = server.answer(path, body)["usage"]
    chunks = server.stream(path, {**body, "stream_options": {"include_usage": True}})
    with_usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
    assert with_usage == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == usage[name]
    assert usage["completion_tokens"] == 18
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(chunk.get("usage") is None for chunk in server.stream(path, body))


def test_continuous_usage_grows_to_the_total(server: RealServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(BOTH[0], server.cmp_body(max_tokens=6, ignore_eos=True, temperature=0, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6


def test_str_long_prompt_finishes(server: RealServer) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    word_tokens = len(server.tokenize(prompt="word " * 64)) / 64
    prompt = "word " * int(0.8 * limit / word_tokens)
    body = server.cmp_body(prompt=prompt, max_tokens=10, stream_options={"include_usage": True})
    started, last, gap, chunks = time.monotonic(), time.monotonic(), 0.0, []
    for event in server.iterate(BOTH[0], body):
        now = time.monotonic()
        gap, last = max(gap, now - last), now
        chunks.append(event)
    assert chunks[-1] == "[DONE]" and time.monotonic() - started < 60
    assert chunks[-2]["usage"]["prompt_tokens"] == len(server.tokenize(prompt=prompt)) > 0.7 * limit
    assert gap < 30


def test_events_come_as_tokens_are_made(server: RealServer) -> None:
    times = [time.monotonic() for _ in server.iterate(BOTH[0], server.cmp_body(max_tokens=1800, ignore_eos=True))]  # a second, so that a busy client hides nothing
    assert len(times) > 900
    assert times[len(times) // 2] - times[0] > 0.2 * (times[-1] - times[0])


def test_a_slow_reader_does_not_stop_others(server: RealServer) -> None:
    slow = server.iterate(BOTH[0], server.cmp_body(max_tokens=1500, ignore_eos=True))
    next(slow)
    assert server.cmp(max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
    slow.close()
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0, 3)
    assert MESSAGES
