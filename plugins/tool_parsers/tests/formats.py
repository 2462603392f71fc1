"""Texts in each format, and what they say.

Owns: the examples that the tests share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LONG = "x" * 3000
FUNCTIONS: dict[str, dict[str, Any]] = {"get_weather": {"type": "object"}, "get_time": {"type": "object"}, "tools.list": {"type": "object"}}


@dataclass(frozen=True)
class Example:
    """`calls` are (name, JSON text of the arguments)."""

    parser: str
    text: str
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None
    kind: str = "tool_parser"
    prompt: str = ""


OSLO = ("get_weather", '{"city": "Oslo", "days": 3}')
NOW = ("get_time", "{}")
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
DEEP = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Oslo\", \"days\": 3}\n```<｜tool▁call▁end｜>"
DEEP31 = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo", "days": 3}<｜tool▁call▁end｜>'
PARAMETERS = '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}'
HARMONY = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>'

EXAMPLES = [
    # ------------------------------------------------------------ hermes
    Example("hermes", HERMES, calls=(OSLO,)),
    Example("hermes", f'I look.\n{HERMES}\n<tool_call>{{"name":"get_time"}}</tool_call>\n\nDone.', "I look.\n\nDone.", (OSLO, NOW)),
    Example("hermes", '<tool_call>{"arguments": {"a": "\\u00e9 \\" </tool_call> ü"}, "name": "other"}', calls=(("other", '{"a": "\\u00e9 \\" </tool_call> ü"}'),)),
    Example("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\"zone\\": 1}"}</tool_call>', calls=(("get_time", '{"zone": 1}'),)),
    Example("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', calls=(NOW,)),
    Example("hermes", '<tool_call>{"name": "get_time", "arguments": {"t": "a\nb"}}</tool_call>', calls=(("get_time", '{"t": "a\\nb"}'),)),
    Example("hermes", f'<tool_call>{{"name": "get_time", "arguments": {{"t": "{LONG}", "n": [1.5e3, -0, {{}}]}}}}</tool_call>',
            calls=(("get_time", f'{{"t": "{LONG}", "n": [1.5e3, -0, {{}}]}}'),)),
    Example("hermes", "No call, a <b> and </tool_call>.\n", "No call, a <b> and </tool_call>.\n"),
    Example("hermes", "", None),
    Example("hermes", " \n ", " \n "),
    # ------------------------------------------------------------ llama3_json
    Example("llama3_json", PARAMETERS, calls=(OSLO,)),
    Example("llama3_json", f'\n<|python_tag|>{PARAMETERS}; {{"name": "get_time", "parameters": {{}}}}', calls=(OSLO, NOW)),
    Example("llama3_json", f'{PARAMETERS} is what I call', " is what I call", (OSLO,)),
    Example("llama3_json", f"I call <|python_tag|>{PARAMETERS}", "I call", (OSLO,)),
    Example("llama3_json", '{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}'),
    Example("llama3_json", '{"type": "function", "function": {"name": "get_time", "parameters": {}}}', calls=(NOW,)),
    Example("llama3_json", "Just { text }", "Just { text }"),
    # ------------------------------------------------------------ pythonic
    Example("pythonic", "[get_weather(city='Oslo', days=3)]", calls=(OSLO,)),
    Example("pythonic", '<|python_start|>[get_weather(city="Oslo", days=3), get_time()]<|python_end|> Ok', " Ok", (OSLO, NOW)),
    Example("pythonic", "[tools.list(a=True, b=None, c=[1, (2,)], d={'k': -1.5, \"l\": {}}, e='\\'\\n\\x41\\u00e9\\q\"')]",
            calls=(("tools.list", '{"a": true, "b": null, "c": [1, [2]], "d": {"k": -1.5, "l": {}}, "e": "\'\\nA\\u00e9\\\\q\\""}'),)),
    Example("pythonic", "[1, 2, 3]", "[1, 2, 3]"),
    Example("pythonic", "[other(a=1)]", "[other(a=1)]"),
    Example("pythonic", "[get_time(now)]", "[get_time(now)]"),
    Example("pythonic", "Hello [get_time()]", "Hello [get_time()]"),
    # ------------------------------------------------------------ mistral
    Example("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]', calls=(OSLO,)),
    Example("mistral", 'Yes.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, {"name": "get_time", "arguments": {}}]', "Yes.", (OSLO, NOW)),
    Example("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo", "days": 3}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}', calls=(OSLO, NOW)),
    Example("mistral", "A [list] of [TOOL_] things", "A [list] of [TOOL_] things"),
    Example("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    # ------------------------------------------------------------ deepseek
    Example("deepseek_v3", f"<｜tool▁calls▁begin｜>{DEEP}<｜tool▁calls▁end｜>", calls=(OSLO,)),
    Example("deepseek_v3", f"Hm.\n<｜tool▁calls▁begin｜>{DEEP}\n{DEEP31}<｜tool▁calls▁end｜>", "Hm.", (OSLO, OSLO)),
    Example("deepseek_v31", f"<｜tool▁calls▁begin｜>{DEEP31}<｜tool▁calls▁end｜>", calls=(OSLO,)),
    Example("deepseek_v3", "a <｜tool▁calls▁begin｜> b", "a <｜tool▁calls▁begin｜> b"),
    # ------------------------------------------------------------ gpt-oss
    Example("openai", "<|channel|>final<|message|>Hello.<|return|>", "Hello."),
    Example("openai", f"<|channel|>analysis<|message|>Hm<|end|>{HARMONY}", None, (OSLO,), "Hm"),
    Example("openai", f"<|channel|>commentary<|message|>I look.<|end|>{HARMONY}{HARMONY}", "I look.", (OSLO, OSLO)),
    Example("openai", ' to=functions.get_time<|channel|>commentary json<|message|>{}', None, (NOW,)),
    Example("openai", "<|channel|>commentary to=functions.get_time json<|message|>{oops}<|call|>", "{oops}"),
    Example("openai", "plain", "plain"),
    Example("gpt_oss", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello.", "Hello.", (), "Hm", kind="reasoning_parser"),
    # ------------------------------------------------------------ json
    Example("json", PARAMETERS, calls=(OSLO,)),
    Example("json", f'```json\n[{PARAMETERS}, {{"name": "get_time", "arguments": {{}}}}]\n```\nDone', "\nDone", (OSLO, NOW)),
    Example("json", '[{"name": "Anna"}]', '[{"name": "Anna"}]'),
    Example("json", "```python\nx\n```", "```python\nx\n```"),
    Example("json", f"[{PARAMETERS}", calls=(OSLO,)),
    # ------------------------------------------------------------ reasoning
    Example("deepseek_r1", "<think>\nHm. \n</think>\n\nYes\n", "Yes\n", (), "Hm.", kind="reasoning_parser"),
    Example("deepseek_r1", "Hm </think> Yes", "Yes", (), "Hm", kind="reasoning_parser"),
    Example("deepseek_r1", "Hm", None, (), "Hm", kind="reasoning_parser"),
    Example("deepseek_r1", "Yes <think>", "Yes <think>", kind="reasoning_parser", prompt="<think>\n\n</think>\n\n"),
    Example("qwen3", "<think>Hm</think>Yes", "Yes", (), "Hm", kind="reasoning_parser"),
    Example("qwen3", "Hm</think>Yes", "Yes", (), "Hm", kind="reasoning_parser", prompt="<|im_start|>assistant\n<think>\n"),
    Example("qwen3", "Yes, </think> is a mark", "Yes, </think> is a mark", kind="reasoning_parser"),
    Example("mistral", "[THINK]Hm[/THINK]Yes", "Yes", (), "Hm", kind="reasoning_parser"),
]  # fmt: skip
