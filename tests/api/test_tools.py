"""Tool calls and reasoning over HTTP, by a scripted engine: what the model says is given, so every answer is known."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from oarlock.config.sections import ServerConfig
from toy_frontend import SPECIALS, ToyTokenizer, says
from toy_server import MODEL, events, refused, strict, toy_server

pytestmark = pytest.mark.asyncio

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os\\u006co ü"}}\n</tool_call>'
ARGUMENTS = '{"city": "Os\\u006co ü"}'
SECOND = '<tool_call>{"name": "get_time"}</tool_call>'
SERVER = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")


class ToolTokenizer(ToyTokenizer):
    """Shows tools, calls and their results to the model, in a form that tests can read."""

    chat_template = (
        "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}{{ m.tool_call_id or '' }}"
        "{% endfor %}{{ reasoning_effort }}[assistant]"
    )


def serve(text: str, server: ServerConfig = SERVER, **facts: Any) -> Any:
    return toy_server(says(text), server=server, tokenizer=ToolTokenizer(), **{"max_model_len": 4096, **facts})


async def both(toy: Any, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the choices, usage) of the whole answer, after checking that the streamed one is the same."""
    response = await toy.chat(**{"tools": TOOLS, **fields})
    assert response.status_code == 200, response.text
    whole = strict(response.text)
    streamed = await toy.chat(**{"tools": TOOLS, **fields}, stream=True, stream_options={"include_usage": True})
    chunks = events(streamed)
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["usage"] == whole["usage"]
    built: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        at = built.setdefault(choice["index"], {"content": None, "calls": [], "reason": None, "logprobs": []})
        delta = choice["delta"]
        assert at["reason"] is None, "nothing comes after the finish reason"
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                at[name] = (at.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(at["calls"]) and call["type"] == "function"
                at["calls"].append([call["function"]["name"], call["function"]["arguments"]])
            else:
                assert call["index"] == len(at["calls"]) - 1
                at["calls"][-1][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert delta == {}
            at["reason"] = choice["finish_reason"]
        if choice["logprobs"]:
            at["logprobs"] += choice["logprobs"]["content"]
    for choice in whole["choices"]:
        message, at = choice["message"], built[choice["index"]]
        assert (message["content"] or None) == at["content"]
        assert [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())] == at["calls"]
        assert message.get("reasoning_content") == message.get("reasoning") == at.get("reasoning") == at.get("reasoning_content")
        assert choice["finish_reason"] == at["reason"] is not None
        assert ((choice["logprobs"] or {}).get("content") or []) == at["logprobs"]
    return whole["choices"], whole["usage"]


async def test_a_call_is_a_call_in_both_modes() -> None:
    async with serve(f"I look.\n{CALL}\n{SECOND}") as toy:
        (choice,), usage = await both(toy)
        calls = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "I look." and choice["finish_reason"] == "tool_calls"
        assert [c["function"] for c in calls] == [{"name": "get_weather", "arguments": ARGUMENTS}, {"name": "get_time", "arguments": "{}"}]
        assert all(set(c) == {"id", "type", "function"} for c in calls) and len({c["id"] for c in calls}) == 2
        assert usage["completion_tokens"] == len(f"I look.\n{CALL}\n{SECOND}".encode()) + 1
        assert toy.engine.submitted[0].prompt_token_ids == tuple(b"<get_weather><get_time>[user]hi[assistant]")


async def test_no_call_is_plain_text_and_stops() -> None:
    async with serve("Just text.") as toy:
        (choice,), _ = await both(toy)
        assert choice["message"] == {"role": "assistant", "content": "Just text.", "refusal": None} and choice["finish_reason"] == "stop"


async def test_one_call_alone_where_parallel_calls_are_not_wanted() -> None:
    async with serve(f"{CALL}{SECOND}") as toy:
        (choice,), _ = await both(toy, parallel_tool_calls=False)
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
        (choice,), _ = await both(toy, parallel_tool_calls=True)
        assert len(choice["message"]["tool_calls"]) == 2


async def test_every_choice_has_calls_of_its_own() -> None:
    def script(request: Any, index: int) -> list[int]:
        return [*(CALL if index == 1 else SECOND if index == 2 else "text").encode(), 257]

    async with toy_server(script, server=SERVER, tokenizer=ToolTokenizer(), max_model_len=4096) as toy:
        choices, _ = await both(toy, n=3)
        assert [c["finish_reason"] for c in choices] == ["stop", "tool_calls", "tool_calls"]
        assert choices[2]["message"]["tool_calls"][0]["function"]["name"] == "get_time"
        response = strict((await toy.chat(tools=TOOLS, n=1, best_of=3)).text)
        assert len(response["choices"]) == 1 and response["choices"][0]["finish_reason"] in ("stop", "tool_calls")


async def test_logprobs_and_token_ids_cover_every_token_once() -> None:
    async with serve(f"I look.{CALL}") as toy:
        (choice,), _ = await both(toy, logprobs=True, top_logprobs=1)
        assert len(choice["logprobs"]["content"]) == len(f"I look.{CALL}".encode()) + 1
        whole = strict((await toy.chat(tools=TOOLS, return_token_ids=True)).text)["choices"][0]["token_ids"]
        chunks = events(await toy.chat(tools=TOOLS, return_token_ids=True, stream=True))[:-1]
        assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == whole


async def test_a_stop_string_ends_the_text_that_parsers_read() -> None:
    async with serve(f"I look.{CALL} and more{SECOND}") as toy:
        (choice,), _ = await both(toy, stop=["and more"])
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls" and choice["stop_reason"] == "and more"
        (choice,), _ = await both(toy, stop=["\"arguments\""])
        assert choice["message"]["content"] == 'I look.<tool_call>\n{"name": "get_weather", ' and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("limit", range(1, len(CALL) + 2))
async def test_a_call_that_is_cut_shows_no_markup(limit: int) -> None:
    async with serve(CALL) as toy:
        (choice,), usage = await both(toy, max_tokens=limit)
        text = choice["message"]["content"] or ""
        assert usage["completion_tokens"] == limit
        assert not any(mark in text for mark in ("<to", "tool_call", "{", "name"))
        for call in choice["message"].get("tool_calls", ()):
            assert call["function"]["name"] == "get_weather" and ARGUMENTS.startswith(call["function"]["arguments"].rstrip("\ufffd"))
        if limit < len(CALL) + 1:
            assert choice["finish_reason"] == "length"


async def test_tool_choice_none_leaves_calls_alone_and_shows_the_tools_unless_told_otherwise() -> None:
    async with serve(CALL) as toy:
        (choice,), _ = await both(toy, tool_choice="none")
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
        assert bytes(toy.engine.submitted[-1].prompt_token_ids).startswith(b"<get_weather>")
    async with serve(CALL, ServerConfig(exclude_tools_when_none=True)) as toy:
        await both(toy, tool_choice="none")
        assert bytes(toy.engine.submitted[-1].prompt_token_ids) == b"[user]hi[assistant]"


async def test_auto_needs_a_parser() -> None:
    for server in (ServerConfig(), ServerConfig(tool_call_parser="hermes")):
        async with serve(CALL, server) as toy:
            for fields in ({}, {"tool_choice": "auto"}):
                error = refused(await toy.chat(tools=TOOLS, **fields), "tool_choice" if fields else "tools")
                assert "--enable-auto-tool-choice" in error["message"] and "--tool-call-parser" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": ["x"]}, "tools[0]", "must be an object"),
        ({"tools": "x"}, "tools", "an array"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "runs no tools itself"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]}, "tools[0].function.parametres", "Unknown field"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name", "its own"),
        ({"tools": [TIME] * 200}, "tools", "--max-tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]}, "tools", "--max-tool-bytes"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters.type", "object"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "no room for a call"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "both"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools", "structured_output"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}}, "tools", "structured_output"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '"required"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name", "none of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time", "x": 1}}}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "required"),
        ({"tool_choice": "required"}, "tool_choice", "when tools are given"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", "when tools are given"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "no variable"),
        ({"include_reasoning": False}, "include_reasoning", "--reasoning-parser"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    async with serve("x") as toy:
        error = refused(await toy.chat(**fields), param)
        assert error["param"] == param and words in error["message"], error
        assert not toy.engine.submitted


async def test_tools_need_a_template_that_shows_them() -> None:
    async with toy_server(says("x"), server=SERVER, max_model_len=4096) as toy:
        assert "--chat-template" in refused(await toy.chat(tools=TOOLS), "tools")["message"]
        assert "--chat-template" in refused(await toy.chat(messages=HISTORY), "messages[1].tool_calls")["message"]
        refused(await toy.chat(reasoning_effort="low"), "reasoning_effort")


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
]  # fmt: skip


async def test_earlier_calls_and_their_results_reach_the_template() -> None:
    async with serve("12 degrees.") as toy:
        await both(toy, messages=HISTORY, reasoning_effort="low")
        assert bytes(toy.engine.submitted[-1].prompt_token_ids).endswith(b"[user]Weather?[assistant](c1 get_weather Oslo)[tool]12 degreesc1low[assistant]")
        answer = strict((await toy.chat(tools=TOOLS)).text)["choices"][0]["message"]
        echoed = {k: v for k, v in answer.items()}
        assert (await toy.chat(messages=[{"role": "user", "content": "hi"}, echoed, {"role": "user", "content": "and?"}])).status_code == 200


async def test_an_answer_with_calls_can_be_sent_back_as_it_is() -> None:
    async with serve(CALL) as toy:
        answer = strict((await toy.chat(tools=TOOLS)).text)["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": [{"type": "text", "text": "12"}]}
        response = await toy.chat(tools=TOOLS, messages=[{"role": "user", "content": "hi"}, answer, result])
        assert response.status_code == 200, response.text
        assert b"get_weather Oslo" in bytes(toy.engine.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [HISTORY[1]["tool_calls"][0]] * 200}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 5000}}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}", "x": 1}}]}, "messages[0].tool_calls[0].function.x"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": HISTORY[1]["tool_calls"]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)  # fmt: skip
