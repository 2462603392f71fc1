"""LiteLLM as a library: the same calls through its providers for OpenAI's API, for vLLM and for Anthropic's, and its router."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel
from serving import NAME, oarlock

KEY = "client-key"
MESSAGES = [{"role": "user", "content": "Write a long story about the sea."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    city: str
    population: int


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def given(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    """What every call through one provider has."""
    base = url if request.param == "anthropic" else f"{url}/v1"
    return {"model": f"{request.param}/{NAME}", "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 24, "num_retries": 0}


@pytest.fixture
def openai_given(url: str) -> dict[str, Any]:
    return {"model": f"openai/{NAME}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 24, "num_retries": 0}


def test_an_answer_and_its_stream_say_the_same(given: dict[str, Any]) -> None:
    whole = litellm.completion(**given, messages=MESSAGES)
    assert whole.usage.completion_tokens == 24 and whole.choices[0].finish_reason == "length"
    chunks = list(litellm.completion(**given, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.total_tokens == whole.usage.total_tokens


def test_a_call_that_must_be_made(given: dict[str, Any]) -> None:
    asked = {**given, "max_tokens": 100, "messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": [TOOL], "tool_choice": "required"}
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city", "unit"}
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (streamed,) = rebuilt.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    messages = [*asked["messages"], {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "-3 degrees"})
    answer = litellm.completion(**{**asked, "messages": messages, "tool_choice": "none"})
    assert answer.choices[0].message.content


@pytest.mark.asyncio
async def test_async_requests_side_by_side(given: dict[str, Any]) -> None:
    async def streamed() -> str:
        stream = await litellm.acompletion(**given, messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole = await litellm.acompletion(**given, messages=MESSAGES)
    assert set(await asyncio.gather(*(streamed() for _ in range(6)))) == {whole.choices[0].message.content}


def test_a_schema(openai_given: dict[str, Any]) -> None:
    answer = litellm.completion(
        **{**openai_given, "max_tokens": 100}, messages=[{"role": "user", "content": "Describe Oslo as JSON."}], response_format=Place
    )
    assert Place.model_validate_json(answer.choices[0].message.content)


def test_fields_beyond_openais(openai_given: dict[str, Any]) -> None:
    answer = litellm.completion(**openai_given, messages=MESSAGES, extra_body={"top_k": 1, "structured_outputs": {"choice": ["yes", "no"]}})
    assert answer.choices[0].message.content in ("yes", "no")


def test_text_completion(openai_given: dict[str, Any]) -> None:
    asked = {**openai_given, "model": f"text-completion-openai/{NAME}"}
    whole = litellm.text_completion(**asked, prompt="The capital of France is", logprobs=1)
    assert whole.choices[0].text and len(whole.choices[0].logprobs.tokens) == 24
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, prompt="The capital of France is", stream=True)) == whole.choices[0].text


def test_errors_are_litellms_own_kinds(given: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**given, "model": given["model"].replace(NAME, "other")}, messages=MESSAGES)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**given, "temperature": 9}, messages=MESSAGES)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**given, "max_tokens": 100_000}, messages=MESSAGES)


def test_a_key() -> None:
    with oarlock(key=KEY) as url:
        for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
            asked = {"model": f"{provider}/{NAME}", "api_base": base, "messages": MESSAGES, "max_tokens": 2, "num_retries": 0}
            assert litellm.completion(**asked, api_key=KEY).choices[0].message.content
            with pytest.raises(litellm.AuthenticationError):
                litellm.completion(**asked, api_key="wrong")


def test_the_router_goes_on_to_a_replica_that_has_room(url: str) -> None:
    """A server that refuses with 429, because its queue is full, beside one that answers."""
    with oarlock("--max-num-seqs", "1", "--max-num-queued-reqs", "1") as small:
        deployments = [
            {"model_name": "chat", "litellm_params": {"model": f"openai/{NAME}", "api_base": f"{base}/v1", "api_key": "none", "order": order}}
            for order, base in enumerate((small, url), start=1)
        ]
        router = litellm.Router(model_list=deployments, num_retries=2, enable_pre_call_checks=True)
        holder = litellm.completion(
            model=f"openai/{NAME}", api_base=f"{small}/v1", api_key="none", messages=MESSAGES, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(holder))
        with pytest.raises(litellm.RateLimitError):
            litellm.completion(model=f"openai/{NAME}", api_base=f"{small}/v1", api_key="none", messages=MESSAGES, max_tokens=2, num_retries=0)
        answer = router.completion(model="chat", messages=MESSAGES, max_tokens=4)
        assert answer.choices[0].message.content and answer._hidden_params["api_base"].startswith(url)
        holder.completion_stream.close()
