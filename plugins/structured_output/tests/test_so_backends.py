"""Each backend, walked at random: whatever its masks allow matches the constraint, and JSON never runs on."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
from types import SimpleNamespace
from typing import Any

import jsonschema
import oarlock_structured_output as package
import pytest
import toy_grammars
from oarlock_structured_output import child, frames, vocabulary
from oarlock_structured_output.runaway import LIMIT, JsonRun, Leads
from oarlock_structured_output.schema import closed

LIBRARIES = {"llguidance": "llguidance", "outlines": "outlines_core", "lm_format_enforcer": "lmformatenforcer"}
NAMES = [pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")) for name, library in LIBRARIES.items()]
VOCABULARY = vocabulary.load("toy_grammars:vocabulary", "")
ASCII = [i for i in range(len(toy_grammars.TOKENS)) if toy_grammars.TOKENS[i].isascii()]

SCHEMAS: list[Any] = [
    {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 6}, {"enum": ["a", "b\"c", 5]},
    {"const": "é"}, {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "pattern": "^[ab]{1,5}c?$"},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"o": {"type": "object", "properties": {"x": {"enum": ["y"]}}, "required": ["x"], "additionalProperties": False}},
     "required": ["o"], "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"], "additionalProperties": False}}},
    {"type": "array", "items": {"type": "object", "properties": {"k": {"enum": ["q", "r"]}}, "required": ["k"], "additionalProperties": False}, "maxItems": 3},
]  # fmt: skip
ONLY_LLGUIDANCE: list[Any] = [
    {"type": "integer", "minimum": 3, "maximum": 17}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "integer", "multipleOf": 5},
    {"type": ["string", "null"], "maxLength": 3}, {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"},
    {"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 4}]},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "integer"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "properties": {}},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1}},
                                          "required": ["kids"], "additionalProperties": False}}},
    {}, True,
]  # fmt: skip

NOT_WRITTEN: list[Any] = [{"enum": ["a", "b\"c", 5]}, {"const": "é"}]


def specification(kind: str, text: str, **settings: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text, "whitespace_pattern": None, "disable_any_whitespace": False, "disable_additional_properties": False, **settings}


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"oarlock_structured_output.engine_{request.param}").Engine(VOCABULARY)


def name_of(engine: Any) -> str:
    return type(engine).__module__.rpartition("engine_")[2]


def walk(engine: Any, wanted: dict[str, Any], seed: int, limit: int = 400) -> tuple[str, bool]:
    """(a random text that its masks allow, whether it came to its end), through the process's own code."""
    grammar = child._Grammar(engine, Leads(VOCABULARY), wanted)
    rng, tokens, sent = random.Random(seed), [], 0
    for _ in range(limit):
        frame = bytearray(grammar.answer(7, sent, tokens[sent:]))
        ((kind, body),) = list(frames.take(frame))
        assert kind == b"M", bytes(body)
        sent = len(tokens)
        _, may_end, mask = frames.read_mask(body)
        allowed = [i for i in range(len(VOCABULARY.tokens)) if mask[i >> 3] >> (i & 7) & 1]
        assert len(mask) == 36 and toy_grammars.END not in allowed and max(allowed, default=0) < 263
        if may_end and (not allowed or rng.random() < 0.3):
            return b"".join(VOCABULARY.tokens[i] for i in tokens).decode(), True
        assert allowed, f"nothing may follow {tokens}"
        plain = [i for i in allowed if i in ASCII]
        tokens.append(rng.choice(plain or allowed))
    return b"".join(VOCABULARY.tokens[i] for i in tokens).decode("utf-8", "replace"), False


def check_blanks(text: str) -> None:
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    assert not re.search(rf"\s{{{LIMIT + 4},}}", outside) and not re.search(rf"\d{{{LIMIT + 4},}}", outside)


