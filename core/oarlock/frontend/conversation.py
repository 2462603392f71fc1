"""The messages of a chat request, checked: the same rules over HTTP and for `LLM.chat`.

Owns: which roles, contents and keys a message may have.
Reads: `errors`, a template's source (for the role developer).
Never: renders; fetches anything that a message points to.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oarlock.errors import InvalidParameter, show

if TYPE_CHECKING:
    from oarlock.frontend.chat import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 16384
MAX_CALLS = 128  # tool calls of one message
_REASONING = ("reasoning_content", "reasoning")  # two names of one thing
_KEYS = ("role", "content", "name")
_ROLE_KEYS = {"assistant": (*_KEYS, "tool_calls", *_REASONING), "tool": (*_KEYS, "tool_call_id")}
_NOT_BUILT_KEYS = {
    "function_call": "It is obsolete; send tool_calls.",
    **dict.fromkeys(("tool_calls", *_REASONING), "Only messages of role assistant have it."),
    "tool_call_id": "Only messages of role tool have it.",
    "audio": "Audio is not built in this version.",
    "refusal": "A refusal cannot be put into the chat template; send its text as content.",
    "annotations": "Annotations cannot be put into the chat template.",
}


def read_messages(value: Any, template: ChatTemplate | None, *, allow_unknown: bool = False, max_messages: int = MAX_MESSAGES) -> list[dict[str, Any]]:
    """The messages, their contents text or text parts; keys of unknown names only where they are allowed.

    Raises:
        InvalidParameter: with a code; `param` is the path, such as messages[0].content.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong("messages", value, "an array of messages")
    if not value:
        raise InvalidParameter("messages is an empty array; give at least one message.", "messages", "invalid_value")
    if len(value) > max_messages:
        raise InvalidParameter(f"messages has {len(value)} messages; the limit (--max-messages) is {max_messages}.", "messages", "invalid_value")
    return [_message(item, f"messages[{i}]", template, allow_unknown) for i, item in enumerate(value)]


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """A message's whole text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def _wrong(path: str, value: Any, wanted: str) -> InvalidParameter:
    return InvalidParameter(f"{path} must be {wanted}, not {show(value)}.", path, "invalid_type")


def _message(item: Any, path: str, template: ChatTemplate | None, allow_unknown: bool) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _wrong(path, item, "an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        problem = f"{path}.role is required" if role is None else f"{path}.role is {show(role)}"
        raise InvalidParameter(f"{problem}; it must be one of {', '.join(ROLES)}.", f"{path}.role", "invalid_value")
    known = _ROLE_KEYS.get(role, _KEYS)
    _check_keys(item, path, known, allow_unknown)
    given = item.get("tool_calls") if role == "assistant" else None
    calls = [] if given is None else _calls(given, f"{path}.tool_calls")
    may_lack_text = role == "assistant" and (calls or any(item.get(key) for key in _REASONING))
    content = None if item.get("content") is None and may_lack_text else _content(item.get("content"), f"{path}.content")
    message: dict[str, Any] = {"role": _role_for(role, template), "content": content}
    for key in ("name", "tool_call_id", *_REASONING):
        if key in known and item.get(key) is not None:
            if type(item[key]) is not str:
                raise _wrong(f"{path}.{key}", item[key], "a string")
            message[key] = item[key]
    if "reasoning" in message or "reasoning_content" in message:  # templates know either name
        message |= dict.fromkeys(_REASONING, message.get("reasoning_content", message.get("reasoning")))
    if role == "tool" and "tool_call_id" not in message:
        raise InvalidParameter(f"{path}.tool_call_id is required: which call this answers.", f"{path}.tool_call_id", "missing_field")
    if calls:
        message["tool_calls"] = calls
    _check_template(message, template, path)
    return message


def _check_template(message: Mapping[str, Any], template: ChatTemplate | None, path: str) -> None:
    """Raises InvalidParameter for calls and their results that the template would drop."""
    key = "tool_calls" if "tool_calls" in message else "role" if message["role"] == "tool" else None
    if key and template is not None and not any("tool" in text for text in template.sources.values()):
        text = f"{path}.{key}: the chat template knows no tools, so it would drop this; serve the model with one that does (--chat-template FILE)."
        raise InvalidParameter(text, f"{path}.{key}", "unsupported_field")


def _calls(value: Any, path: str) -> list[dict[str, Any]]:
    """An assistant's earlier calls. Their arguments are JSON text, as they were answered."""
    if type(value) is not list:
        raise _wrong(path, value, "an array of tool calls")
    if len(value) > MAX_CALLS:
        raise InvalidParameter(f"{path} has {len(value)} calls; the limit is {MAX_CALLS}.", path, "invalid_value")
    return [_call(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _call(item: Any, path: str) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or item.get("type", "function") != "function":
        raise _wrong(path, item, 'an object such as {"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    wanted = (("id", item.get("id")), ("function.name", function.get("name")), ("function.arguments", function.get("arguments")))
    for name, text in wanted:
        if type(text) is not str:
            raise _wrong(f"{path}.{name}", text, "a string")
    for key in (*item, *(f"function.{key}" for key in function)):
        if key not in ("id", "type", "index", "function", "function.name", "function.arguments"):
            shown = str(key)[:100]
            raise InvalidParameter(f"Unknown field {path}.{shown}.", f"{path}.{shown}", "unknown_field")
    return {"id": item["id"], "type": "function", "function": {"name": function["name"], "arguments": function["arguments"]}}


def _check_keys(item: Mapping[Any, Any], path: str, known: Sequence[str], allow_unknown: bool) -> None:
    for key, value in item.items():
        if key in known or value is None:
            continue
        shown = str(key)[:100]
        if key in _NOT_BUILT_KEYS:
            if value != []:
                raise InvalidParameter(f"{path}.{key}: {_NOT_BUILT_KEYS[key]}", f"{path}.{key}", "unsupported_field")
        elif not allow_unknown:
            close = difflib.get_close_matches(shown, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InvalidParameter(f"Unknown field {path}.{shown}.{hint}", f"{path}.{shown}", "unknown_field")


def _role_for(role: str, template: ChatTemplate | None) -> str:
    """OpenAI's developer role is the system role, for every template that does not know it by name."""
    if role != "developer" or (template is not None and any("developer" in text for text in template.sources.values())):
        return role
    return "system"


def _content(value: Any, path: str) -> str | list[dict[str, str]]:
    """Text, or text parts, which the template takes as they are or as lines of one text."""
    if type(value) is str:
        return value
    if value is None:
        raise InvalidParameter(f"{path} is required; it must be text.", path, "missing_field")
    if type(value) is not list:
        raise _wrong(path, value, "a string or an array of text parts")
    if not value:
        raise InvalidParameter(f"{path} is an empty array; give text.", path, "invalid_value")
    return [{"type": "text", "text": _part(part, f"{path}[{i}]")} for i, part in enumerate(value)]


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(path, part, 'an object such as {"type": "text", "text": …}')
    kind = part.get("type")
    if kind != "text":
        known = {"image_url": "images", "image": "images", "input_audio": "audio", "video_url": "video", "file": "files", "refusal": "refusals"}
        if type(kind) is str and kind in known:
            text = f"{path}: the model takes text only here; {known[kind]} are not built in this version. Nothing was fetched."
            raise InvalidParameter(text, f"{path}.type", "unsupported_content")
        raise InvalidParameter(f"{path}.type must be 'text', not {show(kind)}.", f"{path}.type", "invalid_value")
    for key in part:
        if key not in ("type", "text"):
            shown = str(key)[:100]
            raise InvalidParameter(f"Unknown field {path}.{shown}.", f"{path}.{shown}", "unknown_field")
    if type(part.get("text")) is not str:
        raise _wrong(f"{path}.text", part.get("text"), "a string")
    return str(part["text"])
