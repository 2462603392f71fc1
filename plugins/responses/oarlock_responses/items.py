"""From a Responses request's input to the messages of a chat request.

Owns: which items, roles, parts and keys an input may have, which items make one message, and the path in the error about one that it may not.
Reads: `oarlock.backend_api`.
Never: drops a part of an item; fetches what an item points to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import RouteError

ROLES = ("user", "assistant", "system", "developer")
MAX_ITEMS = 16384
MAX_PARTS = 16384  # of one item
_TEXT_PARTS = ("input_text", "output_text", "text")
_REASONING_PARTS = ("reasoning_text", "summary_text", "text")
_PART_KEYS = ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint")
_ITEM_KEYS = ("type", "role", "content", "id", "status", "phase")
_CALL_KEYS = ("type", "id", "call_id", "name", "arguments", "status")
_RESULT_KEYS = ("type", "id", "call_id", "output", "status")
_REASONING_KEYS = ("type", "id", "summary", "content", "status")
_NOT_BUILT = {
    "input_image": "images are not served",
    "input_file": "files are not served",
    "input_audio": "audio is not served",
    "refusal": "a refusal cannot be put into the chat template; send its text as output_text",
    "custom_tool_call": "only functions are served as tools",
    "custom_tool_call_output": "only functions are served as tools",
    "item_reference": "items are not kept by id; send the item, or previous_response_id",
}

bad, show = RouteError.invalid, RouteError.shown


def read_input(value: Any, *, allow_unknown: bool) -> list[dict[str, Any]]:
    """The messages that an input stands for; at least one. Raises RouteError 400 with the path of what is wrong."""
    if type(value) is str:
        return [{"role": "user", "content": value}]
    if type(value) is not list:
        raise bad("input", f"input must be a string or an array of items, not {show(value)}.", "invalid_type")
    if not value:
        raise bad("input", "input is an empty array; give at least one item.")
    if len(value) > MAX_ITEMS:
        raise bad("input", f"input has {len(value)} items; the limit is {MAX_ITEMS}.")
    turns = _Turns()
    for at, item in enumerate(value):
        _read(item, f"input[{at}]", turns, allow_unknown)
    return turns.done()


class _Turns:
    """Items as messages: an assistant's reasoning, text and calls that follow one another are one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._reasoning: str | None = None  # waits for what it led to

    def say(self, role: str, content: Any, **more: Any) -> None:
        if role == "assistant":
            more |= self._taken()
        else:
            self._settle()
        self._messages.append({"role": role, "content": content, **more})

    def think(self, text: str) -> None:
        self._settle()
        self._reasoning = text

    def call(self, call: dict[str, Any]) -> None:
        last = self._messages[-1] if self._messages else {}
        if self._reasoning is not None or last.get("role") != "assistant":
            self._messages.append({"role": "assistant", "content": None, **self._taken()})
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def _taken(self) -> dict[str, Any]:
        text, self._reasoning = self._reasoning, None
        return {} if text is None else {"reasoning_content": text}

    def _settle(self) -> None:
        """Reasoning that led to nothing is a message of its own."""
        if self._reasoning is not None:
            self._messages.append({"role": "assistant", "content": "", **self._taken()})

    def done(self) -> list[dict[str, Any]]:
        self._settle()
        return self._messages


def _read(item: Any, path: str, turns: _Turns, allow_unknown: bool) -> None:
    if type(item) is not dict:
        raise bad(path, f"{path} must be an object with role and content, not {show(item)}.", "invalid_type")
    match item.get("type", "message"):
        case "message":
            _message(item, path, turns, allow_unknown)
        case "function_call":
            check_keys(item, _CALL_KEYS, path, allow_unknown)
            name, arguments, key = (_text(item, field, path) for field in ("name", "arguments", "call_id"))
            turns.call({"id": key, "type": "function", "function": {"name": name, "arguments": arguments}})
        case "function_call_output":
            check_keys(item, _RESULT_KEYS, path, allow_unknown)
            turns.say("tool", _content(item.get("output"), f"{path}.output", allow_unknown), tool_call_id=_text(item, "call_id", path))
        case "reasoning":
            if item.get("encrypted_content") is not None:
                raise bad(f"{path}.encrypted_content", f"{path}.encrypted_content cannot be read here; send the reasoning as content, or leave the item out.", "unsupported_field")
            check_keys(item, (*_REASONING_KEYS, "encrypted_content"), path, allow_unknown)
            name = "content" if item.get("content") else "summary"
            parts = _content(item.get(name) or [{"type": "text", "text": ""}], f"{path}.{name}", allow_unknown, _REASONING_PARTS)
            turns.think(parts if type(parts) is str else "\n".join(part["text"] for part in parts if type(part) is dict))
        case kind:
            raise _wrong_type(kind, f"{path}.type", "'message', 'function_call', 'function_call_output' or 'reasoning'")


