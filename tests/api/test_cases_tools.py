"""Cases of bank.yaml: tools; over a real server and a model that says what its script says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import RealServer, is_bad_request, reasons
from scripted_model import make_scripted_model
from toy_server import strict

CHT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Oslo", "days": 3}'
SCRIPTS = {
    "call": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "list": f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]',
    "arguments": ARGUMENTS,
    "text": "It is cold there.",
    "think": '<think>\nWhere? Oslo.\n</think>\n\nI look.\n<tool_call>{"name": "get_weather", "arguments": {"city":"Oslo","days":7}}</tool_call>',
    "broken": '<tool_call>{"name": "get_weather", "arguments": {city: Oslo}}</tool_call> sorry',
}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    model = make_scripted_model(tmp_path_factory.mktemp("models") / "scripted", SCRIPTS)
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with RealServer(model, *flags, log=tmp_path_factory.mktemp("log") / "server.log") as server:
        yield server
        server.kv_idle()


def body(server: RealServer, says: str, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": [{"role": "user", "content": says}], "tools": TOOLS, "temperature": 0, "max_tokens": 120, **fields}


def both(server: RealServer, says: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """(the message without its role and ids, the finish reason), after checking that the stream says the same."""
    request = body(server, says, **fields)
    (choice,) = server.answer(CHT, request)["choices"]
    message = {key: value for key, value in choice["message"].items() if value and key != "role"}
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
    chunks = server.stream(CHT, request)
    built: dict[str, Any] = {"tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                built[name] = built.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                built["tool_calls"].append(dict(call["function"]))
            else:
                built["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    assert built == message
    (reason,) = reasons(chunks)
    assert reason == choice["finish_reason"]
    return message, reason


@pytest.mark.parametrize(("choice", "says"), [("auto", "call"), ("required", "list"), (NAMED, "arguments")], ids=["auto", "required", "named"])
def test_tool_finish_reason_agree(tool_server: RealServer, choice: Any, says: str) -> None:
    message, reason = both(tool_server, says, tool_choice=choice)
    assert reason == "tool_calls" and message == {"tool_calls": [{"name": "get_weather", "arguments": ARGUMENTS}]}


def test_tool_finish_reason_agree_where_no_call_is_made(tool_server: RealServer) -> None:
    assert both(tool_server, "text") == ({"content": SCRIPTS["text"], "tool_calls": []}, "stop")
    assert both(tool_server, "text", max_tokens=2)[1] == "length"
    assert both(tool_server, "call", tool_choice="none") == ({"content": SCRIPTS["call"], "tool_calls": []}, "stop")
    assert both(tool_server, "broken") == ({"content": SCRIPTS["broken"], "tool_calls": []}, "stop")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("says", ["text", "call"])
def test_tool_finish_reason_agree_where_the_model_would_say_something_else(tool_server: RealServer, choice: Any, says: str) -> None:
    """A forced call comes all the same; it may be long, but it is one."""
    message, reason = both(tool_server, says, tool_choice=choice)
    assert "content" not in message and reason in ("tool_calls", "length")
    if reason == "tool_calls":
        for call in message["tool_calls"]:
            assert call["name"] == "get_weather" and isinstance(strict(call["arguments"])["city"], str)
    assert message["tool_calls"] or choice == "required"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 9, 11, 13, 15, 17])
def test_tool_truncated(tool_server: RealServer, limit: int) -> None:
    message, reason = both(tool_server, "call", max_tokens=limit)
    assert reason == "length"
    assert not message.get("content")
    for call in message["tool_calls"]:
        assert call["name"] == "get_weather" and ARGUMENTS.startswith(call["arguments"])
    for says, choice in (("list", "required"), ("arguments", NAMED)):
        message, reason = both(tool_server, says, tool_choice=choice, max_tokens=min(limit, 6))
        assert reason == "length" and not message.get("content")


def test_reasoning_content_and_a_call_in_one_answer(tool_server: RealServer) -> None:
    message, reason = both(tool_server, "think")
    assert message == {
        "reasoning": "Where? Oslo.", "reasoning_content": "Where? Oslo.", "content": "I look.",
        "tool_calls": [{"name": "get_weather", "arguments": '{"city":"Oslo","days":7}'}],
    }  # fmt: skip
    assert reason == "tool_calls"
    usage = tool_server.answer(CHT, body(tool_server, "think"))["usage"]
    whole = tool_server.answer(CHT, body(tool_server, "think", return_token_ids=True, logprobs=True))["choices"][0]
    assert usage["completion_tokens"] == len(whole["token_ids"]) == len(whole["logprobs"]["content"])


def test_strict_is_held_to_in_auto(tool_server: RealServer) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    message, reason = both(tool_server, "call", tools=tools)
    (call,) = message["tool_calls"]
    arguments = strict(call["arguments"])
    assert reason == "tool_calls" and arguments["city"] == "Oslo" and type(arguments["days"]) is int
    message, _ = both(tool_server, "broken", tools=tools, max_tokens=60)
    for call in message["tool_calls"]:
        assert call["arguments"].lstrip().startswith("{")
    assert "{city" not in json.dumps(message)


def test_two_choices_have_two_calls(tool_server: RealServer) -> None:
    choices = tool_server.answer(CHT, body(tool_server, "call", n=2, temperature=1.0, seed=5))["choices"]
    assert [c["finish_reason"] for c in choices] == ["tool_calls"] * 2
    assert len({c["message"]["tool_calls"][0]["id"] for c in choices}) == 2


def test_a_schema_that_no_grammar_can_be_made_of_is_a_400(tool_server: RealServer) -> None:
    wrong = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(" * 50}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": wrong}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        is_bad_request(tool_server.post(CHT, body(tool_server, "call", tools=tools, tool_choice=choice)), "tools")
    nested = "[" * 3000 + "]" * 3000
    raw = json.dumps(body(tool_server, "call"))[:-1] + f', "tools": [{{"type":"function","function":{{"name":"f","parameters":{{"x":{nested}}}}}}}]}}'
    assert tool_server.http.post(CHT, content=raw, headers={"Content-Type": "application/json"}).status_code == 400


def test_an_unknown_parser_ends_the_start_and_names_those_that_are_there(tool_server: RealServer, tmp_path: Path) -> None:
    server = RealServer(tool_server.model, "--tool-call-parser", "hermez", log=tmp_path / "log")
    server.launch()
    assert server.wait_exit(60) != 0
    assert "hermez" in server.output() and "hermes, json, llama3_json" in server.output()
    server.kill()
    server = RealServer(tool_server.model, "--enable-auto-tool-choice", log=tmp_path / "log2")
    server.launch()
    assert server.wait_exit(60) != 0 and "--tool-call-parser" in server.output()
    server.kill()