@pytest.mark.parametrize("schema", [*SCHEMAS, *ONLY_LLGUIDANCE], ids=lambda s: json.dumps(s)[:50])
def test_json_follows_its_schema(engine: Any, schema: Any) -> None:
    if schema in NOT_WRITTEN and name_of(engine) == "lm_format_enforcer":
        pytest.skip("texts that JSON escapes, and characters of several tokens, are refused by lm-format-enforcer")
    if schema in ONLY_LLGUIDANCE and name_of(engine) != "llguidance":
        pytest.skip("such schemas are llguidance's")
    ended = 0
    for seed in range(6):
        text, is_whole = walk(engine, specification("json", json.dumps(schema)), seed)
        check_blanks(text)
        if is_whole:
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert ended, "no walk came to an end"


def test_json_object_is_one(engine: Any) -> None:
    ended = 0
    for seed in range(12):
        text, is_whole = walk(engine, specification("json_object", '{"type":"object"}'), seed)
        check_blanks(text)
        if is_whole:
            ended += 1
            assert isinstance(json.loads(text), dict)
    assert ended


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-f]{2}", "(ab|cd)+x", "a?b*c", "(yes|no)", r"\d+\.\d{2}"])
def test_text_matches_its_pattern(engine: Any, pattern: str) -> None:
    found = [walk(engine, specification("regex", pattern), seed) for seed in range(6)]
    assert any(is_whole for _, is_whole in found)
    assert all(re.fullmatch(pattern, text) for text, is_whole in found if is_whole)


@pytest.mark.parametrize("choices", [["red", "green"], ["a", "ab", "abc"], ['say "hi"', "new\nline", "a+b", "(x)"], ["é", "日本"]])
def test_text_is_one_of_its_choices(engine: Any, choices: list[str]) -> None:
    if not "".join(choices).isascii() and name_of(engine) == "lm_format_enforcer":
        pytest.skip("characters of several tokens are not written by lm-format-enforcer")
    found = {walk(engine, specification("choice", json.dumps(choices)), seed) for seed in range(12)}
    assert {text for text, _ in found} <= set(choices) and all(is_whole for _, is_whole in found) and len(found) > 1


def test_json_of_lm_format_enforcer_is_strict_where_its_own_is_not(engine: Any) -> None:
    if name_of(engine) != "lm_format_enforcer":
        pytest.skip("one backend's mistakes")
    for seed in range(60):
        text, is_whole = walk(engine, specification("json", "{}"), seed, limit=200)
        if is_whole:
            json.loads(text)
    with pytest.raises(ValueError, match="use llguidance"):
        engine.compile(specification("json", json.dumps({"properties": {"a": {"enum": ['b"c']}}})))


