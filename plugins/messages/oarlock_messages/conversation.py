"""From a Messages request to the messages of a chat request.

Owns: which roles, blocks and keys a message may have here, and the path in the error about one that it may not.
Reads: `oarlock.backend_api`.
Never: drops a part of a message; fetches what a block points to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import RouteError

ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 16384
MAX_BLOCKS = 16384  # of one message
_NOT_BUILT = {
    "image": "images are not served",
    "document": "documents are not served; put their text into a text block",
    "search_result": "search results are not served; put their text into a text block",
    "thinking": "thinking is not served; leave the block out",
    "redacted_thinking": "thinking is not served; leave the block out",
    "tool_use": "tools are not served; leave the block out",
    "tool_result": "tools are not served; leave the block out",
    "server_tool_use": "tools are not served; leave the block out",
    "web_search_tool_result": "tools are not served; leave the block out",
}


def bad(param: str, message: str, code: str = "invalid_value") -> RouteError:
    return RouteError(400, message, param, code)


def show(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def chat_messages(system: Any, messages: Any, *, allow_unknown: bool) -> list[dict[str, Any]]:
    """`system` in front, then the turns; neighbours of one role are one turn. Raises RouteError 400 with the path of what is wrong."""
    turns: list[dict[str, Any]] = []
    if system is not None:
        turns.append({"role": "system", "content": _texts(system, "system", allow_unknown)})
    if type(messages) is not list:
        raise bad("messages", f"messages must be an array of messages, not {show(messages)}.", "invalid_type")
    if not messages:
        raise bad("messages", "messages is an empty array; give at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise bad("messages", f"messages has {len(messages)} messages; the limit is {MAX_MESSAGES}.")
    for at, item in enumerate(messages):
        role, texts = _message(item, f"messages[{at}]", allow_unknown)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += texts
        else:
            turns.append({"role": role, "content": texts})
    for turn in turns:
        texts = turn["content"]
        turn["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return turns


def _message(item: Any, path: str, allow_unknown: bool) -> tuple[str, list[str]]:
    if type(item) is not dict:
        raise bad(path, f"{path} must be an object with role and content, not {show(item)}.", "invalid_type")
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{path}.role", f"{path}.role is {show(role)}; it must be one of {', '.join(ROLES)}.")
    _check_keys(item, ("role", "content"), path, allow_unknown)
    return role, _texts(item.get("content"), f"{path}.content", allow_unknown)


def _texts(value: Any, path: str, allow_unknown: bool) -> list[str]:
    """The texts of a string or of text blocks; at least one."""
    if type(value) is str:
        return [value]
    if type(value) is not list:
        raise bad(path, f"{path} must be a string or an array of blocks, not {show(value)}.", "invalid_type" if value is not None else "missing_field")
    if not value:
        raise bad(path, f"{path} is an empty array; give text.")
    if len(value) > MAX_BLOCKS:
        raise bad(path, f"{path} has {len(value)} blocks; the limit is {MAX_BLOCKS}.")
    return [_block(block, f"{path}[{at}]", allow_unknown) for at, block in enumerate(value)]


def _block(block: Any, path: str, allow_unknown: bool) -> str:
    if type(block) is not dict:
        raise bad(path, f'{path} must be an object such as {{"type": "text", "text": "…"}}, not {show(block)}.', "invalid_type")
    kind = block.get("type")
    if kind != "text":
        if type(kind) is str and kind in _NOT_BUILT:
            raise bad(f"{path}.type", f"{path}.type is {kind!r}, but {_NOT_BUILT[kind]}. Nothing was fetched.", "unsupported_content")
        raise bad(f"{path}.type", f"{path}.type is {show(kind)}; it must be 'text'.")
    if type(block.get("text")) is not str:
        raise bad(f"{path}.text", f"{path}.text must be a string, not {show(block.get('text'))}.", "invalid_type")
    if block.get("citations"):
        raise bad(f"{path}.citations", f"{path}.citations: citations are not served; leave them out.", "unsupported_field")
    check_cache_control(block.get("cache_control"), f"{path}.cache_control")
    _check_keys(block, ("type", "text", "citations", "cache_control"), path, allow_unknown)
    return block["text"]


def check_cache_control(value: Any, path: str) -> None:
    """Prefixes are kept and found without being marked, so a mark has no effect; its form is checked all the same."""
    if value is None:
        return
    if type(value) is not dict or value.get("type") != "ephemeral" or not value.keys() <= {"type", "ttl"} or value.get("ttl") not in (None, "5m", "1h"):
        raise bad(path, f'{path} must be {{"type": "ephemeral"}}, with "ttl": "5m" or "1h" if any, not {show(value)}.')


def _check_keys(item: Mapping[str, Any], known: tuple[str, ...], path: str, allow_unknown: bool) -> None:
    for key, value in item.items():
        if key not in known and value is not None and not allow_unknown:
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}; known are {', '.join(known)}.", "unknown_field")
