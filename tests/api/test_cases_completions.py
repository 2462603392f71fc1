"""Cases of bank.yaml: completions, echo, n, best_of, malformed prompts."""

from __future__ import annotations

import math

import pytest
from real_server import MESSAGES, PROMPT, RealServer, is_bad_request, join, ok, reasons
from toy_server import refused


@pytest.mark.parametrize("prompt", ["", [""], []])
def test_cmp_empty_prompt(server: RealServer, prompt: object) -> None:
    response = server.post("/v1/completions", server.cmp_body(prompt=prompt, max_tokens=5, temperature=0))
    if prompt == [] or response.status_code != 200:
        is_bad_request(response, "prompt")
    else:
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] >= 1 and usage["completion_tokens"] <= 5


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["ok", ""]])
def test_cmp_empty_prompt_streamed(server: RealServer, prompt: object) -> None:
    response = server.post("/v1/completions", server.cmp_body(prompt=prompt, max_tokens=2, stream=True))
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        is_bad_request(response, "prompt")


def test_cmp_empty_prompt_in_chat(server: RealServer) -> None:
    body = server.cht_body(messages=[{"role": "user", "content": ""}], max_tokens=2)
    assert ok(server.post("/v1/chat/completions", body))["usage"]["prompt_tokens"] >= 1  # the template gives the prompt its tokens


def test_cmp_max_tokens_null(server: RealServer) -> None:
    absent = server.cmp(temperature=0)
    null = server.cmp(temperature=0, max_tokens=None)
    assert null["choices"][0]["text"] == absent["choices"][0]["text"]
    assert null["usage"]["completion_tokens"] >= 1
    assert null["choices"][0]["finish_reason"] in ("stop", "length")


NULLABLE = ("max_tokens", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "temperature", "top_p", "top_k", "min_tokens",
            "best_of", "echo", "logprobs", "suffix", "presence_penalty", "user", "allowed_token_ids", "bad_words")  # fmt: skip


def test_every_nullable_field_may_be_null(server: RealServer) -> None:
    absent = server.cmp()["usage"]["prompt_tokens"]
    assert server.cmp(**dict.fromkeys(NULLABLE))["usage"]["prompt_tokens"] == absent
    chat = {name: None for name in (*NULLABLE, "tools", "tool_choice", "response_format", "top_logprobs", "max_completion_tokens")}
    assert server.cht(**{**chat, "max_tokens": 2})["usage"]["completion_tokens"] >= 1


