"""Anthropic's Python client: messages whole and streamed, tools, counting, async, and its own kinds of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from serving import NAME, oarlock

KEY = "client-key"
GIVEN: Any = {"model": NAME, "max_tokens": 24, "extra_body": {"temperature": 0}, "messages": [{"role": "user", "content": "Write a long story about the sea."}]}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
CALL: Any = {**GIVEN, "max_tokens": 100, "messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": [TOOL]}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_and_its_stream_say_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**GIVEN)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    with client.messages.stream(**GIVEN) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final) and text
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)
    types = [event.type for event in client.messages.create(**GIVEN, stream=True)]
    assert types[0] == "message_start" and types[-1] == "message_stop"


def test_a_stream_can_be_left(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**{**GIVEN, "max_tokens": 2000}) as stream:
        next(iter(stream.text_stream))


def test_system_stop_sequences_and_the_beginning_of_the_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**{**GIVEN, "max_tokens": 200}, system=[{"type": "text", "text": "Be brief."}], stop_sequences=["the"])
    assert whole.stop_reason == "stop_sequence" and whole.stop_sequence == "the" and "the" not in text_of(whole)
    begun = [*GIVEN["messages"], {"role": "assistant", "content": "Once upon a time"}]
    assert text_of(client.messages.create(**{**GIVEN, "messages": begun}))


def test_counting(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=NAME, messages=CALL["messages"], tools=[TOOL]).input_tokens
    assert counted == client.messages.create(**{**CALL, "max_tokens": 1}).usage.input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_a_tool_that_must_be_used(client: anthropic.Anthropic, choice: Any) -> None:
    whole = client.messages.create(**CALL, tool_choice=choice)
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    assert whole.stop_reason == "tool_use" and use.name == "get_weather" and set(use.input) == {"city", "unit"}
    with client.messages.stream(**CALL, tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input] and json.loads("".join(pieces)) == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "-3 degrees"}
    messages = [*CALL["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**CALL, "messages": messages}, tool_choice={"type": "none"})
    assert answer.stop_reason in ("end_turn", "max_tokens") and text_of(answer)


def test_raw_responses_and_ids(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(**GIVEN, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["request-id"] == "mine" and raw.parse().id == "msg_mine"
    assert client.messages.create(**GIVEN)._request_id


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_errors_are_the_clients_own_kinds(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**GIVEN, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        client.messages.create(**{**GIVEN, "extra_body": {"temperature": 2}})
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError), client.messages.stream(**{**GIVEN, "max_tokens": 100_000}):
        pass


def test_a_key() -> None:
    with oarlock(key=KEY) as url:
        with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as wrong, pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**GIVEN)
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as right:
            assert right.messages.create(**GIVEN).content
        with anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0) as bearer:
            assert bearer.messages.create(**GIVEN).content


@pytest.mark.asyncio
async def test_async_requests_side_by_side(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**GIVEN)

        async def streamed() -> str:
            async with client.messages.stream(**GIVEN) as stream:
                return "".join([text async for text in stream.text_stream])

        assert set(await asyncio.gather(*(streamed() for _ in range(6)))) == {text_of(whole)}


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_ends_its_request(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        given = {**GIVEN, "max_tokens": 3000, "messages": [{"role": "user", "content": "Write a long story about the sea, with many characters, in ten chapters."}]}
        task = asyncio.create_task(client.messages.create(**given))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
