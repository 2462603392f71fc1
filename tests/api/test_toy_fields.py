"""Every field of every route with values of every kind: an answer or a 400 that names the field, never anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from oarlock.server.jsonbody import MAX_BRACKETS
from oarlock.server.schema import CHAT, COMPLETIONS, DETOKENIZE, FOREIGN, TOKENIZE
from toy_frontend import says
from toy_server import MODEL, refused, strict, toy_server

pytestmark = pytest.mark.asyncio

ODD: list[Any] = [
    True, False, 0, 1, -1, 2, 7, 64, 129, 10**6, 2**31, -(2**63), 2**63, 10**30, 10**400, 0.0, 0.5, 1.0, -0.5, 2.5, 1e-300, 1e300, "", "x", "5", "\x00", "\u2028",
    "x" * 5000, [], [1], [-1], [1.5], ["x"], [""], [None], [[]], [[1]], [{}], [True], [2**70], {}, {"1": 1}, {"-1": 1}, {"x": {}}, {"type": "text"}, "never", "auto",
]  # fmt: skip
# Fields whose wrong value may be laid to another field that it does not go with.
PARTNERS = {
    "best_of": {"n"}, "n": {"best_of"}, "use_beam_search": {"n", "best_of"}, "temperature": {"n"}, "logprobs": {"top_logprobs"}, "top_logprobs": {"logprobs"},
    "echo": {"max_tokens"}, "max_completion_tokens": {"max_tokens"}, "add_generation_prompt": {"continue_final_message"}, "truncate_prompt_tokens": {"max_tokens"},
    "ignore_eos": set(), "add_special_tokens": {"prompt"}, "length_penalty": set(), "messages": {"prompt"},
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize(("path", "table"), [*zip(BASES, (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE), strict=True)], ids=BASES)
async def test_no_value_of_any_field_is_ignored_or_breaks_the_server(path: str, table: Any) -> None:
    async with toy_server(says("hello")) as toy:
        for name in [*table.fields, *table.refused]:
            for value in ODD:
                response = await toy.http.post(path, content=json.dumps({**BASES[path], name: value}), headers={"Content-Type": "application/json"})
                if response.status_code == 200:
                    if not response.headers["content-type"].startswith("text/event-stream"):
                        strict(response.text)
                    continue
                if name == "model" and response.status_code == 404:
                    continue
                assert response.status_code == 400, (name, value, response.text[:300])
                param = strict(response.text)["error"]["param"]
                own = param == name or str(param).startswith((name + ".", name + "["))
                assert own or param in PARTNERS.get(name, ()), (name, value, response.text[:300])
        assert not toy.engine.open and toy.state.num_prompts == 0


@pytest.mark.parametrize("path", BASES)
async def test_null_is_the_same_as_absent(path: str) -> None:
    table = dict(zip(BASES, (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE), strict=True))[path]
    async with toy_server(says("hello")) as toy:
        nulls = {name: None for name in [*table.fields, *table.refused] if name not in BASES[path]}
        response = await toy.http.post(path, json={**BASES[path], **nulls})
        assert response.status_code == 200, response.text
        for name in table.required:
            refused(await toy.http.post(path, json={**BASES[path], name: None}), name)


async def test_foreign_names_say_the_right_one() -> None:
    async with toy_server() as toy:
        for path, table in (("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHAT)):
            for name, right in FOREIGN.items():
                if name not in table.fields:
                    error = refused(await toy.http.post(path, json={**BASES[path], name: 5}), name)
                    here = "messages" if right == "prompt" and table is CHAT else right
                    assert here in error["message"]


async def test_a_body_of_a_million_small_things_is_refused_at_once() -> None:
    async with toy_server() as toy:
        content = b'{"x":[' + b"[]," * MAX_BRACKETS + b"[]]}"
        refused(await toy.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}), None)


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        ("/v1/chat/completions", "prompt", "hi", "it belongs to /v1/completions, and this is /v1/chat/completions, which takes messages."),
        ("/v1/completions", "messages", [], "it belongs to /v1/chat/completions, and this is /v1/completions, which takes prompt."),
        ("/v1/completions", "chat_template", "x", "it belongs to /v1/chat/completions, and this is /v1/completions."),
        ("/v1/completions", "max_completion_tokens", 3, "here this is max_tokens."),
        ("/v1/completions", "top_logprobs", 3, "here this is logprobs."),
        ("/v1/chat/completions", "inputs", "hi", "here this is messages."),
        ("/v1/completions", "inputs", "hi", "here this is prompt."),
        ("/v1/chat/completions", "suffix", "x", "leave it out"),
    ],
)
async def test_a_field_of_another_route_or_server_says_what_stands_for_it_here(path: str, field: str, value: Any, words: str) -> None:
    async with toy_server(says("hello")) as toy:
        for body in (BASES[path] | {field: value}, {"model": MODEL, field: value}):
            error = refused(await toy.http.post(path, json=body), field)
            assert words in error["message"], error


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/nothing-like-it", "Routes are /abort_requests"),
        ("/", "Routes are /abort_requests"),
        ("/chat/completions", "Did you mean POST /v1/chat/completions?"),
        ("/completions", "Did you mean POST /v1/completions?"),
        ("/v1/v1/chat/completions", "Did you mean POST /v1/chat/completions?"),
        ("/v1/chat/completions/", "Did you mean POST /v1/chat/completions?"),
        ("/v1/chat", "Did you mean POST /v1/chat/completions?"),
        ("/v1/complete", "Did you mean POST /v1/completions?"),
        ("/model", "Did you mean GET /v1/models?"),
        ("/v1/embeddings", "pip install ./plugins/pooling"),
        ("/v1/audio/speech", "this version has no audio"),
        ("/v1/responses", "the plugin oarlock-responses serves it"),
        ("/v1/messages", "the plugin oarlock-messages serves it"),
        ("/docs", "this version has no documentation page (/openapi.json"),
    ],
)
async def test_an_unknown_path_is_named_with_the_nearest_route(path: str, words: str) -> None:
    async with toy_server(says("hello")) as toy:
        for method in ("GET", "POST"):
            response = await toy.http.request(method, path)
            error = refused(response, None, status=404)
            assert error["code"] == "not_found" and f"no route {path} here" in error["message"] and words in error["message"], error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", "/ping", "GET, POST"), ("POST", "/v1/models/x", "GET")],
)
async def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allowed: str) -> None:
    async with toy_server(says("hello")) as toy:
        response = await toy.http.request(method, path)
        error = refused(response, None, status=405)
        assert error["message"] == f"{path} takes {allowed}, not {method}." and response.headers["allow"] == allowed