async def test_a_malformed_message_of_tools_is_named(message: dict[str, Any], param: str) -> None:
    async with serve("x") as toy:
        assert refused(await toy.chat(messages=[message]), param)["param"] == param


THINKS = ServerConfig(reasoning_parser="qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes")


async def test_reasoning_is_told_from_the_answer_by_both_names() -> None:
    async with serve("<think>\nHm.\n</think>\n\nYes.", THINKS) as toy:
        for fields in ({}, {"tools": []}):
            (choice,), _ = await both(toy, **fields)
            assert choice["message"]["reasoning"] == "Hm." and choice["message"]["content"] == "Yes."
        (choice,), _ = await both(toy, include_reasoning=False)
        assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
        (choice,), _ = await both(toy, max_tokens=10)
        assert choice["message"]["reasoning_content"] == "Hm" and choice["finish_reason"] == "length"


async def test_reasoning_and_calls_in_one_answer() -> None:
    async with serve(f"<think>Hm.</think>\nI look.{CALL}", THINKS) as toy:
        (choice,), _ = await both(toy)
        message = choice["message"]
        assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("Hm.", "I look.", 1)
        back = [{"role": "user", "content": "hi"}, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"}]
        assert (await toy.chat(tools=TOOLS, messages=back)).status_code == 200


class MarkedTokenizer(ToolTokenizer):
    """A tokenizer in which the parser's marks are special tokens, which answers do not show."""

    all_special_ids = frozenset({*SPECIALS})
    marks: ClassVar[dict[int, str]] = {256: "[TOOL_CALLS]"}

    def token_bytes(self, token_id: int) -> bytes:
        return self.marks[token_id].encode() if token_id in self.marks else super().token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        return next((i for i, text in self.marks.items() if text == token), None)

    def make_stream(self, skip_special_tokens: bool = True, prompt_ids: Any = (), shown: Any = ()) -> Any:
        stream = super().make_stream(skip_special_tokens, prompt_ids)
        stream._skip -= set(map(self.token_to_id, shown))
        return stream


async def test_special_tokens_that_a_parser_reads_reach_it_and_no_others_show() -> None:
    def script(request: Any, index: int) -> list[int]:
        return [*b"Yes", 258, 256, *b'[{"name": "get_time", "arguments": {}}]', 257]

    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="mistral")
    async with toy_server(script, server=server, tokenizer=MarkedTokenizer(), max_model_len=4096) as toy:
        (choice,), _ = await both(toy)
        assert choice["message"]["content"] == "Yes" and choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9 and call["function"] == {"name": "get_time", "arguments": "{}"}
        plain = strict((await toy.chat()).text)["choices"][0]["message"]["content"]
        assert plain == 'Yes[{"name": "get_time", "arguments": {}}]'


