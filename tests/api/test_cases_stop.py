"""Cases of bank.yaml: stop strings and stop tokens."""

from __future__ import annotations

import pytest
from real_server import RealServer, is_bad_request, join, text_of

MONTHS = "List the months of the year:"


@pytest.mark.parametrize("k", [1, 3, 6])
def test_stop_spans_tokens(server: RealServer, k: int) -> None:
    base = server.cmp(prompt=MONTHS, temperature=0, max_tokens=48, logprobs=0)["choices"][0]
    text, tokens = base["text"], base["logprobs"]["tokens"]
    offsets = [offset - base["logprobs"]["text_offset"][0] for offset in base["logprobs"]["text_offset"]]
    end_of_middle = offsets[k + 2]
    stop = text[max(offsets[k], offsets[k + 1] - 2) : end_of_middle + min(2, len(tokens[k + 2]))]
    body = server.cmp_body(prompt=MONTHS, temperature=0, max_tokens=48, stop=[stop])
    cut = server.answer("/v1/completions", body)
    choice = cut["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    end = text.index(stop) + len(stop)
    assert cut["usage"]["completion_tokens"] <= sum(offset < end for offset in offsets)
    assert join(server.stream("/v1/completions", body)) == choice["text"]
    kept = server.answer("/v1/completions", {**body, "include_stop_str_in_output": True})["choices"][0]["text"]
    assert kept == text[:end] == join(server.stream("/v1/completions", {**body, "include_stop_str_in_output": True}))


def test_stop_spans_tokens_in_chat_with_n(server: RealServer) -> None:
    body = server.cht_body(temperature=0.9, seed=2, n=3, max_tokens=32)
    base = [text_of(choice) for choice in server.answer("/v1/chat/completions", body)["choices"]]
    stop = base[1][4:9]
    cut = server.answer("/v1/chat/completions", {**body, "stop": stop})
    chunks = server.stream("/v1/chat/completions", {**body, "stop": stop})
    for index, text in enumerate(base):
        wanted = text.split(stop)[0]
        assert text_of(cut["choices"][index]) == wanted == join(chunks, index)


def test_the_earliest_of_several_stops_wins(server: RealServer) -> None:
    text = server.cmp(prompt=MONTHS, temperature=0, max_tokens=32)["choices"][0]["text"]
    late, early = text[12:15], text[5:7]
    cut = server.cmp(prompt=MONTHS, temperature=0, max_tokens=32, stop=[late, early])["choices"][0]["text"]
    assert cut == text[: min(text.index(late), text.index(early))]


def test_stop_empty_string(server: RealServer) -> None:
    for stop in ("", ["", " "], [None]):
        for path, body in (("/v1/completions", server.cmp_body()), ("/v1/chat/completions", server.cht_body())):
            is_bad_request(server.post(path, {**body, "stop": stop, "max_tokens": 8}), "stop")
    plain = server.cmp(max_tokens=8, temperature=0)["choices"][0]["text"]
    for stop in ([], None):
        assert server.cmp(max_tokens=8, temperature=0, stop=stop)["choices"][0]["text"] == plain


def test_stop_limits_are_named(server: RealServer) -> None:
    for stop in (["a"] * 17, ["x" * 1025]):
        error = is_bad_request(server.post("/v1/completions", server.cmp_body(stop=stop)), "stop")
        assert "16" in error["message"] or "1024" in error["message"]


def test_stop_token_ids_invalid(server: RealServer) -> None:
    for ids in ([386], [9999999], [None], [-3], [1.0], ["1"], [True], [2**70]):
        for path, body in (("/v1/completions", server.cmp_body()), ("/v1/chat/completions", server.cht_body())):
            is_bad_request(server.post(path, {**body, "stop_token_ids": ids, "min_tokens": 5, "max_tokens": 8}), "stop_token_ids")


def test_stop_token_ids_stop(server: RealServer) -> None:
    base = server.cmp(prompt=MONTHS, temperature=0, max_tokens=24, return_token_ids=True)["choices"][0]
    ids = base["token_ids"]
    stop_id = ids[5]
    first = ids.index(stop_id)
    cut = server.cmp(prompt=MONTHS, temperature=0, max_tokens=24, return_token_ids=True, stop_token_ids=[stop_id])
    assert cut["choices"][0]["token_ids"] == ids[: first + 1]
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["choices"][0]["stop_reason"] == stop_id
    assert cut["usage"]["completion_tokens"] == first + 1
    later = server.cmp(prompt=MONTHS, temperature=0, max_tokens=24, return_token_ids=True, stop_token_ids=[stop_id], min_tokens=first + 2)
    assert len(later["choices"][0]["token_ids"]) >= first + 2
    assert stop_id not in later["choices"][0]["token_ids"][: first + 1]


def test_min_tokens_holds_back_the_end_of_text(server: RealServer) -> None:
    eos = server.tokenize(prompt="<|im_end|>")[0]
    bias = {str(eos): 100}
    assert server.cmp(max_tokens=12, logit_bias=bias)["usage"]["completion_tokens"] == 1
    body = server.cmp(max_tokens=12, min_tokens=7, logit_bias=bias)
    assert body["usage"]["completion_tokens"] == 8 and body["choices"][0]["finish_reason"] == "stop"
    assert server.cmp(max_tokens=12, ignore_eos=True, logit_bias=bias)["usage"]["completion_tokens"] == 12


def test_after_a_stop_string_the_gauges_fall(server: RealServer) -> None:
    """The engine hears of the end last, and has nothing to answer: the page must not show a request that runs for ever."""
    text = server.cmp(max_tokens=40, ignore_eos=True, temperature=0)["choices"][0]["text"]
    for stop in (text[3], text[8:10]):
        assert server.cmp(max_tokens=2000, ignore_eos=True, temperature=0, stop=[stop])["choices"][0]["stop_reason"] == stop
        server.kv_idle(2.0)
