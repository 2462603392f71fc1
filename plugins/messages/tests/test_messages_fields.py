"""Every field of the Messages API: what it does to the chat request, or the 400 that names it. Over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from oarlock_messages.routes import COUNT, CREATE, REFUSED, add
from toy_frontend import says
from toy_server import MODEL, Toy, named_events, strict, toy_server

pytestmark = pytest.mark.asyncio

BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
ODD: list[Any] = [True, 0, 1, -1, 129, 2**63, 10**400, 0.5, 2.5, 1e300, "", "x", "\x00", [], [1], ["x"], [""], [None], [{}], {}, {"x": {}}, {"type": "text"}, "auto"]


def refused(response: httpx.Response, param: str | None, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The error in Anthropic's envelope."""
    assert response.status_code == status, response.text[:500]
    body = strict(response.text)
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    error = body["error"]
    assert set(error) == {"type", "message", "param", "code"} and error["type"] == kind, error
    assert error["param"] == param and error["message"], error
    return error


async def create(toy: Toy, **fields: Any) -> httpx.Response:
    return await toy.http.post("/v1/messages", json={**BODY, **fields})


async def prompt_of(toy: Toy, **fields: Any) -> str:
    """What the model was given."""
    response = await create(toy, **fields)
    assert response.status_code == 200, response.text
    return bytes(toy.engine.submitted[-1].prompt_token_ids).decode()


async def test_a_message_and_its_parts() -> None:
    async with toy_server(says("hello"), routes=(add,)) as toy:
        response = await create(toy)
        message = strict(response.text)
        assert message == {
            "id": "msg_" + response.headers["x-request-id"], "type": "message", "role": "assistant", "model": MODEL,
            "content": [{"type": "text", "text": "hello", "citations": None}], "stop_reason": "end_turn", "stop_sequence": None,
            "usage": {"input_tokens": len("[user]hi[assistant]"), "output_tokens": 6},
        }  # fmt: skip
        assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_the_stream_has_exactly_this_sequence() -> None:
    async with toy_server(says("hey"), routes=(add,)) as toy:
        found = named_events(await create(toy, stream=True))
        types = [event["type"] for event in found]
        assert types == ["message_start", "ping", "content_block_start", *["content_block_delta"] * 3, "content_block_stop", "message_delta", "message_stop"]
        assert found[0]["message"]["content"] == [] and found[0]["message"]["usage"] == {"input_tokens": 19, "output_tokens": 0}
        assert found[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "", "citations": None}}
        assert "".join(event["delta"]["text"] for event in found[3:6]) == "hey"
        assert found[-2] == {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"input_tokens": 19, "output_tokens": 4}}


@pytest.mark.parametrize(
    ("fields", "text", "stop"),
    [
        ({"stop_sequences": ["lo"]}, "hel", ("stop_sequence", "lo")),
        ({"stop_sequences": ["x", "e"]}, "h", ("stop_sequence", "e")),
        ({"stop_sequences": ["he"]}, "", ("stop_sequence", "he")),
        ({"stop_sequences": []}, "hello", ("end_turn", None)),
        ({"max_tokens": 2}, "he", ("max_tokens", None)),
    ],
)
async def test_why_it_stopped_streamed_and_whole(fields: dict[str, Any], text: str, stop: tuple[str, str | None]) -> None:
    async with toy_server(says("hello"), routes=(add,)) as toy:
        whole = (await create(toy, **fields)).json()
        assert "".join(block["text"] for block in whole["content"]) == text and len(whole["content"]) == bool(text)
        assert (whole["stop_reason"], whole["stop_sequence"]) == stop
        found = named_events(await create(toy, **fields, stream=True))
        assert "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta") == text
        end = found[-2]
        assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == stop
        assert end["usage"] == whole["usage"]
        assert [event["type"] for event in found].count("content_block_start") == bool(text)


async def test_turns_become_the_prompt() -> None:
    async with toy_server(says("hello"), routes=(add,)) as toy:
        assert await prompt_of(toy) == "[user]hi[assistant]"
        assert await prompt_of(toy, system="Be brief.") == "[system]Be brief.[user]hi[assistant]"
        blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
        assert await prompt_of(toy, system=blocks) == "[system]a\nb[user]hi[assistant]"
        turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}, {"role": "assistant", "content": "c"}, BODY["messages"][0]]
        assert await prompt_of(toy, messages=turns) == "[user]a\nb[assistant]c[user]hi[assistant]"
        assert await prompt_of(toy, messages=turns[:3]) == "[user]a\nb[assistant]c", "the assistant's last turn is continued"


