"""/render says what the engine would get, after every check; /abort_requests ends open requests by their ids, on every route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from toy_frontend import says
from toy_server import MODEL, events, refused, strict, toy_server

pytestmark = pytest.mark.asyncio
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


async def test_a_chat_is_rendered_as_it_would_be_served() -> None:
    async with toy_server() as here:
        body = {"model": MODEL, "messages": HI, "temperature": 0.5, "stop": "x", "max_completion_tokens": 7, "request_id": "mine", "stream": True, "cache_salt": "s"}
        shown = strict((await here.http.post(CHAT + "/render", json=body)).text)
        assert shown["prompt"] == "[user]hi[assistant]" and bytes(shown["token_ids"]).decode() == shown["prompt"]
        assert (shown["request_id"], shown["model"], shown["stream"], shown["cache_salt"]) == ("chatcmpl-mine", MODEL, True, "s")
        params = shown["sampling_params"]
        assert (params["temperature"], params["stop"], params["max_tokens"]) == (0.5, ["x"], 7) and not here.engine.submitted
        await here.http.post(CHAT, json=body)
        (request,) = here.engine.submitted
        assert list(request.prompt_token_ids) == shown["token_ids"] and request.params.stop == ("x",) and request.params.max_tokens == 7
        open_ended = strict((await here.http.post(CHAT + "/render", json={"model": MODEL, "messages": HI})).text)
        assert open_ended["sampling_params"]["max_tokens"] == 64 - len(open_ended["token_ids"])


async def test_completions_are_rendered_each() -> None:
    async with toy_server() as here:
        shown = strict((await here.http.post(COMPLETION + "/render", json={"model": MODEL, "prompt": ["ax", "b"], "truncate_prompt_tokens": 1})).text)
        assert [(one["prompt"], one["token_ids"]) for one in shown] == [("ax", [120]), ("b", [98])]
        (one,) = strict((await here.http.post(COMPLETION + "/render", json={"model": MODEL, "prompt": [5, 6]})).text)
        assert (one["prompt"], one["token_ids"], one["sampling_params"]["max_tokens"]) == (None, [5, 6], 16)


async def test_what_the_route_refuses_is_refused_when_rendered() -> None:
    async with toy_server() as here:
        chat: list[tuple[dict[str, Any], str]] = [
            ({"messages": []}, "messages"), ({"surprise": 1}, "surprise"), ({"max_completion_tokens": 99}, "max_completion_tokens"), ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ]  # fmt: skip
        for fields, param in chat:
            for path in (CHAT, CHAT + "/render"):
                refused(await here.http.post(path, json={"model": MODEL, "messages": HI, **fields}), param)
        for fields, param in (({"prompt": "x" * 99}, "prompt"), ({"prompt": [999]}, "prompt"), ({"prompt": "a", "suffix": "b"}, "suffix")):
            refused(await here.http.post(COMPLETION + "/render", json={"model": MODEL, **fields}), param)
        refused(await here.http.post(CHAT + "/render", json={"model": "other", "messages": HI}), "model", 404)
        assert not here.state.open


async def test_an_abort_ends_a_request_by_each_of_its_ids() -> None:
    async with toy_server(says("a" * 50), step_s=0.02) as here:
        for ids, headers, fields in (
            (["mine"], {}, {"request_id": "mine"}), ("cmpl-mine", {}, {"request_id": "mine"}), (["theirs", "none"], {"X-Request-Id": "theirs"}, {}),
        ):  # fmt: skip
            for stream in (False, True):
                body = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "stream": stream, **fields}
                task = asyncio.create_task(here.http.post(COMPLETION, json=body, headers=headers))
                while not here.engine.open:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)
                answer = strict((await here.http.post("/abort_requests", json={"request_ids": ids})).text)
                asked = [ids] if type(ids) is str else ids
                assert answer == {"aborted": asked[:1], "not_found": asked[1:]}
                response = await task
                if stream:
                    *chunks, error, done = events(response)
                    assert chunks and error["error"]["code"] == "aborted" and done == "[DONE]"
                else:
                    assert refused(response, None, 409)["code"] == "aborted"
                while here.engine.open:
                    await asyncio.sleep(0.001)
                assert not here.state.open
        assert 'oarlock_requests_total{model_name="toy-model",outcome="abort"} 6.0' in (await here.http.get("/metrics")).text


async def test_an_abort_of_nothing() -> None:
    async with toy_server() as here:
        assert strict((await here.http.post("/abort_requests", json={"request_ids": ["a", "b"]})).text) == {"aborted": [], "not_found": ["a", "b"]}
        for wrong in ([], [1], 5, {}, [""] * 4097):
            refused(await here.http.post("/abort_requests", json={"request_ids": wrong}), "request_ids")
        refused(await here.http.post("/abort_requests", json={}), "request_ids")


async def test_a_key_ends_its_own_requests_only() -> None:
    async with toy_server(says("a" * 50), step_s=0.02, api_keys=("one", "two")) as here:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "request_id": "mine"}
        task = asyncio.create_task(here.http.post(COMPLETION, json=body, headers={"Authorization": "Bearer one"}))
        while not here.engine.open:
            await asyncio.sleep(0.001)
        for key, wanted in (("two", {"aborted": [], "not_found": ["mine"]}), ("one", {"aborted": ["mine"], "not_found": []})):
            response = await here.http.post("/abort_requests", json={"request_ids": "mine"}, headers={"Authorization": f"Bearer {key}"})
            assert strict(response.text) == wanted
        assert (await task).status_code == 409