async def test_tokenize_counts_the_tools() -> None:
    async with serve("x") as toy:
        response = await toy.http.post("/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS})
        assert bytes(json.loads(response.text)["tokens"]) == b"<get_weather><get_time>[user]hi[assistant]"


async def test_what_is_thought_is_no_call() -> None:
    async with serve(f"<think>I could {SECOND}</think>\n\nI call.\n{CALL}", THINKS) as toy:
        (choice,), _ = await both(toy)
        assert choice["message"]["reasoning"] == f"I could {SECOND}" and choice["message"]["content"] == "I call."
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]


async def test_gpt_oss_reads_reasoning_and_calls_in_one() -> None:
    text = '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_time json<|message|>{"a": 1}'
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    async with serve(text, server) as toy:
        (choice,), _ = await both(toy)
        assert choice["message"]["reasoning"] == "Hm" and choice["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": '{"a": 1}'}
        (choice,), _ = await both(toy, tools=[])
        assert choice["message"]["reasoning"] == "Hm" and choice["message"]["content"] == '{"a": 1}'


# ---------------------------------------------------------------- forced calls: the grammar is given to the engine, which here says what it would allow
CONSTRAINS = {"structured_outputs": (("some", ""),)}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def schema_of(toy: Any) -> Any:
    return json.loads(toy.engine.submitted[-1].params.structured_outputs.json)


