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
