"""The messages of a chat request: checked, then rendered by the chat template.

Owns: which roles, contents and keys a message may have.
Reads: `frontend.chat`, `server.kinds`.
Never: fetches anything that a message points to.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from oarlock.errors import ConfigError
from oarlock.frontend.chat import ChatTemplate, missing_template
from oarlock.server.errors import bad
from oarlock.server.kinds import show, wrong
from oarlock.server.state import ServerState

ROLES = ("system", "developer", "user", "assistant", "tool")
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


def read_messages(value: Any, state: ServerState) -> list[dict[str, Any]]:
    """The messages, their contents text or text parts. Raises ApiError 400; `param` is the path, such as messages[0].content."""
    if type(value) is not list:
        raise wrong("messages", value, "an array of messages")
    if not value:
        raise bad("messages", "messages is an empty array; give at least one message.", "invalid_value")
    if len(value) > MAX_MESSAGES:
        raise bad("messages", f"messages has {len(value)} messages; the limit is {MAX_MESSAGES}.", "invalid_value")
    return [_message(item, f"messages[{i}]", state) for i, item in enumerate(value)]


def _message(item: Any, path: str, state: ServerState) -> dict[str, Any]:
    if type(item) is not dict:
        raise wrong(path, item, "an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        problem = f"{path}.role is required" if role is None else f"{path}.role is {show(role)}"
        raise bad(f"{path}.role", f"{problem}; it must be one of {', '.join(ROLES)}.", "invalid_value")
    if role == "tool":
        raise bad(f"{path}.role", "Tool calling is not built in this version, so there is no role tool.", "unsupported_field")
    _check_keys(item, path, state.server.allow_unknown_fields)
    message = {"role": _role_for(role, state), "content": _content(item.get("content"), f"{path}.content")}
    if item.get("name") is not None:
        if type(item["name"]) is not str:
            raise wrong(f"{path}.name", item["name"], "a string")
        message["name"] = item["name"]
    return message


def _check_keys(item: dict[str, Any], path: str, allow_unknown: bool) -> None:
    for key, value in item.items():
        if key in ("role", "content", "name") or value is None:
            continue
        if key in _NOT_BUILT_KEYS:
            if value != []:
                raise bad(f"{path}.{key}", f"{path}.{key}: {_NOT_BUILT_KEYS[key]}", "unsupported_field")
        elif not allow_unknown:
            close = difflib.get_close_matches(key[:100], ("role", "content", "name"), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}.{hint}", "unknown_field")


def _role_for(role: str, state: ServerState) -> str:
    """OpenAI's developer role is the system role, for every template that does not know it by name."""
    if role != "developer" or (state.template is not None and any("developer" in text for text in state.template.sources.values())):
        return role
    return "system"


def _content(value: Any, path: str) -> str | list[dict[str, str]]:
    """Text, or text parts, which the template takes as they are or as lines of one text."""
    if type(value) is str:
        return value
    if value is None:
        raise bad(path, f"{path} is required; it must be text.", "missing_field")
    if type(value) is not list:
        raise wrong(path, value, "a string or an array of text parts")
    if not value:
        raise bad(path, f"{path} is an empty array; give text.", "invalid_value")
    return [{"type": "text", "text": _part(part, f"{path}[{i}]")} for i, part in enumerate(value)]


def text_of(content: str | list[dict[str, str]]) -> str:
    """A message's whole text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _part(part: Any, path: str) -> str:
    if type(part) is not dict:
        raise wrong(path, part, 'an object such as {"type": "text", "text": …}')
    kind = part.get("type")
    if kind != "text":
        known = {"image_url": "images", "image": "images", "input_audio": "audio", "video_url": "video", "file": "files", "refusal": "refusals"}
        if type(kind) is str and kind in known:
            raise bad(f"{path}.type", f"{path}: the model takes text only here; {known[kind]} are not built in this version. Nothing was fetched.", "unsupported_content")
        raise bad(f"{path}.type", f"{path}.type must be 'text', not {show(kind)}.", "invalid_value")
    for key in part:
        if key not in ("type", "text"):
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}.", "unknown_field")
    if type(part.get("text")) is not str:
        raise wrong(f"{path}.text", part.get("text"), "a string")
    return part["text"]


# ---------------------------------------------------------------- template
def render(messages: list[dict[str, Any]], values: Mapping[str, Any], state: ServerState) -> str:
    """The prompt's text, special tokens included. Raises RequestError or ApiError 400."""
    template = _template(values, state)
    extra = values.get("chat_template_kwargs", {})
    template.check_kwargs(extra)
    continues = values.get("continue_final_message", False)
    starts = values.get("add_generation_prompt", not continues)
    if continues and messages[-1]["role"] != "assistant":
        raise bad("continue_final_message", "continue_final_message needs a last message of role assistant.", "invalid_value")
    return template.render(messages, add_generation_prompt=starts, continue_final_message=continues, **extra)


def _template(values: Mapping[str, Any], state: ServerState) -> ChatTemplate:
    source = values.get("chat_template")
    if source is None:
        if state.template is None:
            raise missing_template(state.names[0])
        return state.template
    if not state.server.allow_request_chat_template:
        raise bad("chat_template", "This server takes no chat template from requests; it would need --allow-request-chat-template.", "unsupported_field")
    try:
        return ChatTemplate(source, state.tokenizer)
    except ConfigError as exc:
        raise bad("chat_template", str(exc), "invalid_value") from None