def test_cmp_echo_zero_tokens(server: RealServer) -> None:
    prompt = "One plus one is two"
    body = server.cmp(prompt=prompt, echo=True, max_tokens=0, logprobs=1, temperature=0)
    choice, logprobs = body["choices"][0], body["choices"][0]["logprobs"]
    assert choice["text"] == prompt
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == body["usage"]["prompt_tokens"]
    assert logprobs["token_logprobs"][0] is None
    assert all(math.isfinite(value) and value <= 0 for value in logprobs["token_logprobs"][1:])
    assert body["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_cmp_echo_zero_tokens_streamed_batch_and_ids(server: RealServer) -> None:
    prompts = ["One plus one is two", "Apples are"]
    ids = [server.tokenize(prompt=prompt) for prompt in prompts]
    whole = server.cmp(prompt=prompts, echo=True, max_tokens=0, logprobs=1, temperature=0)
    by_ids = server.cmp(prompt=ids, echo=True, max_tokens=0, logprobs=1, temperature=0)
    assert [c["text"] for c in whole["choices"]] == [c["text"] for c in by_ids["choices"]] == prompts
    chunks = server.stream("/v1/completions", server.cmp_body(prompt=prompts, echo=True, max_tokens=0, logprobs=1, temperature=0))
    for index, prompt in enumerate(prompts):
        assert join(chunks, index) == prompt
        assert reasons(chunks, index) == ["length"]
        streamed = [lp for c in chunks for ch in c["choices"] if ch["index"] == index and ch["logprobs"] for lp in ch["logprobs"]["token_logprobs"]]
        assert streamed == pytest.approx(whole["choices"][index]["logprobs"]["token_logprobs"], abs=1e-4, nan_ok=False)
    is_bad_request(server.post("/v1/completions", server.cmp_body(max_tokens=0)), "max_tokens")


def test_cmp_echo_zero_tokens_of_the_whole_context(server: RealServer) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = (server.tokenize(prompt="One plus one is two") * limit)[:limit]
    body = server.cmp(prompt=prompt, echo=True, max_tokens=0)
    assert body["usage"] == {**body["usage"], "prompt_tokens": limit, "completion_tokens": 0}
    assert body["choices"][0]["finish_reason"] == "length"
    is_bad_request(server.post("/v1/completions", server.cmp_body(prompt=[*prompt, prompt[0]], echo=True, max_tokens=0)), "prompt")


def test_cmp_echo_logprobs_sampled(server: RealServer) -> None:
    body = server.cmp(prompt="red green blue yellow", echo=True, logprobs=1, temperature=1, top_k=1, max_tokens=8)
    logprobs, usage = body["choices"][0]["logprobs"], body["usage"]
    assert len(logprobs["tokens"]) == usage["prompt_tokens"] + usage["completion_tokens"]
    values = logprobs["token_logprobs"]
    assert values[0] is None
    assert all(value is None or (math.isfinite(value) and value <= 0) for value in values)


PROMPTS = ["Apples are", "Rivers flow", "Two plus two"]
BATCH = {"prompt": PROMPTS, "n": 2, "temperature": 0.9, "seed": 5, "max_tokens": 4, "ignore_eos": True, "echo": True}


def test_cmp_batch_index(server: RealServer) -> None:
    body = server.cmp(**BATCH)
    assert sorted(choice["index"] for choice in body["choices"]) == [0, 1, 2, 3, 4, 5]
    for choice in body["choices"]:
        assert choice["text"].startswith(PROMPTS[choice["index"] // 2])
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens"] == sum(len(server.tokenize(prompt=prompt)) for prompt in PROMPTS)


def test_cmp_batch_index_streamed(server: RealServer) -> None:
    whole = server.cmp(**BATCH)
    chunks = server.stream("/v1/completions", server.cmp_body(**BATCH, stream_options={"include_usage": True}))
    for choice in whole["choices"]:
        assert join(chunks, choice["index"]) == choice["text"]  # seeded, float32: the same answers
        assert reasons(chunks, choice["index"]) == [choice["finish_reason"]]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


def test_cmp_batch_index_token_ids(server: RealServer) -> None:
    ids = [server.tokenize(prompt=prompt) for prompt in PROMPTS]
    assert [c["text"] for c in server.cmp(**{**BATCH, "prompt": ids})["choices"]] == [c["text"] for c in server.cmp(**BATCH)["choices"]]


def test_cmp_best_of(server: RealServer) -> None:
    chunks = server.stream("/v1/completions", server.cmp_body(n=2, best_of=2, max_tokens=4))
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}
    is_bad_request(server.post("/v1/completions", server.cmp_body(n=3, best_of=2, max_tokens=4)), "best_of")
    is_bad_request(server.post("/v1/completions", server.cmp_body(n=1, best_of=3, max_tokens=4, stream=True)), "best_of")
    is_bad_request(server.post("/v1/completions", server.cmp_body(n=2, temperature=0)), "n")


def test_cmp_best_of_returns_the_best(server: RealServer) -> None:
    body = server.cmp(n=2, best_of=6, max_tokens=6, seed=3, logprobs=0, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in body["choices"]]
    assert sums[0] >= sums[1]
    every = server.cmp(n=6, max_tokens=6, seed=3, logprobs=0, ignore_eos=True)
    best = sorted((sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]), reverse=True)[:2]
    assert sums == pytest.approx(best, abs=1e-3)


def test_cmp_beam_search(server: RealServer) -> None:
    body = server.cmp(n=2, best_of=4, use_beam_search=True, max_tokens=6)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["text"] != body["choices"][1]["text"]
    is_bad_request(server.post("/v1/completions", server.cmp_body(n=2, use_beam_search=True, stream=True)), "stream")
    is_bad_request(server.post("/v1/completions", server.cmp_body(n=2, use_beam_search=True, temperature=0.7)), "temperature")
    is_bad_request(server.post("/v1/chat/completions", server.cht_body(n=2, use_beam_search=True, top_p=0.5)), "top_p")


def test_cmp_token_ids_out_of_range(server: RealServer) -> None:
    vocab_size = 386
    for prompt in ([-1], [1, vocab_size], [9223372036854775808], [[1], [-1]], [[1], [vocab_size]], [[10**400]]):
        is_bad_request(server.post("/v1/completions", server.cmp_body(prompt=prompt, max_tokens=2)), "prompt")
        is_bad_request(server.post("/v1/completions", server.cmp_body(prompt=prompt, max_tokens=2, stream=True)), "prompt")
    for prompt in ([1, "a"], [1, 1.0], [True], [1, None], [{}], {"a": 1}, 5, [["a"]], [[1], "a"]):
        is_bad_request(server.post("/v1/completions", server.cmp_body(prompt=prompt, max_tokens=2)), "prompt")
    assert server.cmp(prompt=[vocab_size - 1], max_tokens=1)["usage"]["prompt_tokens"] == 1


def test_model_name_is_checked(server: RealServer) -> None:
    for path, body in (("/v1/completions", server.cmp_body()), ("/v1/chat/completions", server.cht_body()), ("/tokenize", {"prompt": "a"})):
        error = refused(server.post(path, {**body, "model": "no-such-model"}), "model", status=404)
        assert error["code"] == "model_not_found"
    assert MESSAGES and PROMPT
