"""Fields that these routes share, and what they say to the engine.

Owns: the table of shared fields, the forms of texts and token ids, the checks of single fields.
Reads: `oarlock.backend_api`.
Never: accepts a field and ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from oarlock.backend_api import PoolOptions, RouteError

bad, show = RouteError.invalid, RouteError.shown

SHARED: dict[str, Any] = {
    "model": "string", "user": "any", "truncate_prompt_tokens": "integer", "truncation_side": "string", "priority": "integer", "cache_salt": "string",
    "request_id": "string", "use_activation": "boolean", "add_special_tokens": "boolean",
}  # fmt: skip
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "padding": ("prompts are never padded; leave the field out.", ("do_not_pad",)),
    "mm_processor_kwargs": ("images and audio are not served; leave the field out.", ({},)),
}
MAX_REQUEST_ID = 128


def check_count(value: list[Any], name: str, limit: int) -> None:
    """Before a long list is looked into. Raises RouteError 400."""
    if not value:
        raise bad(name, f"{name} is an empty array; give at least one text.")
    if len(value) > limit:
        raise bad(name, f"{name} has {len(value)} entries; the limit (--max-prompts) is {limit}.")


def read_texts(value: Any, name: str, limit: int) -> list[Any]:
    """A text, token ids, or a list of either, as a list. The ids themselves are checked with the prompts. Raises RouteError 400."""
    if type(value) is str:
        value = [value]
    if type(value) is not list:
        raise bad(name, f"{name} must be a string, an array of token ids, or an array of these, not {show(value)}.", "invalid_type")
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    check_count(value, name, limit)
    if kinds != {str} and kinds != {list}:
        raise bad(name, f"{name} must be a string, an array of token ids, or an array of either; this array mixes or holds others.", "invalid_type")
    for at, item in enumerate(value):
        if not len(item):
            where = name if len(value) == 1 else f"{name}[{at}]"
            raise bad(where, f"{where} is empty; leave it out.")
    return list(value)


def pool_options(values: Mapping[str, Any], task: Literal["embed", "classify"] | None, **more: Any) -> PoolOptions:
    """Raises RouteError 400."""
    if not values.get("cache_salt", "x"):
        raise bad("cache_salt", "cache_salt must be a string of 1 to 1024 characters.")
    if "truncation_side" in values and "truncate_prompt_tokens" not in values:
        raise bad("truncation_side", "truncation_side is only allowed with truncate_prompt_tokens.")
    passed = ("truncate_prompt_tokens", "truncation_side", "priority", "cache_salt", "use_activation", "add_special_tokens")
    return PoolOptions(task=task, **{**{name: values[name] for name in passed if name in values}, **more})


def own_id(values: Mapping[str, Any], request_id: str) -> str:
    """The request's id: what the client calls it, else the header's. Raises RouteError 400."""
    found = values.get("request_id", request_id)
    if not 0 < len(found) <= MAX_REQUEST_ID or not found.isprintable():
        raise bad("request_id", f"request_id must be 1 to {MAX_REQUEST_ID} printable characters.")
    return found


def usage(num_tokens: int, num_cached_tokens: int = 0) -> dict[str, Any]:
    """Every prompt token was computed or found; none was generated."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": num_cached_tokens}}
