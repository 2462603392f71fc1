"""Tools and thinking of the Messages API over a chat route whose answers are written down here, as docs/http.md says they look."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from oarlock.backend_api import EventReply, JsonReply, Route, RouteCall, RouteError
from oarlock_messages.routes import add

pytestmark = pytest.mark.asyncio

WEATHER = {"name": "weather", "description": "Of a town.", "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}}}
TOLD = {"type": "function", "function": {"name": "weather", "description": "Of a town.", "parameters": WEATHER["input_schema"]}}
USER = {"role": "user", "content": "Oslo?"}


class Chat:
    """A server whose chat route answers `deltas`, and keeps what it was asked."""

    model_names, max_model_len, vocab_size, max_body_bytes, allow_unknown_fields = ("m",), 100, 100, 1000, False
    options: Mapping[str, Any] = {}
    post_paths = frozenset({"/v1/chat/completions"})

    def __init__(self, *deltas: dict[str, Any], reason: str = "stop", error: RouteError | None = None) -> None:
        self.deltas, self.reason, self.error = deltas, reason, error
        self.asked: dict[str, Any] = {}
        self.routes: dict[str, Route] = {}
        add(self)

    def add(self, route: Route) -> None:
        self.routes[route.path] = route

    async def call(self, path: str, body: Mapping[str, Any], request_id: str) -> Any:
        self.asked = dict(body)
        if self.error:
            raise self.error
        if path == "/tokenize":
            return {"count": 5}
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for delta in self.deltas:
            message |= {name: (message.get(name) or "") + text for name, text in delta.items()}
        return {"choices": [{"message": message, "finish_reason": self.reason, "stop_reason": None}], "usage": usage(3)}

    async def stream(self, path: str, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Any, None]:
        self.asked = dict(body)
        if self.error:
            raise self.error
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": usage(0)}
        for number, delta in enumerate(self.deltas):
            yield {"choices": [{"delta": delta, "finish_reason": None}], "usage": usage(number)}
        yield {"choices": [{"delta": {}, "finish_reason": self.reason, "stop_reason": None}], "usage": usage(3)}
        yield {"choices": [], "usage": usage(3)}

    async def ask(self, path: str = "/v1/messages", **values: Any) -> Any:
        given = {"model": "m", "max_tokens": 50, "messages": [USER], **values}
        reply = await self.routes[path].endpoint(RouteCall("id", given, b"", "", {}, {}))
        if isinstance(reply, EventReply):
            return [event async for event in reply.events]
        assert isinstance(reply, JsonReply)
        return reply.value

    async def prompt(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        """The chat messages that these become."""
        await self.ask(messages=list(messages))
        return self.asked["messages"]


def usage(completion: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": completion}


def called(number: int, name: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": number, "id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": ""}}]}


def arguments(number: int, text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


DELTAS = (
    {"reasoning_content": "Hm", "reasoning": "Hm"}, {"reasoning_content": ".", "reasoning": "."}, {"content": "I"}, {"content": " ask."},
    called(0, "weather"), arguments(0, '{"town"'), arguments(0, ': "Oslo"}'), called(1, "weather"), arguments(1, "{}"), called(2, "time"),
)  # fmt: skip
BLOCKS = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "I ask.", "citations": None},
    {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"town": "Oslo"}},
    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
    {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
]


async def test_calls_are_blocks_whole_and_streamed() -> None:
    chat = Chat(*DELTAS, reason="tool_calls")
    whole = await chat.ask(tools=[WEATHER])
    assert whole["content"] == BLOCKS and whole["stop_reason"] == "tool_use" and whole["usage"] == {"input_tokens": 7, "output_tokens": 3}
    assert chat.asked["tools"] == [TOLD]
    events = await chat.ask(tools=[WEATHER], stream=True)
    assert all(name == value["type"] for name, value in events)
    starts = [value["content_block"] for name, value in events if name == "content_block_start"]
    assert [block["type"] for block in starts] == [block["type"] for block in BLOCKS] and all(block.get("input", {}) == {} for block in starts)
    assert [value["index"] for name, value in events if name == "content_block_start"] == [value["index"] for name, value in events if name == "content_block_stop"]
    joined = {}
    for name, value in events:
        if name == "content_block_delta":
            kind = value["delta"]["type"].removesuffix("_delta")
            text = value["delta"]["partial_json" if kind == "input_json" else kind]
            joined[value["index"], kind] = joined.get((value["index"], kind), "") + text
    assert joined == {(0, "thinking"): "Hm.", (1, "text"): "I ask.", (2, "input_json"): '{"town": "Oslo"}', (3, "input_json"): "{}"}
    assert [name for name, _ in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_text_after_a_call_is_a_block_of_its_own_in_both() -> None:
    chat = Chat({"content": "a"}, called(0, "weather"), arguments(0, "{}"), {"content": "b"}, reason="tool_calls")
    whole = await chat.ask(tools=[WEATHER])
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "text"]
    starts = [value["content_block"]["type"] for name, value in await chat.ask(tools=[WEATHER], stream=True) if name == "content_block_start"]
    assert starts == ["text", "tool_use", "text"]


async def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    for text in ('{"town": "Os', "[1]"):
        whole = await Chat(called(0, "weather"), arguments(0, text), reason="length").ask(tools=[WEATHER])
        assert whole["content"][0]["input"] == {"INVALID_JSON": text} and whole["stop_reason"] == "max_tokens"


async def test_thinking_without_tools() -> None:
    whole = await Chat({"reasoning_content": "Hm."}, {"content": "Yes."}).ask()
    assert whole["content"] == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes.", "citations": None}]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        (None, {}),
    ],
)
async def test_tool_choice(choice: Any, fields: dict[str, Any]) -> None:
    chat = Chat({"content": "x"})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        await chat.ask(path, tools=[{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}], tool_choice=choice)
        assert {name: value for name, value in chat.asked.items() if name in ("tool_choice", "parallel_tool_calls")} == fields
        assert chat.asked["tools"] == [TOLD]


async def test_a_conversation_with_calls_becomes_chat_messages() -> None:
    call = {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"town": "Ås"}}
    result = {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "call_1", "content": "no such town", "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "call_2"}
    answer = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "I ask."}, call]}
    found = await Chat({"content": "x"}).prompt(USER, answer, {"role": "user", "content": [result, failed, empty, {"type": "text", "text": "And?"}]})
    assert found == [
        USER,
        {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.",
         "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ås"}'}}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: no such town"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    found = await Chat({"content": "x"}).prompt(USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
    assert found[1]["content"] is None and found[2]["role"] == "tool" and len(found) == 3


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": 5}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "any", "name": "x"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
        ({"tools": [WEATHER], "tool_choice": {"type": "any", "other": 1}}, "tool_choice.other"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": "z"}]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}, {"type": "text", "text": "z"}]}]},
         "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "y"}]}]}, "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "y", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "y", "is_error": "no"}]}]}, "messages[0].content[0].is_error"),
    ],
)  # fmt: skip
async def test_bad_tools_are_refused_with_their_path(values: dict[str, Any], param: str) -> None:
    chat = Chat({"content": "x"})
    with pytest.raises(RouteError) as caught:
        await chat.ask(**values)
    assert (caught.value.status, caught.value.param) == (400, param) and not chat.asked


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("tools[0].function.name", "tools[0].name"),
        ("tools[1].function.parameters.type", "tools[1].input_schema.type"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("stop", "stop_sequences"),
        ("messages", "messages"),
        (None, None),
    ],
)
async def test_what_the_chat_route_refuses_has_the_names_of_this_one(theirs: str | None, ours: str | None) -> None:
    chat = Chat(error=RouteError(400, f"{theirs} is wrong", theirs))
    for values in ({}, {"stream": True}, {"tools": [WEATHER]}):
        with pytest.raises(RouteError) as caught:
            await chat.ask(**values)
        assert caught.value.param == ours and str(caught.value) == f"{ours} is wrong"


async def test_a_path_in_the_chat_routes_words_is_this_routes_too() -> None:
    chat = Chat(error=RouteError(400, "tools[0].function.parameters must describe an object.", "tools[0].function.parameters.type"))
    with pytest.raises(RouteError) as caught:
        await chat.ask(tools=[WEATHER])
    assert str(caught.value) == "tools[0].input_schema must describe an object."
