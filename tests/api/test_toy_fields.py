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
                    assert right in error["message"]


async def test_a_body_of_a_million_small_things_is_refused_at_once() -> None:
    async with toy_server() as toy:
        content = b'{"x":[' + b"[]," * MAX_BRACKETS + b"[]]}"
        refused(await toy.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}), None)