async def test_a_named_function_is_called_with_the_text_as_arguments() -> None:
    for server in (ServerConfig(), THINKS):
        async with serve(ARGUMENTS, server, **CONSTRAINS) as toy:
            (choice,), _ = await both(toy, tool_choice=NAMED)
            assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
            assert [c["function"] for c in choice["message"]["tool_calls"]] == [{"name": "get_weather", "arguments": ARGUMENTS}]
            assert schema_of(toy) == WEATHER["function"]["parameters"]
            (choice,), _ = await both(toy, tool_choice=NAMED, max_tokens=6)
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS[:6] and choice["finish_reason"] == "length"


async def test_required_calls_come_as_a_list_and_are_held_to_the_schemas() -> None:
    text = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "get_time", "parameters": {{}}}}]'
    async with serve(text, ServerConfig(), **CONSTRAINS) as toy:
        (choice,), _ = await both(toy, tool_choice="required")
        assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == [ARGUMENTS, "{}"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
        schema = schema_of(toy)
        assert schema["minItems"] == 1 and "maxItems" not in schema
        assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["get_weather", "get_time"]
        await both(toy, tool_choice="required", parallel_tool_calls=False)
        assert schema_of(toy)["maxItems"] == 1
        for limit in range(1, len(text) + 1):
            (choice,), _ = await both(toy, tool_choice="required", max_tokens=limit)
            assert choice["finish_reason"] == "length" and not choice["message"]["content"], "no markup"


async def test_references_in_a_schema_keep_their_target() -> None:
    tree = {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "walk", "parameters": tree}}]
    async with serve("[]", ServerConfig(), **CONSTRAINS) as toy:
        await toy.chat(tools=tools, tool_choice="required")
        placed = schema_of(toy)["$defs"]["f1"]
        assert placed["properties"]["root"]["$ref"] == "#/$defs/f1/$defs/node" == placed["$defs"]["node"]["properties"]["next"]["$ref"]
        await toy.chat(tools=tools, tool_choice={"type": "function", "function": {"name": "walk"}})
        assert schema_of(toy) == tree


async def test_strict_is_enforced_by_the_parsers_own_format_or_refused() -> None:
    tools = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}, TIME]
    async with serve(CALL, SERVER, **CONSTRAINS) as toy:
        (choice,), _ = await both(toy, tools=tools)
        assert choice["finish_reason"] == "tool_calls"
        tag = json.loads(toy.engine.submitted[-1].params.structured_outputs.structural_tag)
        assert tag["triggers"] == ["<tool_call>"] and tag["structures"][0]["schema"] == WEATHER["function"]["parameters"]
        assert CALL.startswith(tag["structures"][0]["begin"]) and CALL.endswith(tag["structures"][0]["end"])
    async with serve(CALL, ServerConfig(enable_auto_tool_choice=True, tool_call_parser="pythonic"), **CONSTRAINS) as toy:
        assert "strict" in refused(await toy.chat(tools=tools), "tools[0].function.strict")["message"]


async def test_a_long_answer_is_read_as_a_short_one_is() -> None:
    """It is read in a thread, so that others are served meanwhile."""
    text = "a line\n" * 3000
    call = '<tool_call>' + json.dumps({"name": "get_time", "arguments": {"text": text}}) + '</tool_call>'
    async with serve(call, max_model_len=65536) as toy:
        (choice,) = strict((await toy.chat(tools=TOOLS)).text)["choices"]
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"text": text}
