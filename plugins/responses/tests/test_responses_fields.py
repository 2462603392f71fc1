"""Every field of the Responses API, its store and its background work, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import oarlock_responses
import openai
import pytest
from oarlock_responses import routes
from oarlock_responses.fields import CREATE, LOGPROBS, REFUSED
from oarlock_responses.shape import Draft
from oarlock_responses.store import Store
from real_server import ok
from toy_frontend import says
from toy_server import MODEL, Toy, named_events, refused, strict, toy_server

pytestmark = pytest.mark.asyncio

BODY: dict[str, Any] = {"model": MODEL, "input": "hi"}
ODD: list[Any] = [True, 0, 1, -1, 129, 2**63, 10**400, 0.5, 2.5, 1e300, "", "x", "\x00", [], [1], ["x"], [""], [None], [{}], {}, {"x": {}}, {"type": "text"}, "auto"]


def toy(max_stored: int = 1000, **settings: Any) -> Any:
    """A server with the plugin's routes and a store of this size."""
    options = {"responses_max_stored": max_stored, "responses_max_stored_mib": 1}
    return toy_server(says(settings.pop("text", "hello")), options=options, routes=(routes.add,), **settings)


async def create(here: Toy, **fields: Any) -> httpx.Response:
    return await here.http.post("/v1/responses", json={**BODY, **fields})


async def made(here: Toy, **fields: Any) -> dict[str, Any]:
    return ok(await create(here, **fields))


