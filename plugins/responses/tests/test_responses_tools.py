"""Tools, reasoning and formats of the Responses API over a scripted engine whose answers a parser of calls reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from oarlock_responses import routes
from real_server import ok
from toy_frontend import says
from toy_server import MODEL, Toy, named_events, refused, toy_server

pytestmark = pytest.mark.asyncio

WEATHER = {"type": "function", "name": "weather", "description": "Of a town.", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
TIME = {"type": "function", "name": "time"}
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.town }}){% endfor %}{{ m.tool_call_id or '' }}{% endfor %}"
    "{{ reasoning_effort }}[assistant]"
)
ANSWER = '<think>Hm.</think>I ask.<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call><tool_call>{"name": "time"}</tool_call>'


def toy(text: str = ANSWER, **settings: Any) -> Any:
    options = {"responses_max_stored": 10, "responses_max_stored_mib": 1}
    facts = {"max_model_len": 4096, "structured_outputs": (("made-up", ""),), **settings}
    return toy_server(says(text), options=options, routes=(routes.add,), chat_template=TEMPLATE, parsers=("hermes", "qwen3"), **facts)


async def create(here: Toy, **fields: Any) -> httpx.Response:
    return await here.http.post("/v1/responses", json={"model": MODEL, "input": "Oslo?", **fields})


async def made(here: Toy, **fields: Any) -> dict[str, Any]:
    return ok(await create(here, **fields))


def prompt(here: Toy) -> str:
    return bytes(here.engine.submitted[-1].prompt_token_ids).decode()


def plain(output: list[dict[str, Any]]) -> list[Any]:
    """Items without their ids."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "I ask.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "status": "completed", "name": "weather", "arguments": '{"town": "Oslo"}'},
    {"type": "function_call", "status": "completed", "name": "time", "arguments": "{}"},
]


async def test_calls_are_items_whole_streamed_and_in_the_background() -> None:
    async with toy() as here:
        whole = await made(here, tools=[WEATHER, TIME])
        assert plain(whole["output"]) == ITEMS and whole["status"] == "completed" and prompt(here) == "<weather><time>[user]Oslo?[assistant]"
        assert whole["tools"] == [{**WEATHER, "strict": False}, {**TIME, "description": None, "parameters": None, "strict": False}]
        assert (whole["tool_choice"], whole["parallel_tool_calls"]) == ("auto", True)
        calls = whole["output"][2:]
        assert len({item["id"] for item in whole["output"]} | {item["call_id"] for item in calls}) == 6
        found = named_events(await create(here, tools=[WEATHER, TIME], stream=True))
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        last = found[-1]["response"]
        assert plain(last["output"]) == ITEMS and last["usage"] == whole["usage"]
        built: dict[int, str] = {}
        for event in found:
            if event["type"].endswith(".delta"):
                assert event["item_id"] == last["output"][event["output_index"]]["id"]
                built[event["output_index"]] = built.get(event["output_index"], "") + event["delta"]
        assert built == {0: "Hm.", 1: "I ask.", 2: '{"town": "Oslo"}', 3: "{}"}
        names = [event["type"].removeprefix("response.") for event in found if not event["type"].endswith(".delta")]
        call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
        assert names == [
            "created", "in_progress", "output_item.added", "reasoning_text.done", "output_item.done", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
            "output_item.done", *call, *call, "completed",
        ]  # fmt: skip
        assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == last["output"]
        first = await made(here, tools=[WEATHER], background=True)
        while (kept := (await here.http.get(f"/v1/responses/{first['id']}")).json())["status"] == "in_progress":
            pass
        assert plain(kept["output"])[:3] == ITEMS[:3]


async def test_results_go_back_by_items_or_by_the_id() -> None:
    async with toy() as here:
        first = await made(here, tools=[WEATHER, TIME])
        one, two = (item["call_id"] for item in first["output"][2:])
        results = [{"type": "function_call_output", "call_id": one, "output": "3 degrees"}, {"type": "function_call_output", "call_id": two, "output": [{"type": "input_text", "text": "noon"}]}]
        wanted = f"<weather><time>[user]Oslo?[assistant]Hm.I ask.({one} weather Oslo)({two} time )[tool]3 degrees{one}[tool]noon{two}[assistant]"
        await made(here, tools=[WEATHER, TIME], input=[{"role": "user", "content": "Oslo?"}, *first["output"], *results])
        assert prompt(here) == wanted
        second = await made(here, tools=[WEATHER, TIME], input=results, previous_response_id=first["id"])
        assert prompt(here) == wanted
        await made(here, tools=[WEATHER, TIME], input=[{"role": "user", "content": "And?"}], previous_response_id=second["id"])
        assert prompt(here).startswith(wanted + "Hm.I ask.(") and prompt(here).endswith("[user]And?[assistant]")


