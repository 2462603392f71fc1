"""Cases of bank.yaml: structured output over HTTP. A random model writes noise, so whatever fits was made to fit."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from real_server import RealServer, is_bad_request, join, reasons, text_of

CHT, CMP = "/v1/chat/completions", "/v1/completions"
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}}, "required": ["x", "on"], "additionalProperties": False}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def bodies(server: RealServer, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(CHT, server.cht_body(**fields)), (CMP, server.cmp_body(**fields))]


def check_json(choice: dict[str, Any], schema: Any) -> None:
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(text_of(choice)), schema)
    else:
        assert choice["finish_reason"] == "length"


# ---------------------------------------------------------------- what cannot be compiled
@pytest.mark.parametrize(("pattern", "where"), [("[a-z", "unclosed"), ("*a", "repetition operator missing"), ("(?<=x)+y", "look-behind")])
def test_guided_bad_regex(server: RealServer, pattern: str, where: str) -> None:
    for path, body in bodies(server, response_format=schema_format({"type": "string", "pattern": pattern})):
        error = is_bad_request(server.post(path, body), "response_format.json_schema.schema")
        assert where in error["message"] and error["type"] == "invalid_request_error"
    for path, body in bodies(server, guided_regex=pattern):
        assert where in is_bad_request(server.post(path, body), "guided_regex")["message"]
        assert where in is_bad_request(server.post(path, {**body, "stream": True}), "guided_regex")["message"]
    assert where in is_bad_request(server.post(CMP, server.cmp_body(structured_outputs={"regex": pattern})), "structured_outputs")["message"]


def test_guided_ref_cycle(server: RealServer) -> None:
    endless = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
    tree = {
        "$ref": "#/$defs/t",
        "$defs": {
            "t": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    }
    for path, body in bodies(server, response_format=schema_format(endless)):
        is_bad_request(server.post(path, body), "response_format.json_schema.schema")
    for seed in range(4):
        for path, body in bodies(server, response_format=schema_format(tree), max_tokens=80, seed=seed):
            check_json(server.answer(path, body)["choices"][0], tree)


def test_guided_deep_nesting(server: RealServer) -> None:
    deep = 60_000
    nested = '{"items":' * deep + "{}" + "}" * deep
    form = '{"type":"json_schema","json_schema":{"name":"s","schema":' + nested + "}}"
    started = time.monotonic()
    for path, body in bodies(server):
        text = json.dumps(body)[:-1] + f', "response_format": {form}}}'
        response = server.http.post(path, content=text, headers={"Content-Type": "application/json"})
        assert response.status_code in (400, 413)
        pattern = "(" * deep + "a" + ")" * deep
        assert server.post(path, {**body, "response_format": schema_format({"type": "string", "pattern": pattern})}).status_code == 400
        is_bad_request(server.post(path, {**body, "guided_regex": pattern}), "guided_regex")
        is_bad_request(server.post(path, {**body, "guided_grammar": "start: " + pattern.replace("a", '"a"')}), "guided_grammar")
        is_bad_request(server.post(path, {**body, "structured_outputs": {"json": nested}}), "structured_outputs")
    tools = '[{"type":"function","function":{"name":"f","parameters":' + '{"items":' * 3000 + "{}" + "}" * 3000 + "}}]"
    text = json.dumps(server.cht_body())[:-1] + f', "tools": {tools}}}'
    assert server.http.post(CHT, content=text, headers={"Content-Type": "application/json"}).status_code == 400
    assert time.monotonic() - started < 5 * 11


@pytest.mark.parametrize("pattern", ["^(a+)+b$", "^((a{0,200}){0,200}){0,200}$", "^(a|aa)+$", "^(((((((a{30}){30}){30}){30}){30}){30}){30})$"])
def test_guided_redos(server: RealServer, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern, **({"maxLength": 100000} if "aa" in pattern else {})}
    slowest: list[float] = []
    done = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=server.base_url, timeout=10) as other:
            while True:
                started = time.monotonic()
                assert other.get("/health").status_code == 200
                slowest.append(time.monotonic() - started)
                if done.wait(0.05):
                    return

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for path, body in bodies(server, response_format=schema_format(schema), max_tokens=16):
            started = time.monotonic()
            response = server.post(path, body)
            assert time.monotonic() - started < 10
            if response.status_code == 200:
                choice = response.json()["choices"][0]
                assert choice["finish_reason"] == "length" or re.fullmatch("a*b?", json.loads(text_of(choice)))
            else:
                is_bad_request(response, "response_format.json_schema.schema")
    finally:
        done.set()
        looker.join()
    assert max(slowest) < 1.0


# ---------------------------------------------------------------- what is honoured
def test_guided_legacy_ignored(server: RealServer) -> None:
    for seed in range(3):
        for path, body in bodies(server, seed=seed, max_tokens=24):
            choice = server.answer(path, {**body, "guided_choice": ["positive", "negative"]})["choices"][0]
            assert text_of(choice) in ("positive", "negative") and choice["finish_reason"] == "stop"
            choice = server.answer(path, {**body, "structured_outputs": {"choice": ["positive", "negative"]}})["choices"][0]
            assert text_of(choice) in ("positive", "negative") and choice["finish_reason"] == "stop"
            schema = {"type": "object", "properties": {"h": {"type": "number"}}, "required": ["h"], "additionalProperties": False}
            check_json(server.answer(path, {**body, "guided_json": schema})["choices"][0], schema)
            choice = server.answer(path, {**body, "guided_regex": "[0-9]{3}-[a-f]+x"})["choices"][0]
            assert re.fullmatch("[0-9]{3}-[a-f]+x", text_of(choice)) or choice["finish_reason"] == "length"
            choice = server.answer(path, {**body, "guided_grammar": 'root ::= "yes" | "no" root'})["choices"][0]
            assert re.fullmatch("(no)*yes", text_of(choice)) or choice["finish_reason"] == "length"
            choice = server.answer(path, {**body, "guided_json": json.dumps(POINT), "guided_whitespace_pattern": " ?"})["choices"][0]
            check_json(choice, POINT)
            assert not re.search(r"[\n\t]", text_of(choice))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_decoding_backend": "xgrammar", "guided_choice": ["a"]}, "guided_decoding_backend"),
        ({"guided_decoding_backend": "llguidance"}, "guided_decoding_backend"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"choise": ["a"]}}, "structured_outputs.choise"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "use_beam_search": True, "n": 2, "ignore_eos": True}, "response_format"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag"),
    ],
)
def test_guided_fields_that_cannot_be_honoured_are_named(server: RealServer, fields: dict[str, Any], param: str) -> None:
    for path, body in bodies(server, **fields):
        is_bad_request(server.post(path, body), param)


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer", "guidance"])
def test_guided_backend_of_a_request(server: RealServer, backend: str) -> None:
    for path, body in bodies(server, guided_decoding_backend=backend, seed=4, max_tokens=60):
        assert text_of(server.answer(path, {**body, "guided_choice": ["positive", "negative"]})["choices"][0]) in ("positive", "negative")
        flags = {"type": "object", "properties": {"c": {"enum": ["red"]}, "on": {"type": "boolean"}}, "required": ["c", "on"], "additionalProperties": False}
        check_json(server.answer(path, {**body, "response_format": schema_format(flags)})["choices"][0], flags)


def test_guided_no_whitespace_runaway(server: RealServer) -> None:
    number = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
    for schema, form in ((None, {"type": "json_object"}), ({}, schema_format({})), (number, schema_format(number))):
        for path, body in bodies(server, response_format=form, max_tokens=64):
            for settings in ({"temperature": 0}, {"temperature": 1.5, "seed": 2}, {"temperature": 1.5, "seed": 3}):
                answer = server.answer(path, {**body, **settings})
                assert answer["usage"]["completion_tokens"] <= 64
                choice = answer["choices"][0]
                check_json(choice, {"type": "object"} if schema is None else schema)
                assert not re.search(r"\s{41,}", text_of(choice)) and not re.search(r"\d{41,}", text_of(choice))


def test_guided_answers_stream_as_they_are_whole(server: RealServer) -> None:
    for path, body in bodies(server, response_format=schema_format(POINT), seed=5, max_tokens=120):
        whole = server.answer(path, body)["choices"][0]
        chunks = server.stream(path, body)
        assert join(chunks) == text_of(whole) and reasons(chunks) == [whole["finish_reason"]]


def test_guided_branches_and_beams(server: RealServer) -> None:
    for path, body in bodies(server, response_format=schema_format(POINT), max_tokens=150):
        several = server.answer(path, {**body, "n": 4, "seed": 1})["choices"]
        assert len(several) == 4
        best = server.answer(path, {**body, "n": 1, "best_of": 3, "seed": 1})["choices"]
        beams = server.answer(path, {**body, "n": 2, "use_beam_search": True, "guided_whitespace_pattern": "", "temperature": 0})["choices"]
        for choice in (*several, *best, *beams):
            check_json(choice, POINT)
        assert all(choice["finish_reason"] == "stop" for choice in beams)


def test_guided_logprobs_are_finite_or_null(server: RealServer) -> None:
    body = server.cht_body(response_format={"type": "json_object"}, logprobs=True, top_logprobs=5, max_tokens=8, seed=1)
    answer = server.answer(CHT, body)
    for content in (
        answer["choices"][0]["logprobs"]["content"],
        [entry for chunk in server.stream(CHT, body) for choice in chunk["choices"] if choice["logprobs"] for entry in choice["logprobs"]["content"]],
    ):
        assert len(content) == answer["usage"]["completion_tokens"] and all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 5 for entry in content)


def test_guided_lengths_and_ends(server: RealServer) -> None:
    for path, body in bodies(server, guided_choice=["positive"]):
        cut = server.answer(path, {**body, "max_tokens": 2})
        assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 2
        for fields in ({"ignore_eos": True}, {"min_tokens": 20}, {"stop": ["zzz"]}):
            whole = server.answer(path, {**body, "max_tokens": 24, **fields})["choices"][0]
            assert (text_of(whole), whole["finish_reason"]) == ("positive", "stop")
        stopped = server.answer(path, {**body, "max_tokens": 24, "stop": "siti"})["choices"][0]
        assert (text_of(stopped), stopped["finish_reason"], stopped["stop_reason"]) == ("po", "stop", "siti")


def test_guided_compile_that_hangs_does_not_stop_others(start_server: Callable[..., RealServer]) -> None:
    """A process that may take no memory fails its request; the same server answers all else."""
    server = start_server("--grammar-time", "0.5", "--grammar-memory-mib", "24")
    pattern = "((((((a{30}){30}){30}){30}){30}){30}){30}"
    started = time.monotonic()
    response = server.post(CMP, server.cmp_body(guided_regex=f"{pattern}|b", max_tokens=200, logit_bias={str(server.tokenize(prompt="a")[0]): 50}))
    assert time.monotonic() - started < 10
    error = is_bad_request(response, "guided_regex")
    assert "--grammar-" in error["message"] or "too" in error["message"]
    assert server.cmp(guided_choice=["yes"], max_tokens=8)["choices"][0]["text"] == "yes"
    server.kv_idle()
