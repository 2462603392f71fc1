"""From a Responses request's input to the messages of a chat request.

Owns: which items, roles, parts and keys an input may have, and the path in the error about one that it may not.
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
_PART_KEYS = ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint")
_ITEM_KEYS = ("type", "role", "content", "id", "status", "phase")
_NOT_BUILT = {
    "input_image": "images are not served",
    "input_file": "files are not served",
    "input_audio": "audio is not served",
    "refusal": "a refusal cannot be put into the chat template; send its text as output_text",
    "function_call": "tools are not served on this route",
    "function_call_output": "tools are not served on this route",
    "custom_tool_call": "tools are not served on this route",
    "custom_tool_call_output": "tools are not served on this route",
    "item_reference": "items are not kept by id; send the item, or previous_response_id",
    "reasoning": "reasoning is not served on this route; leave the item out",
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
    return [_message(item, f"input[{at}]", allow_unknown) for at, item in enumerate(value)]


def _message(item: Any, path: str, allow_unknown: bool) -> dict[str, Any]:
    if type(item) is not dict:
        raise bad(path, f"{path} must be an object with role and content, not {show(item)}.", "invalid_type")
    kind = item.get("type", "message")
    if kind != "message":
        raise _wrong_type(kind, f"{path}.type", "'message'")
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{path}.role", f"{path}.role is {show(role)}; it must be one of {', '.join(ROLES)}.")
    _check_keys(item, _ITEM_KEYS, path, allow_unknown)
    for name in ("id", "status", "phase"):
        if item.get(name) is not None and type(item[name]) is not str:
            raise bad(f"{path}.{name}", f"{path}.{name} must be a string, not {show(item[name])}.", "invalid_type")
    return {"role": role, "content": _content(item.get("content"), f"{path}.content", allow_unknown)}


def _content(value: Any, path: str, allow_unknown: bool) -> str | list[dict[str, str]]:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise bad(path, f"{path} must be a string or an array of parts, not {show(value)}.", "invalid_type" if value is not None else "missing_field")
    if not value:
        raise bad(path, f"{path} is an empty array; give text.")
    if len(value) > MAX_PARTS:
        raise bad(path, f"{path} has {len(value)} parts; the limit is {MAX_PARTS}.")
    texts = [_part(part, f"{path}[{at}]", allow_unknown) for at, part in enumerate(value)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _part(part: Any, path: str, allow_unknown: bool) -> str:
    if type(part) is not dict:
        raise bad(path, f'{path} must be an object such as {{"type": "input_text", "text": "…"}}, not {show(part)}.', "invalid_type")
    if part.get("type") not in _TEXT_PARTS:
        raise _wrong_type(part.get("type"), f"{path}.type", "'input_text' or 'output_text'")
    if type(part.get("text")) is not str:
        raise bad(f"{path}.text", f"{path}.text must be a string, not {show(part.get('text'))}.", "invalid_type")
    if part.get("prompt_cache_breakpoint") is not None:
        raise bad(f"{path}.prompt_cache_breakpoint", f"{path}.prompt_cache_breakpoint: prefixes are cached by themselves; leave it out.", "unsupported_field")
    if part.get("annotations"):
        raise bad(f"{path}.annotations", f"{path}.annotations cannot be put into the chat template; leave them out.", "unsupported_field")
    _check_keys(part, _PART_KEYS, path, allow_unknown)
    return part["text"]


def _wrong_type(kind: Any, path: str, wanted: str) -> RouteError:
    if type(kind) is str and kind in _NOT_BUILT:
        return bad(path, f"{path} is {kind!r}, but {_NOT_BUILT[kind]}. Nothing was fetched.", "unsupported_content")
    return bad(path, f"{path} is {show(kind)}; it must be {wanted}.")


def _check_keys(item: Mapping[str, Any], known: tuple[str, ...], path: str, allow_unknown: bool) -> None:
    for key, value in item.items():
        if key not in known and value is not None and not allow_unknown:
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}; known are {', '.join(known)}.", "unknown_field")
