"""From a Messages request's tools to those of a chat request.

Owns: the fields `tools` and `tool_choice`, and the names that the chat route's errors give to them.
Reads: `oarlock.backend_api`, `conversation`.
Never: runs a tool; checks a schema (the chat route does).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oarlock.backend_api import RouteError

from oarlock_messages.conversation import bad, check_cache_control, check_keys, show

_KEYS = ("type", "name", "description", "input_schema", "strict", "cache_control")
_CHOICE_KEYS = ("type", "name", "disable_parallel_tool_use")
_PLAIN = {"auto": "auto", "any": "required", "none": "none"}
# What the chat route calls a field -> what this route does, in this order.
_ERROR_NAMES = (
    (".function.parameters", ".input_schema"), (".function", ""), ("max_completion_tokens", "max_tokens"), ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("structured_outputs", "tools"), ("response_format", "tools"),
)  # fmt: skip


def chat_tools(values: Mapping[str, Any], *, allow_unknown: bool) -> dict[str, Any]:
    """The chat fields of `tools` and `tool_choice`. Raises RouteError 400."""
    tools, choice = values.get("tools"), values.get("tool_choice")
    body: dict[str, Any] = {}
    if tools is not None:
        if type(tools) is not list:
            raise bad("tools", f"tools must be an array of tools, not {show(tools)}.", "invalid_type")
        body["tools"] = [_tool(tool, f"tools[{at}]", allow_unknown) for at, tool in enumerate(tools)]
    if choice is not None:
        body |= _choice(choice, has_tools=bool(tools), allow_unknown=allow_unknown)
    return body if tools else {}


def _tool(tool: Any, path: str, allow_unknown: bool) -> dict[str, Any]:
    if type(tool) is not dict:
        raise bad(path, f"{path} must be an object with name and input_schema, not {show(tool)}.", "invalid_type")
    if tool.get("type") not in (None, "custom"):
        raise bad(f"{path}.type", f"{path}.type is {show(tool['type'])}; here it is 'custom': this server runs no tools itself.", "unsupported_field")
    check_keys(tool, _KEYS, path, allow_unknown)
    check_cache_control(tool.get("cache_control"), f"{path}.cache_control")
    if type(tool.get("name")) is not str:
        raise bad(f"{path}.name", f"{path}.name must be a string, not {show(tool.get('name'))}.", "invalid_type")
    if type(tool.get("input_schema")) is not dict:
        raise bad(f"{path}.input_schema", f"{path}.input_schema must be an object: a JSON schema, not {show(tool.get('input_schema'))}.", "invalid_type")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any, *, has_tools: bool, allow_unknown: bool) -> dict[str, Any]:
    if type(choice) is not dict or choice.get("type") not in (*_PLAIN, "tool"):
        raise bad("tool_choice", f'tool_choice must be {{"type": "auto"}}, "any", "none", or "tool" with a name, not {show(choice)}.')
    check_keys(choice, _CHOICE_KEYS, "tool_choice", allow_unknown)
    kind, alone = choice["type"], choice.get("disable_parallel_tool_use")
    if alone is not None and type(alone) is not bool:
        raise bad("tool_choice.disable_parallel_tool_use", f"tool_choice.disable_parallel_tool_use must be true or false, not {show(alone)}.", "invalid_type")
    if kind == "tool" and type(choice.get("name")) is not str:
        raise bad("tool_choice.name", f"tool_choice.name must be a string, not {show(choice.get('name'))}.", "invalid_type")
    if kind != "tool" and choice.get("name") is not None:
        raise bad("tool_choice.name", f'tool_choice.name goes with {{"type": "tool"}}, not {kind!r}.')
    if not has_tools and kind in ("any", "tool"):
        raise bad("tool_choice", "tool_choice is only allowed when tools are given.")
    body: dict[str, Any] = {"tool_choice": _PLAIN.get(kind) or {"type": "function", "function": {"name": choice["name"]}}}
    return body | ({"parallel_tool_calls": False} if alone else {})


def renamed(error: RouteError) -> RouteError:
    """An error of the chat route about this route's fields."""
    if error.param is None:
        return error
    name = {"stop": "stop_sequences"}.get(error.param, error.param)
    for theirs, ours in _ERROR_NAMES:
        name = name.replace(theirs, ours)
    found = error.renamed({error.param: name})
    text = re.sub(r"\b(tools\[\d+\])\.function(\.parameters)?", lambda path: path[1] + (".input_schema" if path[2] else ""), found.message)
    return replace(found, message=text)
