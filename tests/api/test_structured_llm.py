"""Structured output through `LLM`: many schemas, mixed batches, preemption, prefix caching, and the seam that other routes use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from oarlock import LLM, SamplingParams
from oarlock.errors import InvalidParameter
from oarlock.structured_outputs import StructuredOutputs

SCHEMAS: list[Any] = [
    {"type": "integer"}, {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 8},
    {"enum": ["red", "green", 5, None]}, {"const": {"a": [1]}}, {"type": "string", "pattern": "^[a-c]{2,6}$"}, {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"}, {"type": ["integer", "null"]}, {"type": "integer", "minimum": -5, "maximum": 12}, {"type": "integer", "multipleOf": 7},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}, {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["x"]}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": False}, {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"enum": ["é"]}, "b": {"type": "integer", "maximum": 9, "minimum": 0}}, "additionalProperties": False},
    {"type": "object", "properties": {"o": {"type": "object", "properties": {"p": {"type": "null"}}, "required": ["p"], "additionalProperties": False}}, "required": ["o"], "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}, {"oneOf": [{"type": "null"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 4}]}, {"$ref": "#/$defs/d", "$defs": {"d": {"enum": [1, 2]}}},
    {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "required": ["t"], "additionalProperties": False, "$defs": {"t": {"type": "array", "items": {"enum": ["k"]}, "maxItems": 3}}},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False, "maxProperties": 2},
    {"type": "string", "minLength": 3, "maxLength": 5}, {"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "string", "format": "uuid"}, {"enum": ["a\"b", "c\\d", "e\nf", "日本"]},
]  # fmt: skip
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}}, "required": ["x", "on"], "additionalProperties": False}
CALL = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def start(**settings: Any) -> LLM:
        made.append(LLM(str(tiny_model), **{"dtype": "float32", "kv_cache_memory": "16MiB", "threads": 1, "max_model_len": 512, **settings}))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> LLM:
    return make()


def run(llm: LLM, params: list[SamplingParams], prompt: str = "Name three colours.") -> list[Any]:
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return outputs


def test_noise_takes_the_shape_of_thirty_schemas(llm: LLM) -> None:
    """Without the mask this model writes no JSON at all."""
    ended = dict.fromkeys(range(len(SCHEMAS)), 0)
    for seed in range(3):
        whole = run(llm, [SamplingParams(structured_outputs={"json": schema, "disable_any_whitespace": seed == 0}, max_tokens=250, seed=seed) for schema in SCHEMAS])
        for number, (schema, output) in enumerate(zip(SCHEMAS, whole, strict=True)):
            choice = output.outputs[0]
            if choice.finish_reason == "stop":
                ended[number] += 1
                jsonschema.validate(json.loads(choice.text), schema)
    assert all(ended.values()), f"schemas that no answer came to the end of: {[SCHEMAS[n] for n, count in ended.items() if not count]}"
    with pytest.raises(json.JSONDecodeError):
        json.loads(run(llm, [SamplingParams(max_tokens=40, seed=0)])[0].outputs[0].text)


def test_a_mixed_batch_leaves_free_requests_as_they_were(llm: LLM) -> None:
    free = SamplingParams(max_tokens=30, seed=5)
    alone = run(llm, [free])[0].outputs[0].token_ids
    shaped = [SamplingParams(guided_json=POINT, guided_whitespace_pattern="", max_tokens=100, seed=seed) for seed in range(6)]
    mixed = run(llm, [free, *shaped, free])
    assert mixed[0].outputs[0].token_ids == mixed[-1].outputs[0].token_ids == alone
    by_itself = [run(llm, [params])[0].outputs[0].text for params in shaped]
    assert [output.outputs[0].text for output in mixed[1:-1]] == by_itself
    for text in by_itself:
        jsonschema.validate(json.loads(text), POINT)


def test_preemption_and_prefix_caching_change_nothing(make: Callable[..., LLM], llm: LLM) -> None:
    params = [SamplingParams(guided_regex="([a-z]{4} ){40}", max_tokens=240, seed=seed) for seed in range(8)]
    plenty = [output.outputs[0].text for output in run(llm, params)]
    assert [output.outputs[0].text for output in run(llm, params)] == plenty, "prompts from the prefix cache"
    scarce = make(kv_cache_memory="300KiB", max_num_seqs=8, max_model_len=300)
    assert [output.outputs[0].text for output in run(scarce, params)] == plenty
    assert next(m.value for m in scarce.get_metrics() if m.name == "vllm:num_preemptions") > 0
    assert all(re.fullmatch("([a-z]{4} ){0,40}[a-z]{0,4}", text) for text in plenty)


@pytest.mark.parametrize("fields", [{"n": 3, "seed": 2}, {"n": 2, "best_of": 4, "seed": 2}, {"n": 3, "use_beam_search": True}])
def test_several_answers_all_have_the_shape(llm: LLM, fields: dict[str, Any]) -> None:
    choices = run(llm, [SamplingParams(structured_outputs={"json": POINT, "disable_any_whitespace": True}, max_tokens=60, **fields)])[0].outputs
    assert len(choices) == fields["n"]
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), POINT)


def test_beams_are_the_best_that_fit(llm: LLM) -> None:
    """Few enough texts to compare with all of them."""
    texts = ["red", "green", "blue", "black"]
    found = run(llm, [SamplingParams(guided_choice=texts, max_tokens=12, n=4, use_beam_search=True, logprobs=0)])[0].outputs
    assert {choice.text for choice in found} <= set(texts) and len({tuple(choice.token_ids) for choice in found}) == 4
    scores = [choice.cumulative_logprob / len(choice.token_ids) for choice in found]
    assert scores == sorted(scores, reverse=True)


def test_penalties_and_bias_work_beside_a_mask(llm: LLM) -> None:
    bias = {str(llm.get_tokenizer().encode("g", add_special_tokens=False)[0]): 100}
    params = SamplingParams(guided_choice=["red", "green"], logit_bias=bias, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=12, temperature=0)
    assert run(llm, [params])[0].outputs[0].text == "green"


def test_what_cannot_be_is_a_value_error_that_names_its_field(llm: LLM) -> None:
    for fields, param in (
        ({"guided_regex": "[a-z"}, "guided_regex"),
        ({"structured_outputs": {"json": {"type": "colour"}}}, "structured_outputs"),
        ({"guided_choice": ["a"], "guided_decoding_backend": "none-such"}, "guided_decoding_backend"),
        ({"guided_choice": ["red"], "allowed_token_ids": [5, 6]}, "guided_choice"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            llm.generate("x", SamplingParams(**fields), use_tqdm=False)
        assert caught.value.param == param
    assert run(llm, [SamplingParams(guided_choice=["red"])])[0].outputs[0].text == "red"


def test_one_bad_constraint_fails_alone(llm: LLM) -> None:
    outputs = llm.generate(["x", "x"], [SamplingParams(guided_regex="*"), SamplingParams(guided_choice=["red"])], use_tqdm=False)
    assert outputs[0].error is not None and outputs[1].outputs[0].text == "red"


def test_a_tool_call_by_schema_and_by_tag(llm: LLM) -> None:
    """What a chat route asks for internally: `structured_outputs` with the field's name for errors."""
    forced = SamplingParams(structured_outputs=StructuredOutputs(json=CALL, param="tools"), max_tokens=80, seed=1)
    assert json.loads(run(llm, [forced])[0].outputs[0].text)["city"] in ("Oslo", "Rome")
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": CALL}, "end": "</call>"}}
    tagged = run(llm, [SamplingParams(structured_outputs=StructuredOutputs(structural_tag=tag, param="tool_choice"), max_tokens=120, seed=1)])[0].outputs[0]
    assert tagged.finish_reason == "stop" and re.fullmatch(r'<call>\{\s*"city"\s*:\s*"(Oslo|Rome)"\s*\}</call>', tagged.text)
    with pytest.raises(InvalidParameter) as caught:
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(json={"type": "x"}, param="tools")), use_tqdm=False)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_other_backends_serve_by_flag(make: Callable[..., LLM], backend: str) -> None:
    other = make(guided_decoding_backend=backend)
    assert other._engine.info.structured_outputs[0] == (backend, "")
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}, "on": {"type": "boolean"}}, "required": ["c", "on"], "additionalProperties": False}
    for seed in range(3):
        output = run(other, [SamplingParams(guided_json=schema, max_tokens=200, seed=seed)])[0].outputs[0]
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), schema)
    with pytest.raises(InvalidParameter, match=f"{backend} has no grammar"):
        other.generate("x", SamplingParams(guided_grammar='start: "a"'), use_tqdm=False)
