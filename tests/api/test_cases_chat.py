"""Cases of bank.yaml: chat, tokenization, security, context errors."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from real_server import RealServer, is_bad_request, join, text_of
from toy_server import refused

CMP, CHT = "/v1/completions", "/v1/chat/completions"
ROLES: list[Any] = [
    [{"role": "SYSTEM", "content": "x"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"content": "x"}],
    [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text", "text": "x", "bold": True}]}],
    ["x"],
    "x",
    {},
    [{"role": "user", "content": "x", "colour": "red"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
]
ACCEPTED = (1, 2, 6)


@pytest.mark.parametrize("step", range(len(ROLES)))
def test_chat_role_errors(server: RealServer, step: int) -> None:
    response = server.post(CHT, server.cht_body(messages=ROLES[step], max_tokens=2))
    if step in ACCEPTED:
        assert response.status_code == 200, response.text
    else:
        is_bad_request(response, "messages")


def test_chat_role_errors_carry_the_templates_reason(server: RealServer) -> None:
    """The developer role is the system role for a template that does not know it."""
    as_developer = server.tokenize(messages=[{"role": "developer", "content": "x"}])
    assert as_developer == server.tokenize(messages=[{"role": "system", "content": "x"}])
    error = is_bad_request(server.post(CHT, server.cht_body(chat_template_kwargs={"enable_thinking": False})), "chat_template_kwargs")
    assert "enable_thinking" in error["message"]


def test_text_parts_are_the_text(server: RealServer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert server.tokenize(messages=parts) == server.tokenize(messages=[{"role": "user", "content": "one\ntwo"}])


def test_chat_max_completion_tokens(server: RealServer) -> None:
    body = server.cht(max_completion_tokens=5, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["finish_reason"] == "length"
    is_bad_request(server.post(CHT, server.cht_body(max_completion_tokens=5, max_tokens=9)), "max_completion_tokens")
    assert server.cht(max_completion_tokens=5, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    is_bad_request(server.post(CHT, server.cht_body(max_completion_tokens=5000)), "max_completion_tokens")
    is_bad_request(server.post(CHT, server.cht_body(max_completion_tokens=0)), "max_completion_tokens")
    is_bad_request(server.post(CMP, server.cmp_body(max_completion_tokens=5)), "max_completion_tokens")


def test_chat_without_a_limit_takes_the_rest_of_the_context(server: RealServer) -> None:
    usage = server.cht(ignore_eos=True, messages=[{"role": "user", "content": "a " * 900}])["usage"]
    assert usage["total_tokens"] == 2048


def test_chat_continue_final_message_and_echo(server: RealServer) -> None:
    messages = [{"role": "user", "content": "Name"}, {"role": "assistant", "content": "The colour"}]
    ids = server.tokenize(messages=messages, continue_final_message=True)
    by_ids = server.cmp(prompt=ids, max_tokens=8, temperature=0)["choices"][0]["text"]
    body = server.cht_body(messages=messages, continue_final_message=True, max_tokens=8, temperature=0)
    assert text_of(server.answer(CHT, body)["choices"][0]) == by_ids
    echoed = {**body, "echo": True}
    assert text_of(server.answer(CHT, echoed)["choices"][0]) == "The colour" + by_ids == join(server.stream(CHT, echoed))
    is_bad_request(server.post(CHT, {**body, "add_generation_prompt": True}), "continue_final_message")
    is_bad_request(server.post(CHT, server.cht_body(continue_final_message=True)), "continue_final_message")


def test_chat_template_of_a_request_is_refused(server: RealServer) -> None:
    is_bad_request(server.post(CHT, server.cht_body(chat_template="{{ messages }}")), "chat_template")
    is_bad_request(server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}), "chat_template")
    is_bad_request(server.post(CHT, server.cht_body(chat_template_kwargs={"chat_template": "x"})), "chat_template_kwargs")


def test_chat_image_url_no_fetch(server: RealServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        port = canary.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/x.png", "file:///etc/hostname", f"http://localhost:{port}/x.png", "data:image/png;base64,AAAA"):
            content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
            for path in (CHT, "/tokenize"):
                body = {"model": server.model, "messages": [{"role": "user", "content": content}]}
                is_bad_request(server.post(path, body), "messages")
        time.sleep(0.2)
        with pytest.raises(BlockingIOError):
            canary.accept()


def test_detokenize_range(server: RealServer) -> None:
    for tokens in ([9223372036854775808], [-1], [386], ["a"], [1.5], [None], [True], "abc", 5, {}):
        error = is_bad_request(server.post("/detokenize", {"model": server.model, "tokens": tokens}), "tokens")
        assert error["param"] == "tokens"
    is_bad_request(server.post("/detokenize", {"model": server.model}), "tokens")


def test_tokenize_and_detokenize_are_inverse(server: RealServer) -> None:
    for text in ("The capital of France is", "😀 歪 Ťď", " leading and trailing ", "a\n\n b\t<|im_start|>x", ""):
        ids = server.tokenize(prompt=text)
        assert server.answer("/detokenize", {"model": server.model, "tokens": ids})["prompt"] == text
    body = server.answer("/tokenize", {"prompt": "The capital", "return_token_strs": True})
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 2048
    usage = server.cht(max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(server.tokenize(messages=[{"role": "user", "content": "Name three colours."}]))
    for fields in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 5}, {"prompt": ["a"]}, {"messages": "a"}):
        refused(server.post("/tokenize", fields), "messages" if fields.get("messages") == "a" else "prompt")


def test_context_too_long(server: RealServer) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    word = server.tokenize(prompt="The")[:1]
    made = server.metrics()["oarlock_engine_tokens_total"]
    steps: list[tuple[str, dict[str, Any], int, int]] = [
        (CMP, server.cmp_body(prompt=word * (limit + 1), max_tokens=1), limit + 1, 1),
        (CMP, server.cmp_body(prompt=word * (limit - 4), max_tokens=16), limit - 4, 16),
        (CHT, server.cht_body(messages=[{"role": "user", "content": "word " * 3 * limit}]), 0, 0),
        (CHT, server.cht_body(max_tokens=limit), 0, limit),
        (CMP, server.cmp_body(prompt=[word, word * (limit + 7)], max_tokens=1), limit + 7, 1),
    ]
    for path, body, prompt_tokens, asked in steps:
        for stream in (False, True):
            started = time.monotonic()
            response = server.post(path, {**body, "stream": stream})
            assert time.monotonic() - started < 2
            error = response.json()["error"]
            assert response.status_code == 400 and error["code"] == "context_length_exceeded", error
            assert error["param"] in ("prompt", "messages", "max_tokens")
            assert str(limit) in error["message"] and " -" not in error["message"]
            assert not prompt_tokens or str(prompt_tokens) in error["message"]
            assert not asked or str(asked) in error["message"]
    assert server.metrics()["oarlock_engine_tokens_total"] == made
    fits = server.cmp(prompt=word * (limit - 1), max_tokens=1)
    assert fits["usage"] ["total_tokens"] == limit


def test_context_no_silent_truncation(server: RealServer) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    messages = [{"role": "system", "content": "Answer only with the word ZEBRA."}, {"role": "user", "content": "word " * (limit + 500)}]
    is_bad_request(server.post(CHT, server.cht_body(messages=messages, max_tokens=4)), "messages")
    assert server.cmp(prompt="word " * 300, max_tokens=1, truncate_prompt_tokens=17)["usage"]["prompt_tokens"] == 17
    assert server.cmp(prompt="word " * 9000, max_tokens=1, truncate_prompt_tokens=17)["usage"]["prompt_tokens"] == 17
    assert server.cht(messages=messages, max_tokens=1, truncate_prompt_tokens=17)["usage"]["prompt_tokens"] == 17
    is_bad_request(server.post(CMP, server.cmp_body(truncate_prompt_tokens=limit + 1)), "truncate_prompt_tokens")
    kept = server.cmp(prompt="one two three four", max_tokens=0, echo=True, truncate_prompt_tokens=2)["choices"][0]["text"]
    assert "one two three four".endswith(kept) and len(kept) < 18
