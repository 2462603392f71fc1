"""The types a request field may have, read strictly: a bool is no integer, "5" is no 5.

Owns: one reader for each kind of value, with its JSON schema.
Reads: `server.errors`.
Never: knows a field's name; ranges belong to `SamplingParams`, model limits to `frontend.inputs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oarlock.errors import show
from oarlock.server.errors import ApiError, bad

INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Kind:
    """`read(value, path)` returns the value or raises ApiError 400 with `param` = path; `schema` describes it."""

    read: Callable[[Any, str], Any]
    schema: dict[str, Any]


def wrong(path: str, value: Any, wanted: str) -> ApiError:
    return bad(path, f"{path} must be {wanted}, not {show(value)}.", "invalid_type")


def _boolean(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise wrong(path, value, "true or false")
    return value


def _integer(value: Any, path: str) -> int:
    if type(value) is not int:
        raise wrong(path, value, "an integer")
    if not -INT64 <= value < INT64:
        raise bad(path, f"{path} must fit in 64 bits; {show(value)} does not.", "invalid_value")
    return value


def _number(value: Any, path: str) -> float:
    if type(value) is not int and type(value) is not float:
        raise wrong(path, value, "a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise bad(path, f"{path} must be a finite number.", "invalid_value")
    return result


def _string(value: Any, path: str) -> str:
    if type(value) is not str:
        raise wrong(path, value, "a string")
    return value


def _object(value: Any, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong(path, value, "an object")
    return value


def _object_or_text(value: Any, path: str) -> dict[str, Any] | str:
    if type(value) is not dict and type(value) is not str:
        raise wrong(path, value, "an object, or JSON text")
    return value


def _items(value: Any, path: str, wanted: str) -> list[Any]:
    if type(value) is not list:
        raise wrong(path, value, wanted)
    return value


def _strings(value: Any, path: str) -> tuple[str, ...]:
    return tuple(_string(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path, "an array of strings")))


def _string_or_strings(value: Any, path: str) -> tuple[str, ...]:
    if type(value) is str:
        return (value,)
    return tuple(_string(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path, "a string or an array of strings")))


def token_ids(value: Any, path: str) -> list[int]:
    """A list of JSON integers; their range is checked where the vocabulary is known."""
    items = _items(value, path, "an array of token ids")
    if set(map(type, items)) <= {int} and (not items or (-INT64 <= min(items) and max(items) < INT64)):
        return items  # PERF: millions of ids may come in one body; this costs three passes in C
    for i, item in enumerate(items):
        if type(item) is not int:
            raise bad(path, f"{path}[{i}] must be an integer token id, not {show(item)}.", "invalid_type")
        if not -INT64 <= item < INT64:
            raise bad(path, f"{path}[{i}] must be a token id of the vocabulary; {show(item)} is not.", "invalid_value")
    return items


def _logit_bias(value: Any, path: str) -> tuple[tuple[int, float], ...]:
    """OpenAI's object from token id (a decimal string) to bias. Biases beyond +-100 are refused, not clamped."""
    result: dict[int, float] = {}
    for key, item in _object(value, path).items():
        if not re.fullmatch(r"-?[0-9]{1,18}", key):
            raise bad(path, f"{path}: the key {show(key)} is not a token id.", "invalid_value")
        if int(key) in result:
            raise bad(path, f"{path} names token {int(key)} twice.", "invalid_value")
        bias = _number(item, path)
        if not -100.0 <= bias <= 100.0:
            raise bad(path, f"{path}[{key}] is {show(item)}; a bias must be between -100 and 100.", "invalid_value")
        result[int(key)] = bias
    return tuple(result.items())


def _early_stopping(value: Any, path: str) -> bool | str:
    if type(value) is bool or value == "never":
        return value
    raise wrong(path, value, 'true, false or "never"')


REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def _request_id(value: Any, path: str) -> str:
    if not REQUEST_ID.fullmatch(_string(value, path)):
        raise bad(path, f"{path} must be 1 to 128 characters from A-Z a-z 0-9 . _ -", "invalid_value")
    return value


def _salt(value: Any, path: str) -> str:
    if not 1 <= len(_string(value, path)) <= 512:
        raise bad(path, f"{path} must have 1 to 512 characters, not {len(value)}.", "invalid_value")
    return value


def _stream_options(value: Any, path: str) -> dict[str, bool]:
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    result: dict[str, bool] = {}
    for key, item in _object(value, path).items():
        if key not in known:
            raise bad(f"{path}.{key[:100]}", f"Unknown field {path}.{key[:100]}; known are {', '.join(known[:2])}.", "unknown_field")
        if item is not None:
            result[key] = _boolean(item, f"{path}.{key}")
    if result.pop("include_obfuscation", False):
        raise bad(f"{path}.include_obfuscation", "stream_options.include_obfuscation is not supported; leave it out or send false.", "unsupported_field")
    return result


def _metadata(value: Any, path: str) -> Any:
    return value  # no effect on generation, so nothing to check; the body's size and depth are bounded


_INTEGER_SCHEMA = {"type": "integer"}
_STRINGS_SCHEMA = {"type": "array", "items": {"type": "string"}}
_IDS_SCHEMA = {"type": "array", "items": _INTEGER_SCHEMA}

boolean = Kind(_boolean, {"type": "boolean"})
integer = Kind(_integer, _INTEGER_SCHEMA)
number = Kind(_number, {"type": "number"})
string = Kind(_string, {"type": "string"})
obj = Kind(_object, {"type": "object"})
object_or_text = Kind(_object_or_text, {"anyOf": [{"type": "object"}, {"type": "string"}]})
strings = Kind(_strings, _STRINGS_SCHEMA)
string_or_strings = Kind(_string_or_strings, {"anyOf": [{"type": "string"}, _STRINGS_SCHEMA]})
items = Kind(lambda value, path: _items(value, path, "an array"), {"type": "array", "items": {"type": "object"}})
ids = Kind(lambda value, path: tuple(token_ids(value, path)), _IDS_SCHEMA)
logit_bias = Kind(_logit_bias, {"type": "object", "additionalProperties": {"type": "number"}})
early_stopping = Kind(_early_stopping, {"anyOf": [{"type": "boolean"}, {"const": "never"}]})
request_id = Kind(_request_id, {"type": "string", "pattern": "^" + REQUEST_ID.pattern + "$"})
salt = Kind(_salt, {"type": "string", "minLength": 1, "maxLength": 512})
stream_options = Kind(_stream_options, {"type": "object"})
without_effect = Kind(_metadata, {"description": "no effect on what is generated"})
raw = Kind(lambda value, path: value, {})
prompt = Kind(raw.read, {"anyOf": [{"type": "string"}, _STRINGS_SCHEMA, _IDS_SCHEMA, {"type": "array", "items": _IDS_SCHEMA}]})
_TEXT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}}]}
_MESSAGE_SCHEMA = {"type": "object", "properties": {"role": {"type": "string"}, "content": _TEXT_SCHEMA}, "required": ["role"]}
messages = Kind(raw.read, {"type": "array", "items": _MESSAGE_SCHEMA, "minItems": 1})
