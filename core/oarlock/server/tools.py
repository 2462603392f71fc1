"""The fields of a chat request that concern tools and reasoning: checked, bounded, and what follows from them for the answer.

Owns: which function calls a request allows and which parsers read its answer.
Reads: `server.parsing`, `server.state`.
Never: knows a format of calls; renders a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from oarlock.backend_api import ParserContext, TextParser
from oarlock.errors import PIP
from oarlock.frontend.chat import ChatTemplate
from oarlock.sampling_params import SamplingParams
from oarlock.server.errors import bad
from oarlock.server.kinds import wrong
from oarlock.server.parsing import PROMPT_END, NamedCall, Parsers, Reading
from oarlock.server.state import ServerState
from oarlock.structured_outputs import StructuredOutputs

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools. `choice` is "none", "auto", "required" or "named"; `functions` are those that may be called."""

    choice: str = "none"
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shown: tuple[dict[str, Any], ...] = ()  # the tools that the template gets
    is_strict: bool = False  # calls must keep to the schemas
    max_calls: int | None = None  # None: any number

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")


def read_tools(values: Mapping[str, Any], state: ServerState, template: ChatTemplate | None) -> ToolUse:
    """Raises ApiError 400: the field at fault, or what the server lacks for it."""
    tools, choice = values.get("tools") or [], values.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice", "tool_choice is only allowed when tools are given.", "invalid_value")
        if "parallel_tool_calls" in values:
            raise bad("parallel_tool_calls", "parallel_tool_calls is only allowed when tools are given.", "invalid_value")
        return ToolUse()
    if len(tools) > state.server.max_tools:
        raise bad("tools", f"tools has {len(tools)} entries; the limit (--max-tools) is {state.server.max_tools}.", "invalid_value")
    functions: dict[str, Mapping[str, Any]] = {}
    room = state.server.max_tool_bytes
    for at, tool in enumerate(tools):
        room -= len(json.dumps(tool, ensure_ascii=False).encode("utf-8", "replace"))
        if room < 0:
            raise bad("tools", f"tools has more than {state.server.max_tool_bytes} bytes as JSON (--max-tool-bytes); send fewer or shorter ones.", "invalid_value")
        name, schema = _function(tool, f"tools[{at}]")
        if name in functions:
            raise bad(f"tools[{at}].function.name", f"Two tools have the name {name!r}; give each its own.", "invalid_value")
        functions[name] = schema
    kind, named = _choice(choice, functions)
    _check_parser(kind, state, given=choice is not None)
    strict = next((at for at, tool in enumerate(tools) if tool["function"].get("strict")), None)
    if strict is not None and kind == "auto" and (state.parsers.tool is None or not state.parsers.tool.call_tags(functions)):
        text = "With tool_choice auto this server's tool-call parser cannot enforce strict: send tool_choice required or a named function, or leave strict out."
        raise bad(f"tools[{strict}].function.strict", text, "unsupported_field")
    shown = () if kind == "none" and state.server.exclude_tools_when_none else tuple(tools)
    max_calls = 1 if kind == "named" or not values.get("parallel_tool_calls", True) else None
    if kind == "named":
        functions = {named: functions[named]}
    if shown and template is not None and "tools" not in template.variables and "tool_use" not in template.sources:
        text = "The chat template has no variable 'tools', so the model would not see them; serve it with a template that has (--chat-template FILE)."
        raise bad("tools", text, "unsupported_field")
    return ToolUse(kind, functions if kind != "none" else {}, shown, is_strict=strict is not None, max_calls=max_calls)


def _function(tool: Any, path: str) -> tuple[str, Mapping[str, Any]]:
    """(name, schema of the parameters) of one tool."""
    if type(tool) is not dict:
        raise wrong(path, tool, 'an object such as {"type": "function", "function": {"name": …, "parameters": …}}')
    if tool.get("type") != "function":
        raise bad(f"{path}.type", f"{path}.type must be 'function': this server runs no tools itself.", "unsupported_field")
    function = tool.get("function")
    if type(function) is not dict:
        raise wrong(f"{path}.function", function, "an object with name and parameters")
    for key in (*(k for k in tool if k not in ("type", "function")), *(f"function.{k}" for k in function if k not in _FUNCTION_KEYS)):
        raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}.", "unknown_field")
    name, schema = function.get("name"), function.get("parameters")
    if type(name) is not str or not NAME.fullmatch(name):
        raise bad(f"{path}.function.name", f"{path}.function.name must be 1 to 128 characters from A-Z a-z 0-9 _ . -", "invalid_value")
    for key, kind, wanted in (("description", str, "a string"), ("parameters", dict, "an object: a JSON schema"), ("strict", bool, "true or false")):
        if function.get(key) is not None and type(function[key]) is not kind:
            raise wrong(f"{path}.function.{key}", function[key], wanted)
    if schema and schema.get("type", "object") != "object":
        raise bad(f"{path}.function.parameters.type", f"{path}.function.parameters must describe an object: arguments are one.", "invalid_value")
    return name, schema or {"type": "object", "properties": {}}