def prompt_of(here: Toy) -> str:
    return bytes(here.engine.submitted[-1].prompt_token_ids).decode()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    found = named_events(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def text_of(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    return part["text"]


def same(response: dict[str, Any]) -> dict[str, Any]:
    """All but ids and times."""
    output = [{**item, "id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_a_response_and_its_parts() -> None:
    async with toy() as here:
        response = await made(here, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
        assert prompt_of(here) == "[system]Be brief.[user]hi[assistant]"
        assert (response["object"], response["status"], response["model"], response["store"]) == ("response", "completed", MODEL, True)
        assert response["id"].startswith("resp_") and response["id"] != "resp_" + "x"
        (item,) = response["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
        assert response["usage"]["input_tokens"] == len(prompt_of(here)) and response["usage"]["output_tokens"] == 6
        assert response["instructions"] == "Be brief." and response["metadata"] == {"a": "b"} and response["temperature"] == 0.5


async def test_the_stream_has_exactly_this_sequence_and_ends_with_the_whole_response() -> None:
    async with toy(text="hey") as here:
        whole = await made(here)
        found = events(await create(here, stream=True))
        names = [event["type"].removeprefix("response.") for event in found]
        assert names == [
            "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3, "output_text.done", "content_part.done",
            "output_item.done", "completed",
        ]  # fmt: skip
        assert "".join(event["delta"] for event in found[4:7]) == found[7]["text"] == text_of(whole) == "hey"
        assert same(found[-1]["response"]) == same(whole)
        assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
        assert len({event["item_id"] for event in found if "item_id" in event} | {found[2]["item"]["id"], found[-1]["response"]["output"][0]["id"]}) == 1
        kept = await here.http.get(f"/v1/responses/{found[-1]['response']['id']}")
        assert kept.json() == found[-1]["response"]


async def test_a_limit_makes_it_incomplete() -> None:
    async with toy() as here:
        for response in (await made(here, max_output_tokens=2), events(await create(here, max_output_tokens=2, stream=True))[-1]["response"]):
            assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert text_of(response) == "he" and response["output"][0]["status"] == "incomplete"


async def test_logprobs_streamed_and_whole() -> None:
    async with toy(text="hey") as here:
        fields = {"include": [LOGPROBS], "top_logprobs": 2}
        (part,) = (await made(here, **fields))["output"][0]["content"]
        assert "".join(entry["token"] for entry in part["logprobs"][:3]) == "hey" and all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        found = events(await create(here, **fields, stream=True))
        streamed = [entry for event in found if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
        assert streamed == part["logprobs"] == found[-1]["response"]["output"][0]["content"][0]["logprobs"]
        refused(await create(here, top_logprobs=2), "top_logprobs")
        refused(await create(here, include=[LOGPROBS], top_logprobs=99), "top_logprobs")
        refused(await create(here, include=["file_search_call.results"]), "include")


async def test_items_become_the_prompt() -> None:
    async with toy() as here:
        await made(here, input=[{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]}])
        assert prompt_of(here) == "[system]d[user]u[assistant]"
        answer = (await made(here))["output"]
        await made(here, input=[{"role": "user", "content": "a"}, *answer, {"role": "user", "content": [{"type": "input_text", "text": t} for t in "bc"]}])
        assert prompt_of(here) == "[user]a[assistant]hello[user]b\nc[assistant]"


async def test_a_conversation_goes_on_from_a_stored_response() -> None:
    async with toy(max_model_len=256) as here:
        first = await made(here, instructions="Once.")
        second = events(await create(here, previous_response_id=first["id"], input="more", stream=True))[-1]["response"]
        assert prompt_of(here) == "[user]hi[assistant]hello[user]more[assistant]", "instructions are of one request"
        third = await made(here, previous_response_id=second["id"], input="end", instructions="New.")
        assert prompt_of(here) == "[system]New.[user]hi[assistant]hello[user]more[assistant]hello[user]end[assistant]"
        assert third["previous_response_id"] == second["id"]
        await here.http.delete(f"/v1/responses/{first['id']}")
        assert (await create(here, previous_response_id=second["id"])).status_code == 200, "what came before is kept with it"


async def test_retrieve_and_delete() -> None:
    async with toy() as here:
        response = await made(here)
        path = f"/v1/responses/{response['id']}"
        assert (await here.http.get(path)).json() == response
        refused(await here.http.get(path + "?stream=true"), "stream")
        refused(await here.http.get(path + "?include=x"), "include")
        refused(await here.http.post(path + "/cancel"), "response_id")
        assert (await here.http.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
        for gone in (await here.http.get(path), await here.http.delete(path), await here.http.post(path + "/cancel")):
            assert refused(gone, "response_id", 404)["code"] == "response_not_found"
        error = refused(await create(here, previous_response_id=response["id"]), "previous_response_id")
        assert error["code"] == "previous_response_not_found" and "--responses-max-stored" in error["message"]


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with toy() as here:
        for response in (await made(here, store=False), events(await create(here, store=False, stream=True))[-1]["response"]):
            assert response["store"] is False
            refused(await here.http.get(f"/v1/responses/{response['id']}"), "response_id", 404)


async def test_the_store_keeps_the_last_ones() -> None:
    async with toy(3) as here:
        ids = [(await made(here))["id"] for _ in range(5)]
        found = [(await here.http.get(f"/v1/responses/{key}")).status_code for key in ids]
        assert found == [404, 404, 200, 200, 200]


async def test_a_server_that_keeps_none_says_so() -> None:
    async with toy(0) as here:
        assert (await made(here))["store"] is False
        for fields, param in (({"store": True}, "store"), ({"background": True}, "background"), ({"previous_response_id": "resp_1"}, "previous_response_id")):
            assert "--responses-max-stored 0" in refused(await create(here, **fields), param)["message"]


async def test_the_store_is_bounded_in_bytes() -> None:
    store = Store(100, 60_000)
    for number in range(20):
        store.put(routes.Stored({"id": f"r{number}", "status": "completed"}, ({"role": "user", "content": "x" * 2000},)))
        assert store.size <= 60_000
    assert 2 <= len(store) <= 6 and store.find("r19") is not None and store.find("r0") is None
    store.put(routes.Stored({"id": "huge", "status": "completed"}, ({"role": "user", "content": "x" * 100_000},)))
    assert store.find("huge") is None and store.size <= 60_000
    for key in [f"r{number}" for number in range(20)]:
        if store.find(key) is not None:
            store.drop(key)
    assert store.size == 0


async def test_all_that_a_stored_response_repeats_is_counted() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}
    repeated: dict[str, Any] = {
        "tools": [{"type": "function", "name": "f", "parameters": schema}], "text": {"format": {"type": "json_schema", "schema": schema}}, "instructions": "x" * 9000,
        "metadata": {f"k{n}": "v" * 512 for n in range(16)}, "user": ["u" * 100] * 100,
    }  # fmt: skip
    responses = [Draft({name: value}, MODEL, stored=True).response for name, value in repeated.items()]
    async with toy(text="hello" * 10) as here:
        responses.append(await made(here, include=[LOGPROBS], top_logprobs=20))
    for response in responses:
        store = Store(10, 1 << 20)
        store.put(routes.Stored(response))
        assert store.size >= 2 * len(json.dumps(response)) > 16_000


async def wait_for(here: Toy, key: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while (found := (await here.http.get(f"/v1/responses/{key}")).json())["status"] != status:
            await asyncio.sleep(0.01)
    return found


async def test_a_background_response_is_made_without_its_client() -> None:
    async with toy(step_s=0.1) as here:
        first = await made(here, background=True)
        assert first["status"] == "in_progress" and first["background"] is True and first["output"] == []
        refused(await create(here, previous_response_id=first["id"]), "previous_response_id")
        done = await wait_for(here, first["id"], "completed")
        assert text_of(done) == "hello" and done["usage"]["output_tokens"] == 6
        assert (await here.http.post(f"/v1/responses/{first['id']}/cancel")).json() == done, "too late"
        await made(here, previous_response_id=first["id"], input="x")
        assert prompt_of(here) == "[user]hi[assistant]hello[user]x[assistant]"


async def test_a_background_response_is_cancelled_or_deleted_in_the_engine_too() -> None:
    async with toy(text="hello " * 20, step_s=0.02, max_model_len=256) as here:
        for method, path in (("POST", "/cancel"), ("DELETE", "")):
            key = (await made(here, background=True))["id"]
            assert here.engine.open and here.state.num_prompts == 1
            answer = await here.http.request(method, f"/v1/responses/{key}{path}")
            assert answer.status_code == 200
            async with asyncio.timeout(5):
                while here.engine.open or here.state.num_prompts:
                    await asyncio.sleep(0.01)
            assert (await here.http.get(f"/v1/responses/{key}")).status_code == (200 if path else 404)
            if path:
                assert answer.json()["status"] == "cancelled" == (await here.http.get(f"/v1/responses/{key}")).json()["status"]
                refused(await create(here, previous_response_id=key), "previous_response_id")


async def test_what_is_wrong_with_a_background_response_is_told_at_once_and_not_kept() -> None:
    async with toy(1) as here:
        refused(await create(here, background=True, temperature=5), "temperature")
        refused(await create(here, background=True, input="x" * 5000), "input")
        refused(await create(here, background=True, stream=True), "background")
        refused(await create(here, background=True, store=False), "store")
        assert (await made(here, background=True))["id"]


async def test_open_responses_are_not_dropped_for_new_ones() -> None:
    async with toy(1, text="hello " * 20, step_s=0.05, max_model_len=256) as here:
        key = (await made(here, background=True))["id"]
        response = await create(here, background=True)
        assert refused(response, None, 429)["code"] == "queue_full" and response.headers["retry-after"]
        assert (await here.http.post(f"/v1/responses/{key}/cancel")).status_code == 200
        assert (await made(here, background=True))["id"] != key


async def test_the_end_of_the_server_fails_what_is_open() -> None:
    async with toy(text="hello " * 20, step_s=0.02, max_model_len=256) as here:
        key = (await made(here, background=True))["id"]
        task = asyncio.create_task(create(here, stream=True))
        while len(here.engine.open) < 2 or here.engine.num_steps < 30:
            await asyncio.sleep(0.01)
        here.shut_down()
        last = events(await task)[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        for response in (last["response"], await wait_for(here, key, "failed")):
            assert response["error"]["code"] == "server_error" and "shutting down" in response["error"]["message"]


async def test_truncation_auto_leaves_out_the_oldest_turns() -> None:
    async with toy() as here:  # a context of 64 tokens
        turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"{n:05}"} for n in range(9)]
        refused(await create(here, input=turns), "input")
        response = await made(here, input=turns, truncation="auto", max_output_tokens=8)
        assert prompt_of(here) == "[user]00006[assistant]00007[user]00008[assistant]"
        await made(here, previous_response_id=response["id"], input="x", truncation="auto", max_output_tokens=6)
        assert prompt_of(here) == "[user]00008[assistant]hello[user]x[assistant]"
        refused(await create(here, input=[*turns, {"role": "user", "content": "x" * 99}], truncation="auto"), "input")
        await made(here, input=[{"role": "system", "content": "sys"}, *turns], truncation="auto", max_output_tokens=8)
        assert prompt_of(here) == "[system]sys[user]00008[assistant]"


async def test_no_value_of_any_field_is_ignored_or_breaks_the_server() -> None:
    partners = {"top_logprobs": {"include"}, "background": {"store"}, "store": {"background"}}
    async with toy() as here:
        for name in [*CREATE.fields, *CREATE.refused]:
            for value in ODD:
                response = await here.http.post("/v1/responses", content=json.dumps({**BODY, name: value}), headers={"Content-Type": "application/json"})
                if response.status_code == 200 or (name == "model" and response.status_code == 404):
                    continue
                assert response.status_code == 400, (name, value, response.text[:300])
                error = strict(response.text)["error"]
                root = str(error["param"]).partition(".")[0].partition("[")[0]
                assert root == name or root in partners.get(name, ()), (name, value, error)
        nulls = {name: None for name in [*CREATE.fields, *CREATE.refused]}
        assert (await here.http.post("/v1/responses", json={**nulls, **BODY})).status_code == 200
        async with asyncio.timeout(5):
            while here.engine.open or here.state.num_prompts:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    async with toy() as here:
        refused(await create(here, **{name: [{"x": 1}]}), name)
        assert not here.engine.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://localhost:1/x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),  # the template knows no tools
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ],
)
async def test_bad_values_are_refused_with_their_path(fields: dict[str, Any], param: str) -> None:
    async with toy() as here:
        for stream in (False, True):
            refused(await create(here, **fields, stream=stream), param)
        assert not here.engine.submitted


async def test_other_refusals() -> None:
    async with toy() as here:
        refused(await create(here, model="other"), "model", 404)
        refused(await create(here, stream_options={"include_obfuscation": False}), "stream_options")
        refused(await create(here, stream=True, stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation")
        refused(await create(here, stream=True, stream_options={"include_usage": True}), "stream_options.include_usage")
        refused(await here.http.post("/v1/responses", json={"model": MODEL}), "input")
        refused(await here.http.get("/v1/responses"), None, 405)
        assert (await create(here, stream=True, stream_options={"include_obfuscation": False})).status_code == 200


async def test_the_client_s_stream_helper_has_the_whole_response_at_the_end() -> None:
    async with toy() as here, openai.AsyncOpenAI(api_key="x", base_url="http://toy/v1", http_client=here.http, max_retries=0) as client:
        whole = await client.responses.create(model=MODEL, input="hi")
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == whole.output_text == "hello"
        assert (final.status, final.usage) == (whole.status, whole.usage) and (await client.responses.retrieve(final.id)).output_text == "hello"
        chunks = [chunk.type async for chunk in await client.responses.create(model=MODEL, input="hi", stream=True)]
        assert chunks[-1] == "response.completed"


async def test_reasoning_that_the_server_tells_apart_is_an_item_before_the_message() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}
    message = {"content": "Yes.", "reasoning_content": "Hm."}
    whole, streamed = (Draft({}, "m", stored=False) for _ in range(2))
    whole.take_whole({"choices": [{"message": message, "logprobs": None, "finish_reason": "stop"}], "usage": usage})
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "H"}, {"reasoning_content": "m."}, {"content": "Yes"}, {"content": "."}]
    events = streamed.opening()
    for delta in deltas:
        events += streamed.take({"choices": [{"delta": delta, "logprobs": None, "finish_reason": None}]})
    streamed.take({"choices": [{"delta": {}, "logprobs": None, "finish_reason": "stop"}], "usage": usage})
    events += [*streamed.closing(), streamed.ended()]
    assert [event["type"].removeprefix("response.") for _, event in events] == [
        "created", "in_progress", "output_item.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["output_index"] for _, event in events if "output_index" in event] == [0] * 5 + [1] * 7
    assert same(whole.response) == same(streamed.response)
    assert [item["type"] for item in whole.response["output"]] == ["reasoning", "message"]
    assert whole.response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}] and whole.message == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(("options", "words"), [({"responses_max_stored": -1}, "--responses-max-stored is -1"), ({"responses_max_stored_mib": 0}, "--responses-max-stored-mib is 0"), ({}, "")])
async def test_options_beyond_their_bounds_are_said_before_the_model_is_read(options: dict[str, Any], words: str) -> None:
    problems = oarlock_responses.check_model(None, SimpleNamespace(device=SimpleNamespace(options=options)), None)
    assert len(problems) == bool(words) and all(words in problem.text for problem in problems)
