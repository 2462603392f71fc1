"""OpenAI's Python client: sync and async, whole and streamed, its helpers that parse, and its own kinds of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serving import NAME, oarlock

KEY = "client-key"
MESSAGES: Any = [{"role": "user", "content": "Write a long story about the sea."}]
ENDLESS: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
GREEDY: Any = {"model": NAME, "temperature": 0, "max_tokens": 24}
CHAT: Any = {**GREEDY, "messages": MESSAGES}


class Place(BaseModel):
    city: str
    population: int
    climate: Literal["cold", "mild", "hot"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


# ---------------------------------------------------------------- models
def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(NAME) == model and model.id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# ---------------------------------------------------------------- chat
def test_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert counts(chunks[-1].usage) == counts(whole.usage) and counts(whole.usage)[1] == 24
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason] == ["length"]


def test_a_stream_can_be_left(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**{**CHAT, **ENDLESS}, stream=True) as stream:
        next(iter(stream))


def test_n_seed_stop_and_logprobs(client: openai.OpenAI) -> None:
    given = {**CHAT, "temperature": 1.0, "n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2, "stop": ["."]}
    first, second = client.chat.completions.create(**given), client.chat.completions.create(**given)
    assert [choice.message.content for choice in first.choices] == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    for choice in first.choices:
        assert "." not in (choice.message.content or "") and choice.logprobs is not None and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)
        joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode("utf-8", "replace")
        assert joined.startswith(choice.message.content or "")


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    given = {**GREEDY, "max_tokens": 200, "messages": [{"role": "user", "content": "Describe Oslo as JSON."}], "response_format": Place}
    parsed = client.chat.completions.parse(**given).choices[0].message.parsed
    assert isinstance(parsed, Place)
    with client.chat.completions.stream(**given) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed and len(snapshots) > 5


def test_parse_says_when_the_answer_was_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**CHAT, "max_tokens": 3}, response_format=Place)


def test_the_stream_helper_counts_what_create_counts(client: openai.OpenAI) -> None:
    given = {**GREEDY, "messages": [{"role": "user", "content": "Name three colours."}]}  # ends by itself: the helper raises for an answer that was cut
    with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**given)
    assert final.choices[0].message.content == whole.choices[0].message.content and counts(final.usage) == counts(whole.usage)
    assert types.count("content.done") == 1 and "content.delta" in types


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"])
def test_a_call_that_is_asked_for_comes_parsed(client: openai.OpenAI, choice: Any) -> None:
    given = {**GREEDY, "max_tokens": 100, "messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": [TOOL], "tool_choice": choice}
    (call,) = client.chat.completions.parse(**given).choices[0].message.tool_calls or ()
    assert call.function.name == "get_weather" and isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**given) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.arguments for event in done] == [call.function.arguments]
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_call_and_its_result_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Weather in Oslo?"}]
    given = {**GREEDY, "max_tokens": 100, "tools": [TOOL]}
    message = client.chat.completions.create(**given, messages=messages, tool_choice="required").choices[0].message
    (call,) = message.tool_calls or ()
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": -3})}]
    answer = client.chat.completions.create(**given, messages=messages, tool_choice="none").choices[0].message
    assert answer.content and not answer.tool_calls


def test_raw_and_streamed_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "chatcmpl-mine"
    with client.chat.completions.with_streaming_response.create(**CHAT) as response:
        assert json.loads(response.read())["object"] == "chat.completion"
    assert client.chat.completions.create(**CHAT)._request_id


def test_fields_beyond_openais(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(**{**CHAT, "temperature": 1.0}, extra_body=extra)
    assert answer.choices[0].message.content in ("yes", "no")


# ---------------------------------------------------------------- completions
def test_completions_of_text_tokens_and_batches(client: openai.OpenAI) -> None:
    given = {**GREEDY, "prompt": "The capital of France is"}
    whole = client.completions.create(**given, echo=True, logprobs=1)
    choice = whole.choices[0]
    assert choice.text.startswith(given["prompt"]) and choice.logprobs is not None and choice.logprobs.token_logprobs
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens or ()) == whole.usage.total_tokens  # type: ignore[union-attr]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**given, stream=True))
    assert given["prompt"] + streamed == choice.text
    batch = client.completions.create(**{**given, "prompt": [given["prompt"], "Two plus two is"]})
    assert [each.index for each in batch.choices] == [0, 1] and batch.choices[0].text == streamed
    ids = client.completions.create(**{**given, "prompt": [504, 3575, 282, 4649, 314]})
    assert ids.usage is not None and ids.usage.prompt_tokens == 5


# ---------------------------------------------------------------- responses, files, batches
def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=NAME, input="Name three colours.", temperature=0, max_output_tokens=24)
    with client.responses.stream(model=NAME, input="Name three colours.", temperature=0, max_output_tokens=24) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == first.output_text and client.responses.retrieve(first.id) == first
    second = client.responses.create(model=NAME, input="And more?", previous_response_id=first.id, max_output_tokens=4)
    assert second.usage is not None and first.usage is not None and second.usage.input_tokens > first.usage.input_tokens


def test_batches(client: openai.OpenAI) -> None:
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 2 + i}} for i in range(3)]
    file = client.files.create(file=("requests.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    for _ in range(600):
        if (batch := client.batches.retrieve(batch.id)).status == "completed":
            break
        asyncio.run(asyncio.sleep(0.1))
    assert batch.status == "completed" and batch.output_file_id
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {each["custom_id"]: each["response"]["body"]["usage"]["completion_tokens"] for each in answers} == {"0": 2, "1": 3, "2": 4}


# ---------------------------------------------------------------- errors
def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**CHAT, "model": "other"})
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**CHAT, "temperature": 9})
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**{**CHAT, "max_tokens": 100_000})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        list(client.chat.completions.create(**{**CHAT, "temperature": 9}, stream=True))


def test_a_key() -> None:
    with oarlock(key=KEY) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as right:
            assert right.models.list().data


# ---------------------------------------------------------------- async
@pytest.mark.asyncio
async def test_async_requests_side_by_side(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**CHAT)

        async def streamed() -> str:
            stream = await client.chat.completions.create(**CHAT, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(streamed() for _ in range(6)), *(client.chat.completions.create(**CHAT) for _ in range(6)))
        assert {each if isinstance(each, str) else each.choices[0].message.content for each in answers} == {whole.choices[0].message.content}


@pytest.mark.asyncio
async def test_async_helpers(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        given: Any = {**GREEDY, "max_tokens": 200, "messages": [{"role": "user", "content": "Describe Oslo as JSON."}], "response_format": Place}
        parsed = (await client.chat.completions.parse(**given)).choices[0].message.parsed
        async with client.chat.completions.stream(**given) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert isinstance(parsed, Place) and final.choices[0].message.parsed == parsed
        async with client.responses.stream(model=NAME, input="Hello.", max_output_tokens=8) as responses:
            assert [event.type async for event in responses][-1] in ("response.completed", "response.incomplete")


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_ends_its_request(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        task = asyncio.create_task(client.chat.completions.create(**{**CHAT, **ENDLESS}))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