def test_no_blank_where_none_is_wanted(engine: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    for seed in range(4):
        assert walk(engine, specification("json", json.dumps(schema), disable_any_whitespace=True), seed)[0] in ('{"a":true}', '{"a":false}')


@pytest.mark.parametrize("schema", [{"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, {"type": "string", "pattern": "[a-z"}])
def test_what_cannot_be_is_an_error_with_words(engine: Any, schema: Any) -> None:
    with pytest.raises(Exception) as caught:
        child._Grammar(engine, Leads(VOCABULARY), specification("json", json.dumps(schema)))
    assert child._words(caught.value)


# ---------------------------------------------------------------- llguidance alone
@pytest.fixture(scope="module")
def llguidance() -> Any:
    return importlib.import_module("oarlock_structured_output.engine_llguidance").Engine(VOCABULARY)


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no" root', 'start: "yes" | "no" start'])
def test_text_follows_its_grammar(llguidance: Any, grammar: str) -> None:
    for seed in range(6):
        text, is_whole = walk(llguidance, specification("grammar", grammar), seed)
        assert is_whole and re.fullmatch("(no)*yes", text)


@pytest.mark.parametrize("grammar", ["start: MISSING", 'root ::= "a" (', "@@@"])
def test_a_grammar_that_is_wrong_is_said(llguidance: Any, grammar: str) -> None:
    with pytest.raises(Exception) as caught:
        child._Grammar(llguidance, Leads(VOCABULARY), specification("grammar", grammar))
    assert child._words(caught.value)


TAG = {"begin": "<f=", "schema": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}, "end": "</f>"}
OTHER = {"begin": "<f:g>", "schema": {"enum": ["q"]}, "end": "."}


def feed(engine: Any, wanted: dict[str, Any], text: str | list[int]) -> tuple[set[int], bool]:
    """(tokens that may follow, whether the text may end)."""
    matcher = engine.compile(wanted)
    matcher.consume(list(text.encode()) if isinstance(text, str) else text)
    mask, may_end = matcher.mask()
    return {i for i in range(len(VOCABULARY.tokens)) if mask[i >> 3] >> (i & 7) & 1}, may_end


def chars(text: str) -> set[int]:
    return set(text.encode())


def test_a_structural_tag_leaves_text_free_and_shapes_what_follows_a_trigger(llguidance: Any) -> None:
    wanted = specification("structural_tag", json.dumps({"structures": [TAG, OTHER], "triggers": ["<f"]}))
    assert feed(llguidance, wanted, "")[1] and len(feed(llguidance, wanted, "hello")[0]) > 100
    assert feed(llguidance, wanted, "hello <f") == (chars("=:"), False)
    assert feed(llguidance, wanted, "hello <f:") == (chars("g"), False)
    assert feed(llguidance, wanted, 'hello <f={"x":true}') == (chars("<"), False)
    after, may_end = feed(llguidance, wanted, 'hello <f={"x":true}</f> and <f:g>"q".')
    assert may_end and len(after) > 100


def test_the_newer_form_of_a_structural_tag(llguidance: Any) -> None:
    tag = {"type": "tag", "begin": "<f=", "content": {"type": "json_schema", "json_schema": {"enum": [5]}}, "end": ">"}
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag], "at_least_one": True, "stop_after_first": True}
    wanted = specification("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    assert feed(llguidance, wanted, "") == (chars("<"), False) and feed(llguidance, wanted, "<f=5>") == (set(), True)
    wanted = specification("structural_tag", json.dumps({"type": "structural_tag", "format": {**form, "stop_after_first": False}}))
    assert not feed(llguidance, wanted, "hello")[1] and feed(llguidance, wanted, "hello <f=5>")[1]
    wanted = specification("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    assert feed(llguidance, wanted, "<f=5") == (chars(">"), False)


def test_a_trigger_that_is_a_special_token_is_that_token(llguidance: Any) -> None:
    tag = {"begin": "<call>", "schema": {"enum": [5]}, "end": ""}
    wanted = specification("structural_tag", json.dumps({"structures": [tag], "triggers": ["<call>"]}))
    assert toy_grammars.CALL in feed(llguidance, wanted, "hello")[0]
    assert feed(llguidance, wanted, [*b"hi", toy_grammars.CALL]) == (chars("5"), False)


@pytest.mark.parametrize(
    "tag",
    [
        {}, {"structures": [], "triggers": ["<"]}, {"structures": [TAG], "triggers": ["<g"]}, {"structures": [TAG], "triggers": ["<", "<f"]},
        {"structures": [{**TAG, "colour": 1}], "triggers": ["<f"]}, {"structures": [{**TAG, "schema": 5}], "triggers": ["<f"]}, {"format": {"type": "sequence"}},
        {"format": {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}}, {"structures": [TAG], "triggers": "<f"},
    ],
)  # fmt: skip
def test_a_tag_that_is_not_understood_is_said(llguidance: Any, tag: Any) -> None:
    with pytest.raises(ValueError, match=r"must|understood|not one of"):
        llguidance.compile(specification("structural_tag", json.dumps(tag)))


def test_objects_are_closed_where_that_is_wanted(llguidance: Any) -> None:
    text = json.dumps({"type": "object", "properties": {"a": {"const": {"type": "object"}}}, "required": ["a"]})
    for seed in range(8):
        found, is_whole = walk(llguidance, specification("json", text, disable_additional_properties=True), seed)
        assert is_whole and json.loads(found) == {"a": {"type": "object"}}


@pytest.mark.parametrize(
    ("schema", "closed_at"),
    [
        ({"type": "object", "properties": {}}, ["."]),
        ({"type": "object"}, []),  # lists nothing: free-form
        ({"type": "object", "properties": {"o": {"type": "object"}}}, ["."]),
        ({"type": "object", "properties": {"o": {"properties": {"x": {}}}}, "additionalProperties": True}, ["o"]),
        ({"properties": {"o": {}}, "patternProperties": {"^x": {}}}, []),
        ({"allOf": [{"properties": {"o": {}}}, {"properties": {"p": {}}}]}, []),  # each would refuse the other's
        ({"properties": {"o": {}}, "anyOf": [{"properties": {"p": {}}}, {"properties": {"q": {}}}]}, []),
        ({"anyOf": [{"properties": {"o": {}}}, {"type": "null"}]}, ["anyOf0"]),
        ({"items": {"properties": {"o": {}}}}, ["items"]),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"o": {}}}}}, ["$defs"]),
        ({"properties": {"o": {}}, "if": {"properties": {"o": {}}}, "then": {"properties": {"p": {}}}}, []),
        ({"enum": [{"properties": {}}]}, []),
    ],
)  # fmt: skip
def test_only_objects_whose_properties_are_listed_in_one_place_are_closed(schema: dict[str, Any], closed_at: list[str]) -> None:
    made = closed(schema)
    parts = {
        ".": made, "items": made.get("items"), "anyOf0": (made.get("anyOf") or [None])[0], "$defs": made.get("$defs", {}).get("d"),
        "o": made.get("properties", {}).get("o"),
    }  # fmt: skip
    before = json.dumps(schema).count("additionalProperties")
    assert [name for name, part in parts.items() if part and part.get("additionalProperties") is False] == closed_at
    assert json.dumps(made).count("additionalProperties") == before + len(closed_at)


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(("options", "words"), [({"grammar_time": 0.0}, "--grammar-time is 0.0"), ({"grammar_memory_mib": 1}, "--grammar-memory-mib is 1"),
                                                ({"grammar_processes": 0}, "--grammar-processes is 0"), ({"grammar_time": float("nan")}, "nan"), ({}, ""), ({"grammar_time": 2.0}, "")])  # fmt: skip