async def test_sampling_fields_reach_the_engine() -> None:
    async with toy_server(says("hello"), routes=(add,)) as toy:
        assert (await create(toy, temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["zz"], metadata={"user_id": "me"})).status_code == 200
        params = toy.engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens) == (0.25, 0.5, 7, ("zz",), 8)


async def test_count_tokens_is_what_create_bills() -> None:
    async with toy_server(says("hello"), routes=(add,)) as toy:
        for fields in ({}, {"system": "Be brief."}, {"messages": [*BODY["messages"], {"role": "assistant", "content": "ha"}]}):
            body = {**BODY, **fields}
            billed = (await toy.http.post("/v1/messages", json=body)).json()["usage"]["input_tokens"]
            del body["max_tokens"]
            counted = await toy.http.post("/v1/messages/count_tokens", json=body)
            assert counted.json() == {"input_tokens": billed}
        refused(await toy.http.post("/v1/messages/count_tokens", json=BODY), "max_tokens")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_no_value_of_any_field_is_ignored_or_breaks_the_server(path: str) -> None:
    table = CREATE if path == "/v1/messages" else COUNT
    body = {name: value for name, value in BODY.items() if name in table.fields}
    async with toy_server(says("hello"), routes=(add,)) as toy:
        for name in [*table.fields, *table.refused]:
            for value in ODD:
                response = await toy.http.post(path, content=json.dumps({**body, name: value}), headers={"Content-Type": "application/json"})
                if response.status_code == 200 or (name == "model" and response.status_code == 404):
                    continue
                assert response.status_code == 400, (name, value, response.text[:300])
                error = strict(response.text)["error"]
                assert str(error["param"]).partition(".")[0].partition("[")[0] == name, (name, value, error)
        nulls = {name: None for name in [*table.fields, *table.refused] if name not in table.required}
        assert (await toy.http.post(path, json={**nulls, **body})).status_code == 200
        assert not toy.engine.open and toy.state.num_prompts == 0


@pytest.mark.parametrize(("name", "value"), [(name, [{"x": 1}]) for name in REFUSED])
async def test_what_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    async with toy_server(routes=(add,)) as toy:
        refused(await create(toy, **{name: value}), name)
        assert not toy.engine.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://localhost:1/x"}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]}]}, "messages[0].content[0].cache_control"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": ["x"] * 999}, "stop_sequences"),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
async def test_bad_values_are_refused_with_their_path(fields: dict[str, Any], param: str) -> None:
    async with toy_server(routes=(add,)) as toy:
        for stream in (False, True):
            refused(await create(toy, **fields, stream=stream), param)
        assert not toy.engine.submitted


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
async def test_required_fields(name: str) -> None:
    async with toy_server(routes=(add,)) as toy:
        body = {key: value for key, value in BODY.items() if key != name}
        refused(await toy.http.post("/v1/messages", json=body), name)


async def test_errors_outside_the_fields_have_the_envelope_too() -> None:
    async with toy_server(routes=(add,)) as toy:
        refused(await create(toy, model="other"), "model", 404, "not_found_error")
        refused(await toy.http.post("/v1/messages", content=b"{", headers={"Content-Type": "application/json"}), None)
        refused(await toy.http.post("/v1/messages", content=b"{}", headers={"Content-Type": "text/plain"}), None)
        refused(await toy.http.get("/v1/messages"), None, 405)
        refused(await toy.http.get("/v1/messages/nothing"), None, 404, "not_found_error")
        assert "error" in (await toy.http.get("/v1/other")).json() and "type" not in (await toy.http.get("/v1/other")).json()


async def test_a_failed_step_is_an_error_in_either_form() -> None:
    async with toy_server(says("hello"), routes=(add,)) as toy:
        toy.engine.on_dead("the worker died")
        refused(await create(toy), None, 503, "overloaded_error")
        refused(await create(toy, stream=True), None, 503, "overloaded_error")


async def test_the_end_of_the_server_is_an_event_in_an_open_stream() -> None:
    async with toy_server(says("hello " * 9), step_s=0.02, routes=(add,), max_model_len=256) as toy:
        task = asyncio.create_task(create(toy, stream=True, max_tokens=40))
        while not toy.engine.open or toy.engine.num_steps < 3:
            await asyncio.sleep(0.01)
        toy.shut_down()
        found = named_events(await task)
        assert found[0]["type"] == "message_start" and found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] == "overloaded_error" and "message_stop" not in [event["type"] for event in found]
        assert toy.state.num_prompts == 0
        while toy.engine.open:
            await asyncio.sleep(0.01)
