"""From a Messages request to the messages of a chat request.

Owns: which roles, blocks and keys a message may have here, and the path in the error about one that it may not.
Reads: `oarlock.backend_api`.
Never: drops a part of a message; fetches what a block points to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from oarlock.backend_api import RouteError

ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 16384
MAX_BLOCKS = 16384  # of one message
_TEXT, _RESULT = ("text",), ("text", "tool_result")
_ANSWER = ("text", "tool_use", "thinking")
_NOT_HERE = {
    "image": "images are not served",
    "document": "documents are not served; put their text into a text block",
    "search_result": "search results are not served; put their text into a text block",
    "redacted_thinking": "thinking that nobody can read is not served; leave the block out",
    "server_tool_use": "this server runs no tools itself",
    "web_search_tool_result": "this server runs no tools itself",
    "tool_use": "only messages of the assistant have it",
    "tool_result": "only messages of the user have it",
    "thinking": "only messages of the assistant have it",
}
_KEYS = {
    "text": ("type", "text", "citations", "cache_control"),
    "tool_use": ("type", "id", "name", "input", "caller", "cache_control"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
}

bad, show = RouteError.invalid, RouteError.shown


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
        for turn in _turns(item, f"messages[{at}]", allow_unknown):
            last = turns[-1] if turns else {}
            if last.get("role") == turn["role"] != "tool" and "tool_calls" not in last:
                last["content"] += turn.pop("content")
                last |= turn
            else:
                turns.append(turn)
    for turn in turns:
        texts = turn["content"]
        turn["content"] = (texts[0] if texts else None) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
    return turns


def _turns(item: Any, path: str, allow_unknown: bool) -> list[dict[str, Any]]:
    """The chat messages of one message, contents as lists of texts: results of tools come before what the user says."""
    if type(item) is not dict:
        raise bad(path, f"{path} must be an object with role and content, not {show(item)}.", "invalid_type")
    role = item.get("role")
    if role not in ROLES:
        raise bad(f"{path}.role", f"{path}.role is {show(role)}; it must be one of {', '.join(ROLES)}.")
    check_keys(item, ("role", "content"), path, allow_unknown)
    if role == "system":
        return [{"role": role, "content": _texts(item.get("content"), f"{path}.content", allow_unknown)}]
    blocks = _blocks(item.get("content"), f"{path}.content", _ANSWER if role == "assistant" else _RESULT, allow_unknown)
    return [_answer(blocks, f"{path}.content")] if role == "assistant" else _said(blocks, f"{path}.content", allow_unknown)


def _answer(blocks: list[dict[str, Any]], path: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": []}
    for at, block in enumerate(blocks):
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            turn.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif "tool_calls" in turn:
            raise bad(f"{path}[{at}]", f"{path}[{at}] comes after a tool_use block; text and thinking come before the calls.")
        elif block["type"] == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
        else:
            turn["content"].append(block["text"])
    return turn


def _said(blocks: list[dict[str, Any]], path: str, allow_unknown: bool) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            raise bad(f"{path}[{at}]", f"{path}[{at}] is a tool_result after text; results come first.")
        content = block.get("content")
        result = [""] if content is None else _texts(content, f"{path}[{at}].content", allow_unknown)
        if block.get("is_error"):
            result[0] = f"Error: {result[0]}"
        turns.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
    return [*turns, {"role": "user", "content": texts}] if texts else turns


def _texts(value: Any, path: str, allow_unknown: bool) -> list[str]:
    """The texts of a string or of text blocks; at least one."""
    return [block["text"] for block in _blocks(value, path, _TEXT, allow_unknown)]


def _blocks(value: Any, path: str, kinds: tuple[str, ...], allow_unknown: bool) -> list[dict[str, Any]]:
    """The checked blocks of a content; at least one."""
    if type(value) is str:
        return [{"type": "text", "text": value}]
    if type(value) is not list:
        raise bad(path, f"{path} must be a string or an array of blocks, not {show(value)}.", "invalid_type" if value is not None else "missing_field")
    if not value:
        raise bad(path, f"{path} is an empty array; give text.")
    if len(value) > MAX_BLOCKS:
        raise bad(path, f"{path} has {len(value)} blocks; the limit is {MAX_BLOCKS}.")
    return [_block(block, f"{path}[{at}]", kinds, allow_unknown) for at, block in enumerate(value)]


def _block(block: Any, path: str, kinds: tuple[str, ...], allow_unknown: bool) -> dict[str, Any]:
    if type(block) is not dict:
        raise bad(path, f'{path} must be an object such as {{"type": "text", "text": "…"}}, not {show(block)}.', "invalid_type")
    kind = block.get("type")
    if type(kind) is not str or kind not in kinds:
        if type(kind) is str and kind in _NOT_HERE:
            raise bad(f"{path}.type", f"{path}.type is {kind!r}, but {_NOT_HERE[kind]}. Nothing was fetched.", "unsupported_content")
        raise bad(f"{path}.type", f"{path}.type is {show(kind)}; it must be {' or '.join(map(repr, kinds))}.")
    wanted: dict[str, tuple[type, ...]] = {
        "text": (str,), "thinking": (str,), "tool_use_id": (str,), "id": (str,), "name": (str,), "input": (dict,),
    }  # fmt: skip
    for key in _KEYS[kind]:
        if key in wanted and type(block.get(key)) not in wanted[key]:
            raise bad(f"{path}.{key}", f"{path}.{key} must be {'an object' if key == 'input' else 'a string'}, not {show(block.get(key))}.", "invalid_type")
    if block.get("is_error") is not None and type(block["is_error"]) is not bool:
        raise bad(f"{path}.is_error", f"{path}.is_error must be true or false, not {show(block['is_error'])}.", "invalid_type")
    if block.get("citations"):
        raise bad(f"{path}.citations", f"{path}.citations: citations are not served; leave them out.", "unsupported_field")
    check_cache_control(block.get("cache_control"), f"{path}.cache_control")
    check_keys(block, _KEYS[kind], path, allow_unknown)
    return block


def check_cache_control(value: Any, path: str) -> None:
    """Prefixes are kept and found without being marked, so a mark has no effect; its form is checked all the same."""
    if value is None:
        return
    if type(value) is not dict or value.get("type") != "ephemeral" or not value.keys() <= {"type", "ttl"} or value.get("ttl") not in (None, "5m", "1h"):
        raise bad(path, f'{path} must be {{"type": "ephemeral"}}, with "ttl": "5m" or "1h" if any, not {show(value)}.')


def check_keys(item: Mapping[str, Any], known: tuple[str, ...], path: str, allow_unknown: bool) -> None:
    for key, value in item.items():
        if key not in known and value is not None and not allow_unknown:
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}; known are {', '.join(known)}.", "unknown_field")
