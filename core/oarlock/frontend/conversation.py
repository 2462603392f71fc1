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

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 16384
_TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call")
_NOT_BUILT_KEYS = {
    **dict.fromkeys(_TOOL_KEYS, "Tool calling is not built in this version."),
    "audio": "Audio is not built in this version.",
    "refusal": "A refusal cannot be put into the chat template; send its text as content.",
    "annotations": "Annotations cannot be put into the chat template.",
    "reasoning": "Reasoning is not built in this version; leave it out.",
    "reasoning_content": "Reasoning is not built in this version; leave it out.",
}


def read_messages(value: Any, template: ChatTemplate | None, *, allow_unknown: bool = False) -> list[dict[str, Any]]:
    """The messages, their contents text or text parts; keys of unknown names only where they are allowed.

    Raises:
        InvalidParameter: with a code; `param` is the path, such as messages[0].content.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong("messages", value, "an array of messages")
    if not value:
        raise InvalidParameter("messages is an empty array; give at least one message.", "messages", "invalid_value")
    if len(value) > MAX_MESSAGES:
        raise InvalidParameter(f"messages has {len(value)} messages; the limit is {MAX_MESSAGES}.", "messages", "invalid_value")
    return [_message(item, f"messages[{i}]", template, allow_unknown) for i, item in enumerate(value)]


def text_of(content: str | list[dict[str, str]]) -> str:
    """A message's whole text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _wrong(path: str, value: Any, wanted: str) -> InvalidParameter:
    return InvalidParameter(f"{path} must be {wanted}, not {show(value)}.", path, "invalid_type")


def _message(item: Any, path: str, template: ChatTemplate | None, allow_unknown: bool) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _wrong(path, item, "an object with role and content")
    role = item.get("role")
    if role == "tool":
        raise InvalidParameter("Tool calling is not built in this version, so there is no role tool.", f"{path}.role", "unsupported_field")
    if role not in ROLES:
        problem = f"{path}.role is required" if role is None else f"{path}.role is {show(role)}"
        raise InvalidParameter(f"{problem}; it must be one of {', '.join(ROLES)}.", f"{path}.role", "invalid_value")
    _check_keys(item, path, allow_unknown)
    message = {"role": _role_for(role, template), "content": _content(item.get("content"), f"{path}.content")}
    if item.get("name") is not None:
        if type(item["name"]) is not str:
            raise _wrong(f"{path}.name", item["name"], "a string")
        message["name"] = item["name"]
    return message


def _check_keys(item: Mapping[Any, Any], path: str, allow_unknown: bool) -> None:
    for key, value in item.items():
        if key in ("role", "content", "name") or value is None:
            continue
        shown = str(key)[:100]
        if key in _NOT_BUILT_KEYS:
            if value != []:
                raise InvalidParameter(f"{path}.{key}: {_NOT_BUILT_KEYS[key]}", f"{path}.{key}", "unsupported_field")
        elif not allow_unknown:
            close = difflib.get_close_matches(shown, ("role", "content", "name"), n=1)
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
