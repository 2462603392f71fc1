"""Every format, read whole and in any pieces."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
from typing import Any

import pytest
from formats import EXAMPLES, FUNCTIONS, HERMES, OSLO, Example
from hypothesis import given, settings
from hypothesis import strategies as st
from oarlock.backend_api import ParserContext, Piece, TextParser
from oarlock_tool_parsers import REASONING, TOOLS, extensions
from oarlock_tool_parsers.reading import HELD_ARGUMENTS, MAX_HELD

NAMES = [*(("tool_parser", name) for name in TOOLS), *(("reasoning_parser", name) for name in REASONING)]
FACTORIES = {(e.kind, e.name): e.factory for e in extensions()}


def make(kind: str, name: str, **context: Any) -> TextParser:
    module, _, attribute = FACTORIES[kind, name].partition(":")
    parser = getattr(importlib.import_module(module), attribute)(ParserContext(FUNCTIONS, **context))
    assert isinstance(parser, TextParser)
    return parser


def pieces_of(parser: TextParser, texts: list[str], reason: str = "stop") -> list[Piece]:
    return [*(piece for text in texts for piece in parser.feed(text)), *parser.finish(reason)]


def message_of(pieces: list[Piece]) -> dict[str, Any]:
    """The sum of pieces. Checks that arguments follow a call, and that nothing is empty but arguments."""
    message: dict[str, Any] = {}
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
        else:
            message[piece.kind] = message.get(piece.kind, "") + piece.text
    assert all(piece.text for piece in pieces if piece.kind != "arguments")
    return {**message, **({"calls": [tuple(call) for call in calls]} if calls else {})}


def read(example: Example, texts: list[str], reason: str = "stop") -> dict[str, Any]:
    return message_of(pieces_of(make(example.kind, example.parser, prompt_end=example.prompt), texts, reason))


def hermes(texts: list[str], reason: str = "stop") -> dict[str, Any]:
    return message_of(pieces_of(make("tool_parser", "hermes"), texts, reason))


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.parser}-{e.text[:30]!r}")
def test_a_text_says_what_it_says(example: Example) -> None:
    message = read(example, [example.text])
    assert (message.get("content"), message.get("reasoning")) == (example.content, example.reasoning)
    assert message.get("calls", []) == list(example.calls)
    for _, arguments in example.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.parser}-{e.text[:30]!r}")
def test_no_cut_of_a_text_changes_what_it_says(example: Example) -> None:
    """Every cut in two, every text that ends early (by itself and by a limit), and every character alone."""
    text = example.text if len(example.text) < 500 else example.text[:60] + example.text[1000:2200] + example.text[-40:]
    for reason in ("stop", "length"):
        for end in range(len(text) + 1) if len(text) < 500 else (70, 1100, 1290, len(text)):
            whole = read(example, [text[:end]], reason)
            assert read(example, list(text[:end]), reason) == whole, (reason, end)
            assert read(example, cut(text[:end], [random.Random(end).randint(0, end)]), reason) == whole
    whole = read(example, [text])
    for at in range(0, len(text), 1 if len(text) < 500 else 37):
        assert read(example, cut(text, [at])) == whole, at


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_cut_of_any_text_changes_what_it_says(data: st.DataObject) -> None:
    """Texts spliced from pieces of all formats: mostly malformed. Nothing is raised, and nothing hangs on the cut."""
    kind, name = data.draw(st.sampled_from(NAMES))
    own = [e.text for e in EXAMPLES if e.parser == name and len(e.text) < 500] or [HERMES]
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        source = data.draw(st.one_of(st.sampled_from(own), st.text(max_size=20)))
        start = data.draw(st.integers(0, max(0, len(source) // 3)))
        parts.append(source[start : data.draw(st.integers(start, len(source)))])
    text = "".join(parts)
    at = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    example = Example(name, text, kind=kind)
    whole = read(example, [text], reason)
    assert read(example, cut(text, at), reason) == whole
    assert read(example, list(text), reason) == whole
    json.dumps(whole, ensure_ascii=False).encode()


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12),
       st.sampled_from([None, 1]), st.booleans(), st.data())  # fmt: skip
def test_any_json_comes_through_as_it_was_written(value: Any, indent: int | None, ascii_only: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"value": value}, indent=indent, ensure_ascii=ascii_only)
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    pieces = cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert hermes(pieces) == {"calls": [("f", arguments)]}


def test_long_arguments_stream_and_short_ones_come_whole() -> None:
    """A call is announced when it has proved to be one, or when so much of it was held back."""
    parser = make("tool_parser", "hermes")
    assert [bool(parser.feed(char)) for char in HERMES].count(True) == 1, "all of it at once"
    body = "y" * (HELD_ARGUMENTS + 500)
    text = f'<tool_call>{{"name": "f", "arguments": {{"t": "{body}"}}}}</tool_call>'
    parser = make("tool_parser", "hermes")
    assert [bool(parser.feed(char)) for char in text].count(True) > 500
    # Once it streams it cannot be taken back: a break leaves what was sent, and the rest is content.
    broken = hermes([text[:-20] + '" oops'])
    assert broken["calls"][0][1].startswith('{"t": "yyy') and "oops" in broken["content"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]get_time{oops}"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time"),
        ("pythonic", "[get_time(a=1"),
        ("json", '{"name": "get_time", "arguments": {"a": 1}, }'),
        ("llama3_json", '{"name": "get_time", "parameters": {"a": 01}}'),
    ],
)  # fmt: skip
def test_a_malformed_call_is_content_as_it_was_written(name: str, text: str) -> None:
    assert read(Example(name, text), [text]) == {"content": text}


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "get_w', None),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os', ("get_weather", '{"city": "Os')),
        ("hermes", HERMES[:-6], OSLO),
        ("hermes", "<tool_c", None),
        ("mistral", '[TOOL_CALLS]get_time{"a', ("get_time", '{"a')),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁ca", None),
        ("openai", '<|channel|>commentary to=functions.get_time json<|message|>{"a": 1', ("get_time", '{"a": 1')),
        ("pythonic", "[get_time(a='x", ("get_time", '{"a": "x')),
    ],
)  # fmt: skip
def test_a_call_that_a_limit_cut_shows_as_far_as_it_is_known_and_no_markup(name: str, text: str, call: tuple[str, str] | None) -> None:
    assert read(Example(name, text), [text], "length") == ({"calls": [call]} if call else {})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "' + "n" * 200_000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"other": "' + "n" * 200_000 + '", "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": "' + "n" * 200_000 + '"}, "name": "f"}</tool_call>',
        "<tool_call>" + " " * 200_000 + '{"name": "f"}</tool_call>',
    ],
)
def test_what_is_held_back_is_bounded(text: str) -> None:
    assert hermes([text]) == hermes(cut(text, list(range(0, len(text), 977)))) == {"content": text}
    assert make("tool_parser", "hermes").feed(text[: MAX_HELD + 2000]), "the beginning is let go before the end comes"


def test_gpt_oss_passes_everything_on_where_calls_are_read_after_it() -> None:
    text = '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_time json<|message|>{"a": 1}<|call|>'
    first = make("reasoning_parser", "openai_gptoss", calls_are_read=True)
    assert message_of(pieces_of(first, [text])) == {"content": text}


def test_ids_have_the_form_that_the_chat_templates_take() -> None:
    assert len({make("tool_parser", name).make_call_id() for name in TOOLS for _ in range(20)}) == 20 * len(TOOLS)
    assert re.fullmatch("[a-z0-9]{9}", make("tool_parser", "mistral").make_call_id())
