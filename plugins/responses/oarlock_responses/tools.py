"""From a Responses request's tools and formats to those of a chat request, and the names of fields back.

Owns: the fields `tools`, `tool_choice`, `text` and `reasoning`, and the names that the chat route's errors give to them.
Reads: `oarlock.backend_api`, `items`.
Never: runs a tool; checks a schema (the chat route does).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oarlock.backend_api import RouteError

from oarlock_responses.items import bad, check_keys, show

_TOOL_KEYS = ("type", "name", "description", "parameters", "strict")
_FORMAT_KEYS = ("type", "name", "description", "schema", "strict")
_PLAIN = ("none", "auto", "required")
# What the chat route calls a field -> what this route does, in this order.
_ERROR_NAMES = (
    (".function.", "."), (".function", ""), ("response_format.json_schema", "text.format"), ("response_format", "text.format"), ("reasoning_effort", "reasoning.effort"),
    ("structured_outputs", "text.format"),
)  # fmt: skip
_RENAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


def chat_tools(values: Mapping[str, Any], *, allow_unknown: bool) -> dict[str, Any]:
    """The chat fields of `tools`, `tool_choice` and `parallel_tool_calls`; {} without tools. Raises RouteError 400."""
    tools, choice = values.get("tools"), values.get("tool_choice")
    if tools is not None and type(tools) is not list:
        raise bad("tools", f"tools must be an array of tools, not {show(tools)}.", "invalid_type")
    chosen = None if choice is None else _choice(choice)
    if not tools:
        if chosen not in (None, "none", "auto"):
            raise bad("tool_choice", "tool_choice is only allowed when tools are given.")
        return {}
    body: dict[str, Any] = {"tools": [_tool(tool, f"tools[{at}]", allow_unknown) for at, tool in enumerate(tools)]}
    return body | ({} if chosen is None else {"tool_choice": chosen}) | {k: values[k] for k in ("parallel_tool_calls",) if k in values}


def _tool(tool: Any, path: str, allow_unknown: bool) -> dict[str, Any]:
    if type(tool) is not dict:
        raise bad(path, f'{path} must be an object such as {{"type": "function", "name": …, "parameters": …}}, not {show(tool)}.', "invalid_type")
    if tool.get("type") != "function":
        raise bad(f"{path}.type", f"{path}.type is {show(tool.get('type'))}; it must be 'function': this server runs no tools itself.", "unsupported_field")
    check_keys(tool, _TOOL_KEYS, path, allow_unknown)
    return {"type": "function", "function": {key: tool[key] for key in _TOOL_KEYS[1:] if tool.get(key) is not None}}


def _choice(choice: Any) -> Any:
    if choice in _PLAIN:
        return choice
    if type(choice) is dict and choice.get("type") == "function" and set(choice) == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    if type(choice) is dict and type(choice.get("type")) is str and choice["type"] != "function":
        raise bad("tool_choice.type", f"tool_choice.type is {show(choice['type'])}; here it is 'function': send the tools that may be called.", "unsupported_field")
    raise bad("tool_choice", f'tool_choice must be "none", "auto", "required" or {{"type": "function", "name": …}}, not {show(choice)}.', "invalid_type")


def chat_format(text: Mapping[str, Any]) -> dict[str, Any]:
    """The chat field `response_format` of `text.format`; {} for plain text. Raises RouteError 400."""
    for key, value in text.items():
        if key != "format" and value is not None:
            raise bad(f"text.{key[:100]}", f"text.{key[:100]} is not served; leave it out.", "unsupported_field")
    form = text.get("format")
    if form is None:
        return {}
    if type(form) is not dict:
        raise bad("text.format", f"text.format must be an object with a type, not {show(form)}.", "invalid_type")
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad("text.format.type", f'text.format.type is {show(kind)}; it must be "text", "json_object" or "json_schema", the last with name and schema.', "unsupported_field")
    check_keys(form, _FORMAT_KEYS if kind == "json_schema" else ("type",), "text.format", False)
    if kind != "json_schema":
        return {"response_format": form} if kind == "json_object" else {}
    return {"response_format": {"type": "json_schema", "json_schema": {key: form[key] for key in _FORMAT_KEYS[1:] if form.get(key) is not None}}}


def chat_reasoning(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """The chat field `reasoning_effort` of `reasoning.effort`. Raises RouteError 400."""
    for key, value in reasoning.items():
        if key != "effort" and value is not None:
            path = f"reasoning.{key[:100]}"
            raise bad(path, f"{path} is not served: reasoning is answered as it is, where the server tells it apart. Leave it out.", "unsupported_field")
    effort = reasoning.get("effort")
    if effort is not None and type(effort) is not str:
        raise bad("reasoning.effort", f"reasoning.effort must be a string, not {show(effort)}.", "invalid_type")
    return {} if effort is None else {"reasoning_effort": effort}


def shown_tools(values: Mapping[str, Any]) -> dict[str, Any]:
    """How a response repeats these fields."""
    tools = [{"description": None, "parameters": None, "strict": False, **tool} for tool in values.get("tools") or ()]
    effort = values.get("reasoning", {}).get("effort")
    return {
        "tools": tools, "tool_choice": values.get("tool_choice", "auto"), "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "text": {"format": values.get("text", {}).get("format") or {"type": "text"}}, "reasoning": None if effort is None else {"effort": effort, "summary": None},
    }  # fmt: skip


def renamed(error: RouteError) -> RouteError:
    """An error of the chat route about this route's fields. Its messages are not this route's items, so no path leads into them."""
    if error.param is None:
        return error
    name = "input" if error.param.startswith("messages") else _RENAMES.get(error.param, error.param)
    for theirs, ours in _ERROR_NAMES:
        name = name.replace(theirs, ours)
    found = error.renamed({error.param: name})
    return replace(found, message=re.sub(r"\b(tools\[\d+\])\.function", r"\1", found.message))
