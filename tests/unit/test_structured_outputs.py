"""Every field that asks for structured output becomes one record, within bounds, or an error that names it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from oarlock.errors import InvalidParameter
from oarlock.sampling_params import SamplingParams
from oarlock.structured_outputs import MAX_CHARS, MAX_DEPTH, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"é":{"type":"integer"}}}'
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"guided_json": SCHEMA}, "json", TEXT, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json", TEXT, "guided_json"),
        ({"guided_json": {}}, "json", "{}", "guided_json"),
        ({"guided_json": False}, "json", "false", "guided_json"),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, "regex", "a", "structured_outputs"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b", "a"]}, "choice", '["a", "b"]', "guided_choice"),
        ({"guided_grammar": "start: A"}, "grammar", "start: A", "guided_grammar"),
        ({"guided_json_object": True}, "json_object", '{"type":"object"}', "guided_json_object"),
        ({"structural_tag": TAG}, "structural_tag", json.dumps(TAG, separators=(",", ":")), "structural_tag"),
        ({"response_format": {"type": "json_object"}}, "json_object", '{"type":"object"}', "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}}, "json", TEXT, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", None, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs"),
        ({"structured_outputs": StructuredOutputs(choice=["x"])}, "choice", '["x"]', "structured_outputs"),
        ({"guided_decoding": {"grammar": "start: A"}}, "grammar", "start: A", "guided_decoding"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a", "guided_regex"),
    ],
)
def test_ways_to_ask(fields: dict[str, Any], kind: str, text: str | None, param: str) -> None:
    params = SamplingParams(**fields)
    asked = params.structured_outputs
    assert asked is not None and (asked.kind, asked.param) == (kind, param) and (text is None or asked.text == text)
    assert hash(params) == hash(SamplingParams(**fields)) and params == SamplingParams.from_kwargs(fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"guided_json_object": False}, {"structured_outputs": None}])
def test_ways_to_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert SamplingParams(**fields) == SamplingParams()


def test_settings_of_older_fields_go_with_the_constraint() -> None:
    asked = SamplingParams(response_format={"type": "json_object"}, guided_whitespace_pattern=" ?", guided_decoding_backend="guidance").structured_outputs
    assert asked is not None and (asked.whitespace_pattern, asked.backend) == (" ?", "llguidance")


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "both constrain"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs.rejex", "rejex"),
        ({"structured_outputs": {"param": "x", "regex": "a"}}, "structured_outputs.param", "unknown key"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "nothing constrains"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex", "JSON only"),
        ({"structured_outputs": {"json": False, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"grammar": False}}, "structured_outputs", "not false"),
        ({"guided_json": True, "guided_regex": False}, "guided_regex", "not false"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": {}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schemas": {}}}}, "response_format.json_schema", "schemas"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "json_object"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": [1]}, "guided_json", "object"),
        ({"guided_json": {"a": float("nan")}}, "guided_json", "not valid JSON"),
        ({"guided_json": {"a": object()}}, "guided_json", "not valid JSON"),
        ({"guided_json": nested(MAX_DEPTH)}, "guided_json", f"more than {MAX_DEPTH}"),
        ({"guided_json": nested(60_000)}, "guided_json", f"more than {MAX_DEPTH}"),
        ({"guided_json": "[" * 60_000}, "guided_json", f"more than {MAX_DEPTH}"),
        ({"guided_regex": "(" * 60_000 + ")" * 60_000}, "guided_regex", f"more than {MAX_DEPTH}"),
        ({"guided_grammar": "[" * (MAX_DEPTH + 1)}, "guided_grammar", f"more than {MAX_DEPTH}"),
        ({"guided_regex": "a" * (MAX_CHARS + 1)}, "guided_regex", str(MAX_CHARS)),
        ({"guided_json": {"a": "a" * MAX_CHARS}}, "guided_json", str(MAX_CHARS)),
        ({"guided_choice": ["a" * MAX_CHARS, "b"]}, "guided_choice", str(MAX_CHARS)),
        ({"guided_choice": "ab"}, "guided_choice", "list"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"guided_choice": [1]}, "guided_choice", "string"),
        ({"guided_regex": "\ud800"}, "guided_regex", "surrogate"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}}, "structured_outputs", "true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param and words in str(caught.value)


def test_escaped_brackets_are_no_nesting() -> None:
    assert SamplingParams(guided_regex=r"\(" * 200).structured_outputs is not None


def test_a_pydantic_model_is_a_schema() -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    asked = SamplingParams(structured_outputs={"json": Point}).structured_outputs
    assert asked is not None and json.loads(asked.text)["properties"]["x"]["type"] == "integer"