def test_options_beyond_their_bounds_are_said_at_the_start(options: dict[str, Any], words: str) -> None:
    config = SimpleNamespace(device=SimpleNamespace(options=options))
    problems = package.check_model(None, config, None)
    assert len(problems) == bool(words) and all(words in problem.text for problem in problems)


# ---------------------------------------------------------------- running on
def test_blanks_and_digits_have_an_end_and_strings_have_none() -> None:
    leads = Leads(VOCABULARY)
    every = VOCABULARY.bits(list(range(len(VOCABULARY.tokens))))

    def allowed(text: bytes, token: bytes) -> bool:
        run = JsonRun(leads)
        run.add(text)
        at = VOCABULARY.tokens.index(token)
        return bool(run.restrict(every, may_end=False)[at >> 3] >> (at & 7) & 1)

    assert allowed(b"{" + b" " * (LIMIT - 1), b" ") and not allowed(b"{" + b" " * (LIMIT - 1), b"   ") and not allowed(b"{" + b" " * LIMIT, b"\n")
    assert allowed(b"[" + b"1" * (LIMIT - 2), b"12") and not allowed(b"[" + b"1" * (LIMIT - 1), b"12") and not allowed(b"[1." + b"1" * LIMIT, b"1")
    assert allowed(b'{"' + b" " * 100, b" ") and allowed(b'{"\\"' + b"1" * 100, b"1")
    run = JsonRun(leads)
    run.add(b" " * LIMIT)
    only = VOCABULARY.bits([32])
    assert run.restrict(only, may_end=False) == only and run.restrict(only, may_end=True) == bytes(len(only))


def test_a_text_is_written_in_the_models_own_tokens_or_the_longest() -> None:
    assert VOCABULARY.encode(b"12") == [49, 50]
    blind = vocabulary.Vocabulary(VOCABULARY.tokens, VOCABULARY.special, VOCABULARY.ends, lambda text: [32, *text.encode()])
    assert [VOCABULARY.tokens[i] for i in blind.encode(b'{"ab\xff1234')] == [b'{"', b"ab", b"\xff", b"12", b"3", b"4"]