@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ([{"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}], "[user]q[assistant](c time )"),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "S."}]}, {"role": "assistant", "content": "a"}], "[user]q[assistant]S.a"),
        ([{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R."}]}, {"role": "user", "content": "b"}], "[user]q[assistant]R.[user]b"),
        ([{"role": "assistant", "content": "a"}, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R."}]}, {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}], "[user]q[assistant]a[assistant]R.(c time )"),
    ],
)  # fmt: skip
async def test_items_that_follow_one_another_are_one_message(items: list[dict[str, Any]], wanted: str) -> None:
    async with toy() as here:
        await made(here, input=[{"role": "user", "content": "q"}, *items, {"type": "function_call_output", "call_id": "c", "output": "o"}])
        assert prompt(here) == wanted + "[tool]oc[assistant]"


async def test_choices() -> None:
    async with toy('{"town": "Oslo"}') as here:
        named = await made(here, tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "weather"})
        assert plain(named["output"]) == [ITEMS[2]] and named["tool_choice"] == {"type": "function", "name": "weather"}
        assert here.engine.submitted[-1].params.structured_outputs.param == "tools"
        text = (await made(here, tools=[WEATHER], tool_choice="none"))["output"]
        assert [item["type"] for item in text] == ["message"]
    async with toy('[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"town": "x"}}]') as here:
        assert [item["name"] for item in (await made(here, tools=[WEATHER, TIME], tool_choice="required"))["output"]] == ["time", "weather"]
        alone = await made(here, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
        assert [item["name"] for item in alone["output"]] == ["time"] and alone["parallel_tool_calls"] is False


async def test_a_call_that_is_cut_is_incomplete() -> None:
    async with toy('{"town": "Oslo"}') as here:
        fields = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 6}
        for response in (await made(here, **fields), named_events(await create(here, **fields, stream=True))[-1]["response"]):
            assert plain(response["output"]) == [{"type": "function_call", "status": "incomplete", "name": "weather", "arguments": '{"town'}]
            assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_formats_constrain_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True, "description": "d"}
    async with toy('{"a": 1}') as here:
        response = await made(here, text={"format": form})
        asked = here.engine.submitted[-1].params.structured_outputs
        assert json.loads(asked.json) if isinstance(asked.json, str) else asked.json
        assert response["text"] == {"format": form} and response["output"][0]["content"][0]["text"] == '{"a": 1}'
        await made(here, text={"format": {"type": "json_object"}})
        assert here.engine.submitted[-1].params.structured_outputs.json_object
        for wrong, param in (
            ({"format": {"type": "grammar"}}, "text.format.type"), ({"format": {}}, "text.format.type"), ({"format": 5}, "text.format"),
            ({"format": {"type": "json_schema", "name": "s"}}, "text.format.schema"), ({"format": {"type": "json_object", "x": 1}}, "text.format.x"), ({"format": {**form, "schema": 5}}, "text.format.schema"), ({"format": {**form, "x": 1}}, "text.format.x"),
            ({"verbosity": "low"}, "text.verbosity"),
        ):  # fmt: skip
            refused(await create(here, text=wrong), param)
        refused(await create(here, text={"format": form}, tools=[WEATHER]), "text.format")


async def test_effort_reaches_the_template() -> None:
    async with toy() as here:
        response = await made(here, reasoning={"effort": "low", "summary": None})
        assert prompt(here).endswith("low[assistant]") and response["reasoning"] == {"effort": "low", "summary": None}
        refused(await create(here, reasoning={"summary": "auto"}), "reasoning.summary")
        refused(await create(here, reasoning={"effort": 5}), "reasoning.effort")
    async with toy_server(says("x"), options={"responses_max_stored": 1, "responses_max_stored_mib": 1}, routes=(routes.add,)) as here:
        refused(await create(here, reasoning={"effort": "low"}), "reasoning.effort")
        refused(await create(here, tools=[WEATHER]), "tools")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {"a": 1}}, "tools"), ({"tools": ["x"]}, "tools[0]"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [TIME, {**TIME, "name": "b c"}]}, "tools[1].name"),
        ({"tools": [{**TIME, "parameters": {"type": "string"}}]}, "tools[0].parameters.type"), ({"tools": [{**TIME, "x": 1}]}, "tools[0].x"), ({"tools": [TIME, TIME]}, "tools[1].name"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"), ({"tools": [TIME], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"), ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"), ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"), ({"input": [{"type": "custom_tool_call"}]}, "input[0].type"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_named_as_this_route_names_it(fields: dict[str, Any], param: str) -> None:
    async with toy() as here:
        for stream in (False, True):
            error = refused(await create(here, **fields, stream=stream), param)
            assert error["param"] in error["message"] or param.startswith(("max_tool_calls", "tools["))
            assert ".function" not in error["message"]
        assert not here.engine.submitted


async def test_truncation_keeps_calls_with_their_results() -> None:
    async with toy("ok", max_model_len=200) as here:
        call = {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}
        items = [{"role": "system", "content": "s"}, {"role": "user", "content": "x" * 150}, {"role": "assistant", "content": "y" * 50}, call, {"type": "function_call_output", "call_id": "c", "output": "noon"}]
        refused(await create(here, tools=[TIME], input=items), "input")
        await made(here, tools=[TIME], input=items, truncation="auto", max_output_tokens=8)
        assert prompt(here) == f"<time>[system]s[assistant]{'y' * 50}(c time )[tool]noonc[assistant]"


async def test_openais_own_helpers_parse_calls_and_answers() -> None:
    class Weather(pydantic.BaseModel):
        town: str

    async with toy('{"town": "Oslo"}') as here, openai.AsyncOpenAI(api_key="x", base_url="http://toy/v1", http_client=here.http, max_retries=0) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Weather)
        assert parsed.output_parsed == Weather(town="Oslo")
        tool = openai.pydantic_function_tool(Weather)
        given = {"type": "function", **tool["function"]}
        choice: Any = {"type": "function", "name": "Weather"}
        called = await client.responses.parse(model=MODEL, input="hi", tools=[given], tool_choice=choice)
        (item,) = called.output
        assert item.type == "function_call" and item.parsed_arguments in (Weather(town="Oslo"), {"town": "Oslo"})
        async with client.responses.stream(model=MODEL, input="hi", tools=[given], tool_choice=choice) as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        assert snapshots[-1] == '{"town": "Oslo"}' == final.output[0].arguments