def _choice(choice: Any, functions: Mapping[str, Any]) -> tuple[str, str]:
    """(the kind of choice, the function that was named or "")."""
    if choice is None:
        return "auto", ""
    if choice in ("none", "auto", "required"):
        return choice, ""
    inner = choice.get("function") if type(choice) is dict else None
    if type(inner) is not dict or choice.get("type") != "function" or len(choice) > 2 or inner.keys() - {"name"}:
        raise wrong("tool_choice", choice, '"none", "auto", "required" or {"type": "function", "function": {"name": …}}')
    name = inner.get("name")
    if type(name) is not str or name not in functions:
        shown = f"{name[:100]!r} is none of the tools" if type(name) is str else "is required"
        raise bad("tool_choice.function.name", f"tool_choice.function.name {shown}; name one of them.", "invalid_value")
    return "named", name


def _check_parser(kind: str, state: ServerState, *, given: bool) -> None:
    if kind == "auto" and not (state.server.enable_auto_tool_choice and state.parsers.tool):
        default = "" if given else " (the default where tools are given)"
        text = f"tool_choice auto{default} needs a server started with --enable-auto-tool-choice and --tool-call-parser NAME; or send tool_choice none, required or a function."
        raise bad("tool_choice" if given else "tools", text, "unsupported_field")
    if kind == "required" and state.parsers.listed is None:
        raise bad("tool_choice", f"tool_choice required needs the package oarlock-tool-parsers on the server: run {PIP} ./plugins/tool_parsers there, and start it anew.", "unsupported_field")


def constrain(params: SamplingParams, use: ToolUse, parsers: Parsers) -> SamplingParams:
    """The sampling under which only what `tool_choice` and `strict` ask for can come. Raises ApiError 400, InvalidParameter."""
    rooted = {name: _rooted(schema, "") for name, schema in use.functions.items()}
    tags = parsers.tool.call_tags(rooted) if use.is_strict and use.choice == "auto" and parsers.tool else None
    if not use.is_forced and not tags:
        if use.choice == "auto" and params.structured_outputs is not None:
            name = params.structured_outputs.param
            text = f"{name} constrains the whole answer, which leaves no room for a call; send tool_choice none, or leave {name} out."
            raise bad(name, text, "unsupported_field")
        return params
    if params.structured_outputs is not None:
        name = params.structured_outputs.param
        raise bad(name, f"{name} and the tools both constrain the answer; leave one of them out.", "invalid_value")
    if tags:
        return replace(params, structured_outputs=StructuredOutputs(structural_tag=cast("Any", tags), param="tools"))
    if use.choice == "named":
        schema: dict[str, Any] = next(iter(rooted.values()))
    else:
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/f{at}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for at, name in enumerate(use.functions)
        ]
        places = {f"f{at}": _rooted(one, f"f{at}") for at, one in enumerate(use.functions.values())}
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": places}
        schema |= {} if use.max_calls is None else {"maxItems": use.max_calls}
    # Clients of servers that close such objects leave additionalProperties out, and a function cannot be called with what it does not know.
    return replace(params, structured_outputs=StructuredOutputs(json=cast("Any", schema), disable_additional_properties=True, param="tools"))


def _rooted(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema of an object, its references pointing to where it stands: under `place` in "$defs", or at the root."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: f"#/$defs/{place}{item[1:]}" if key == "$ref" and isinstance(item, str) and item.startswith("#") else moved(item)
                for key, item in value.items()
            }
        return [moved(item) for item in value] if isinstance(value, list) else value

    return {"type": "object", **(moved(dict(schema)) if place else schema)}


class AnswerReader:
    """Makes the readings of a request's choices. `kinds` is empty where nothing is parsed."""

    def __init__(self, use: ToolUse, state: ServerState, prompt: str, *, show_reasoning: bool) -> None:
        parsers = state.parsers
        # A forced call is all there is from the first token on: no reasoning comes before it.
        reasoning = None if use.is_forced else parsers.reasoning
        tool = {"none": None, "auto": parsers.tool, "required": parsers.listed, "named": NamedCall}[use.choice]
        self.kinds: list[type[TextParser]] = [kind for kind in (reasoning, tool) if kind is not None]
        if not show_reasoning and parsers.reasoning is None:
            text = "include_reasoning false needs a server that tells reasoning apart (--reasoning-parser NAME); leave it out."
            raise bad("include_reasoning", text, "unsupported_field")
        self._use, self._show_reasoning = use, show_reasoning
        self._context = ParserContext(use.functions, prompt[-PROMPT_END:], tool is not None, use.is_forced)

    def reading(self) -> Reading:
        return Reading(self.kinds, self._context, max_calls=self._use.max_calls, show_reasoning=self._show_reasoning)

    def shown_special_tokens(self, params: SamplingParams) -> SamplingParams:
        """`params` with the special tokens that the parsers read shown in the text."""
        tokens = tuple(token for kind in self.kinds for token in kind.special_tokens)
        return replace(params, shown_special_tokens=tokens) if tokens and params.skip_special_tokens else params
