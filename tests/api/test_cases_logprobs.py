"""Cases of bank.yaml: logprobs, and what asks for too many of them."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from real_server import RealServer, is_bad_request, text_of
from toy_server import refused

CMP, CHT = "/v1/completions", "/v1/chat/completions"


def numbers(value: Any) -> list[float | None]:
    """Every logprob in a response, of either shape."""
    found: list[float | None] = []
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "logprob":
            found.append(inner)
        elif key == "token_logprobs":
            found += inner
        elif key == "top_logprobs" and "token_logprobs" in value:
            found += [number for top in inner if top for number in top.values()]
        else:
            found += numbers(inner)
    return found


def test_lp_no_infinity(server: RealServer) -> None:
    one = server.tokenize(prompt="The")[:1]
    requests = [
        (CMP, server.cmp_body(temperature=0.01, top_p=0.3, logprobs=5, max_tokens=8)),
        (CHT, server.cht_body(temperature=0.01, logprobs=True, top_logprobs=5, max_tokens=8)),
        (CMP, server.cmp_body(allowed_token_ids=one, logprobs=5, max_tokens=8)),
        (CMP, server.cmp_body(logit_bias={str(one[0]): -100}, logprobs=5, max_tokens=8, echo=True, min_p=0.5)),
        (CHT, server.cht_body(allowed_token_ids=one, logprobs=True, top_logprobs=20, max_tokens=8)),
    ]
    for path, body in requests:
        whole = server.answer(path, body)  # strict JSON
        found = numbers(whole["choices"])
        assert found and all(n is None or (math.isfinite(n) and n <= 0) for n in found)
        streamed = numbers([chunk["choices"] for chunk in server.stream(path, body)])
        assert streamed and all(n is None or math.isfinite(n) for n in streamed)


def test_lp_count_and_collision(server: RealServer) -> None:
    sampled: dict[int, list[float]] = {}
    for count in (1, 3, 5):
        choice = server.cht(temperature=0, logprobs=True, top_logprobs=count, max_tokens=12)["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 12
        for item in content:
            top = item["top_logprobs"]
            assert len(top) == count
            assert [entry["logprob"] for entry in top] == sorted((entry["logprob"] for entry in top), reverse=True)
            same = [entry for entry in top if entry["bytes"] == item["bytes"]]
            assert not same or any(entry["logprob"] == item["logprob"] for entry in same)
        assert bytes(byte for item in content for byte in item["bytes"]).decode("utf-8", "replace") == text_of(choice)
        sampled[count] = [item["logprob"] for item in content]
    assert sampled[1] == pytest.approx(sampled[5], abs=1e-4)
    assert sampled[3] == pytest.approx(sampled[5], abs=1e-4)


def test_lp_collisions_keep_every_entry_in_completions(server: RealServer) -> None:
    """Half characters all read alike when decoded one by one; twenty candidates are twenty entries all the same."""
    ids = server.tokenize(prompt="😀 歪")
    choice = server.cmp(max_tokens=12, temperature=1.5, seed=1, logprobs=20, logit_bias={str(i): 50 for i in ids})["choices"][0]
    for token, value, top in zip(*(choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert 20 <= len(top) <= 21
        assert top[token] == value
    as_ids = server.cmp(max_tokens=2, temperature=0, logprobs=2, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") and token in top for token, top in zip(as_ids["tokens"], as_ids["top_logprobs"], strict=True))


def test_lp_text_offset_points_into_the_text(server: RealServer) -> None:
    for fields in ({"echo": True}, {}):
        choice = server.cmp(max_tokens=16, temperature=0, logprobs=0, **fields)["choices"][0]
        shape = choice["logprobs"]
        for token, offset in zip(shape["tokens"], shape["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<|")):
                assert choice["text"].startswith(token, offset), (token, offset)


def test_lp_too_many(server: RealServer) -> None:
    steps: list[tuple[str, dict[str, Any], str]] = [
        (CHT, {"logprobs": True, "top_logprobs": 1000000}, "top_logprobs"),
        (CMP, {"logprobs": 1000000}, "logprobs"),
        (CMP, {"logprobs": -1}, "logprobs"),
        (CMP, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (CHT, {"top_logprobs": 3}, "top_logprobs"),
        (CHT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHT, {"logprobs": 1}, "logprobs"),
        (CMP, {"logprobs": True}, "logprobs"),
        (CMP, {"prompt_logprobs": 1000000}, "prompt_logprobs"),
        (CHT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CMP, {"echo": True, "logprobs": 1000000}, "logprobs"),
        (CMP, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ]
    for path, fields, param in steps:
        started = time.monotonic()
        body = server.cmp_body() if path == CMP else server.cht_body()
        refused(server.post(path, {**body, "max_tokens": 2, **fields}), param)
        assert time.monotonic() - started < 2


def test_lp_raw_not_filtered(server: RealServer) -> None:
    tops = []
    for fields in ({"top_p": 1}, {"top_p": 0.5}, {"top_k": 1}, {"temperature": 0.3}, {"presence_penalty": 2.0, "repetition_penalty": 1.5}):
        body = {"logprobs": True, "top_logprobs": 3, "max_tokens": 1, "temperature": 1, "seed": 1, **fields}
        top = server.cht(**body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert len(top) == 3
        assert all(entry["logprob"] < 0 for entry in top)
        tops.append([entry["logprob"] for entry in top])
    for other in tops[1:]:
        assert other == pytest.approx(tops[0], abs=1e-3)


def test_lp_prompt_length(server: RealServer) -> None:
    prompt = "\n1. Carol has 20"
    body = server.cmp(prompt=prompt, max_tokens=4, prompt_logprobs=1, temperature=0)
    positions = body["choices"][0]["prompt_logprobs"]
    assert len(positions) == body["usage"]["prompt_tokens"] and positions[0] is None
    ids = server.tokenize(prompt=prompt)
    for token_id, position in zip(ids[1:], positions[1:], strict=True):
        assert str(token_id) in position and 1 <= len(position) <= 2
        assert all(math.isfinite(entry["logprob"]) and entry["rank"] >= 1 for entry in position.values())
    body = server.cmp(prompt=prompt, max_tokens=5, logprobs=1, echo=True, temperature=0)
    choice = body["choices"][0]
    assert "".join(token for token in choice["logprobs"]["tokens"] if not token.startswith("<|")) == choice["text"]
    assert choice["text"].startswith(prompt)


def test_lp_prompt_length_when_the_prompt_is_cached(server: RealServer) -> None:
    """A prefix hit must not shorten what is asked for; long prompts come in chunks."""
    prompt = "number " * 200
    server.cmp(prompt=prompt, max_tokens=1)
    first = server.cmp(prompt=prompt, max_tokens=1, prompt_logprobs=0, temperature=0)
    again = server.cmp(prompt=prompt, max_tokens=1, prompt_logprobs=0, temperature=0)
    assert len(first["choices"][0]["prompt_logprobs"]) == first["usage"]["prompt_tokens"]
    values = [[next(iter(p.values()))["logprob"] for p in body["choices"][0]["prompt_logprobs"][1:]] for body in (first, again)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    chat = server.cht(prompt_logprobs=1, max_tokens=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_echo_logprobs_agree_with_generation(server: RealServer) -> None:
    """What a generated token was worth is what the same token is worth as a part of the prompt."""
    made = server.cmp(max_tokens=10, temperature=0, logprobs=0, return_token_ids=True)["choices"][0]
    prompt = server.tokenize(prompt="The capital of France is") + made["token_ids"]
    scored = server.cmp(prompt=prompt, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert scored["token_logprobs"][-10:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    is_bad_request(server.post(CMP, server.cmp_body(max_tokens=-1, echo=True)), "max_tokens")
