"""The forms in which callers of the offline API give prompts and conversations, as plain lists.

Owns: telling one from many.
Reads: `errors`.
Never: tokenises; knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from oarlock.errors import InvalidParameter, PromptTooLong, RequestError


@contextmanager
def naming(index: int, count: int, what: str) -> Iterator[None]:
    """Errors of one item of several say which."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        kind = type(error) if isinstance(error, InvalidParameter | PromptTooLong) else RequestError
        raise kind(f"{what} {index}: {error}", param=error.param, code=error.code) from None


def prompt_list(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """One prompt or many, in any of the forms, as a list of prompts."""
    many = _as_list(prompts)
    if prompt_token_ids is None:
        if prompts is None:
            raise InvalidParameter("prompts is missing; give a text, a list of token ids, or a list of prompts.", param="prompts")
        return many
    ids = _as_list(prompt_token_ids)
    if prompts is None:
        return [{"prompt_token_ids": entry} for entry in ids]
    if len(many) != len(ids):
        raise InvalidParameter(f"{len(many)} prompts and {len(ids)} lists of prompt_token_ids; give as many of each.", param="prompt_token_ids")
    return [{"prompt": text, "prompt_token_ids": entry} for text, entry in zip(many, ids, strict=True)]


def _as_list(prompts: Any) -> list[Any]:
    if prompts is None:
        return []
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not hasattr(prompts, "__iter__"):
        raise InvalidParameter(f"prompts is of type {type(prompts).__name__}; give a text, token ids, or a list of prompts.", param="prompts")
    many = list(prompts)
    return [many] if many and not isinstance(many[0], str | Mapping) and not hasattr(many[0], "__iter__") else many


def conversation_list(messages: Any) -> list[Any]:
    """One conversation or many, as a list of conversations."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidParameter("messages must be a list of messages, or a list of such lists, and not empty.", param="messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def plain_messages(conversation: Any, *, keep_parts: bool = False) -> list[dict[str, Any]]:
    """Messages whose content is text. Content given as a list of text parts is joined by newlines, or kept as a list of parts."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise InvalidParameter("a conversation is a list of messages that is not empty.", param="messages")
    plain = []
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f'messages[{index}] must be a mapping with a "role".', param=f"messages[{index}]")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
                    raise InvalidParameter(f"messages[{index}].content has a part that is no text; this version takes text only.", param="messages")
            texts = [part if isinstance(part, str) else part["text"] for part in content]
            content = [{"type": "text", "text": text} for text in texts] if keep_parts else "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise InvalidParameter(f"messages[{index}].content is of type {type(content).__name__}; give text.", param=f"messages[{index}].content")
        plain.append({**message, "content": content})
    return plain