def _text(item: Mapping[str, Any], name: str, path: str) -> str:
    if type(item.get(name)) is not str:
        text = f"{path}.{name} must be a string, not {show(item.get(name))}."
        raise bad(f"{path}.{name}", text, "missing_field" if item.get(name) is None else "invalid_type")
    return str(item[name])


def _message(item: Mapping[str, Any], path: str, turns: _Turns, allow_unknown: bool) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{path}.role", f"{path}.role is {show(role)}; it must be one of {', '.join(ROLES)}.")
    check_keys(item, _ITEM_KEYS, path, allow_unknown)
    for name in ("id", "status", "phase"):
        if item.get(name) is not None and type(item[name]) is not str:
            raise bad(f"{path}.{name}", f"{path}.{name} must be a string, not {show(item[name])}.", "invalid_type")
    turns.say(role, _content(item.get("content"), f"{path}.content", allow_unknown))


def _content(value: Any, path: str, allow_unknown: bool, kinds: tuple[str, ...] = _TEXT_PARTS) -> str | list[dict[str, str]]:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise bad(path, f"{path} must be a string or an array of parts, not {show(value)}.", "invalid_type" if value is not None else "missing_field")
    if not value:
        raise bad(path, f"{path} is an empty array; give text.")
    if len(value) > MAX_PARTS:
        raise bad(path, f"{path} has {len(value)} parts; the limit is {MAX_PARTS}.")
    texts = [_part(part, f"{path}[{at}]", allow_unknown, kinds) for at, part in enumerate(value)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _part(part: Any, path: str, allow_unknown: bool, kinds: tuple[str, ...]) -> str:
    if type(part) is not dict:
        raise bad(path, f'{path} must be an object such as {{"type": "{kinds[0]}", "text": "…"}}, not {show(part)}.', "invalid_type")
    if part.get("type") not in kinds:
        raise _wrong_type(part.get("type"), f"{path}.type", f"{kinds[0]!r} or {kinds[1]!r}")
    if type(part.get("text")) is not str:
        raise bad(f"{path}.text", f"{path}.text must be a string, not {show(part.get('text'))}.", "invalid_type")
    if part.get("prompt_cache_breakpoint") is not None:
        raise bad(f"{path}.prompt_cache_breakpoint", f"{path}.prompt_cache_breakpoint: prefixes are cached by themselves; leave it out.", "unsupported_field")
    if part.get("annotations"):
        raise bad(f"{path}.annotations", f"{path}.annotations cannot be put into the chat template; leave them out.", "unsupported_field")
    check_keys(part, _PART_KEYS, path, allow_unknown)
    return str(part["text"])


def _wrong_type(kind: Any, path: str, wanted: str) -> RouteError:
    if type(kind) is str and kind in _NOT_BUILT:
        return bad(path, f"{path} is {kind!r}, but {_NOT_BUILT[kind]}. Nothing was fetched.", "unsupported_content")
    return bad(path, f"{path} is {show(kind)}; it must be {wanted}.")


def check_keys(item: Mapping[str, Any], known: tuple[str, ...], path: str, allow_unknown: bool) -> None:
    """Raises RouteError 400 for a key that is not known, unless null."""
    for key, value in item.items():
        if key not in known and value is not None and not allow_unknown:
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}; known are {', '.join(known)}.", "unknown_field")
