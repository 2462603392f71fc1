"""Reads a request body as one strict JSON object.

Owns: what counts as JSON here, and the message for what does not.
Reads: `server.errors`.
Never: knows a field's name or meaning.

Stricter than most parsers: NaN, Infinity and numbers beyond a double, duplicate keys, lone surrogates, nesting beyond
MAX_DEPTH and anything but an object are a 400, because each of them has been read differently by two ends of a wire.
"""

from __future__ import annotations

import json
import math
from typing import Any

from oarlock.server.errors import ApiError, bad

MAX_DEPTH = 64
MAX_BRACKETS = 500_000  # in the whole body, strings included: what bounds the time that reading it may take
_CONTAINERS = frozenset((dict, list))


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a dict. Raises ApiError 400. Linear in the body's size."""
    if not raw.strip():
        raise bad(None, "The request body is empty; send a JSON object.", "invalid_json")
    if len(raw) > MAX_BRACKETS and raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise bad(None, f"The request body has more than {MAX_BRACKETS} arrays and objects.", "invalid_json")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as exc:
        raise bad(None, f"The request body is not UTF-8 (byte {exc.start}).", "invalid_json") from None
    except json.JSONDecodeError as exc:
        raise bad(None, f"The request body is not valid JSON: {exc.msg} at character {exc.pos}.", "invalid_json") from None
    except ValueError:  # an integer of thousands of digits
        raise bad(None, "The request body holds a number that is too long.", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad(None, "The request body must be a JSON object.", "invalid_json")
    _check(value, may_hold_surrogates=b"\\u" in raw)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = key[:100].encode("utf-8", "replace").decode()
                raise bad(shown, f"The key {shown!r} is given twice.", "invalid_json")
            seen.add(key)
    return result


def _constant(name: str) -> Any:
    raise bad(None, f"{name} is not valid JSON; numbers must be finite.", "invalid_json")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise bad(None, f"The number {text[:40]} is beyond the range of a double.", "invalid_json")
    return value


def _too_deep() -> ApiError:
    return bad(None, f"The request body is nested too deeply; the limit is {MAX_DEPTH} levels.", "invalid_json")


def _check(value: Any, may_hold_surrogates: bool) -> None:
    """Bounds the nesting, and refuses text that has no UTF-8 form. Level by level, so no recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            if may_hold_surrogates:
                _check_text(item, children)
            if not _CONTAINERS.isdisjoint(map(type, children)):
                following += [c for c in children if type(c) in _CONTAINERS]
        if not following:
            return
        level = following
    raise _too_deep()


def _check_text(item: Any, children: Any) -> None:
    texts = [c for c in children if type(c) is str]
    if isinstance(item, dict):
        texts += item.keys()
    for text in texts:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise bad(None, "The request body holds a lone surrogate escape, which is not text.", "invalid_json") from None
