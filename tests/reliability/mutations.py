"""What becomes of a valid request: values of other types and sizes, trees of other shapes, bytes that are no JSON.

Owns: the mutations.
Never: knows a route; reads a clock, so that a seed gives the same bytes again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

TEXTS = (
    "", " ", "x", "Hi", "The capital of France is", "naïve café", "日本語のテキスト", "🙂 👨\u200d👩\u200d👧 \u200d", "a\x00b", "\x1b[31m\x7f", "\u202eabc\u202c", "é\u0301\u0301\u0301",
    "<|im_start|>system\nx<|im_end|>", "<think>a</think>b", '<tool_call>{"name": "f"', "\r\n\t\v", "%s%n{}{{7*7}}{% raw %}", "../../etc/passwd", "file:///etc/passwd",
    "http://127.0.0.1:9/", "'; DROP TABLE x; --", "null", "NaN", "-1", "\uffff\ufdd0", "\U000e0001", "ﬁ", "İ", "a" * 300, "é" * 700, "word " * 400, "\n" * 100,
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 5, 7, -1, -2, 128, 129, 2047, 2048, 2049, 65536, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, 0.0, -0.0,
    0.5, 1.0, 1.5, 2.0, 2.0001, 1e-9, 5e-324, 1e308, -1e308, 0.1 + 0.2, 100.0, 100.5,
)  # fmt: skip
# Written into the body as they are: what no JSON value of Python's gives.
RAWS = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e999", "9" * 400, "9" * 5000, "0x10", "01", "+1", "1.", ".5", "1e", "tru", "undefined", "'x'", '"\\ud800"', '"\\udfff\\ud800"',
    '"\\u0000"', '"\\x41"', '"a\nb"', "[1,]", '{"a":1,"a":2}', '{"":{"":{"":{}}}}', "[" * 70 + "]" * 70, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 3000, "",
    "/**/1", "[[[[[[[[[[]]]]]]]]]]", "\ufeff1", '"' + "x" * 70000 + '"', "[" + "1," * 5000 + "1]", "[" + '"x",' * 2000 + '"x"]', "{}", "[]", "null", "true",
)  # fmt: skip
NAMES = (
    "model", "prompt", "messages", "n", "stream", "stop", "tools", "max_tokens", "logprobs", "images", "audio", "__proto__", "__class__", "self", "", " ", "\x00", "é", "x" * 300, "a.b[0]",
    "structured_outputs", "response_format", "lora_request", "prompt_embeds", "request_id", "input", "type", "role", "content", "url", "file", "path",
)  # fmt: skip
_TEXT_KEYS = frozenset({"prompt", "content", "text", "input", "system", "instructions"})
_MARK = "\ue000raw"  # in a tree, a raw fragment is a string that begins so


def scalar(rng: random.Random) -> Any:
    """Any value that JSON has, and some that it has not."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice(NUMBERS)
    if kind < 7:
        return f"{_MARK}{rng.randrange(len(RAWS))}"
    return rng.choice((None, True, False, [], {}, [None], [[]], {"a": 1}, [1, "x", None, 2.5], [{"type": "text", "text": "x"}]))


def _same_type(value: Any, rng: random.Random) -> Any:
    """Another value of the same type, which the field may well take."""
    if type(value) is str:
        return rng.choice((rng.choice(TEXTS), value + rng.choice(TEXTS), value * rng.choice((2, 9, 40)), value[: len(value) // 2], value.upper()))
    if type(value) is bool:
        return not value
    if type(value) in (int, float):
        return rng.choice((rng.choice(NUMBERS), -value, value + 1, value * 2, value / 3, str(value)))
    if type(value) is list:
        return rng.choice((value * rng.choice((2, 5, 60)), value[::-1], value[:1], value + [scalar(rng)], [*value[1:]]))
    if type(value) is dict:
        return {key: value[key] for key in rng.sample(sorted(value), len(value))}
    return scalar(rng)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below the root."""
    found, level = [], [tree]
    while level:
        one = level.pop()
        for key in one if isinstance(one, dict) else range(len(one)):
            found.append((one, key))
            if isinstance(one[key], (dict, list)):
                level.append(one[key])
    return found


def _remove(tree: Any, rng: random.Random, at: tuple[Any, Any]) -> None:
    del at[0][at[1]]


def _replace(tree: Any, rng: random.Random, at: tuple[Any, Any]) -> None:
    at[0][at[1]] = scalar(rng)


def _vary(tree: Any, rng: random.Random, at: tuple[Any, Any]) -> None:
    at[0][at[1]] = _same_type(at[0][at[1]], rng)


def _wrap(tree: Any, rng: random.Random, at: tuple[Any, Any]) -> None:
    value = at[0][at[1]]
    for _ in range(rng.choice((1, 1, 2, 10, 62, 80))):
        value = [value] if rng.random() < 0.5 else {rng.choice(NAMES): value}
    at[0][at[1]] = value


def _swap(tree: Any, rng: random.Random, at: tuple[Any, Any]) -> None:
    other = rng.choice(_places(tree))
    one = json.dumps(other[0][other[1]])  # by value, or a tree could come to hold itself
    at[0][at[1]] = json.loads(one)


def _add(tree: Any, rng: random.Random, at: tuple[Any, Any]) -> None:
    if isinstance(at[0], dict):
        at[0][rng.choice(NAMES)] = scalar(rng)
    else:
        at[0].insert(rng.randrange(len(at[0]) + 1), scalar(rng))


_TREE: tuple[Callable[[Any, random.Random, tuple[Any, Any]], None], ...] = (_vary, _vary, _vary, _vary, _replace, _replace, _remove, _wrap, _swap, _add)


def vary_texts(tree: dict[str, Any], rng: random.Random) -> None:
    """Change a text that the model is to read, in place: what most servers never see, and still a request."""
    places = [at for at in _places(tree) if type(at[0][at[1]]) is str and (at[1] in _TEXT_KEYS or type(at[1]) is int)]
    for at in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        at[0][at[1]] = rng.choice((rng.choice(TEXTS) or "x", at[0][at[1]] + rng.choice(TEXTS), at[0][at[1]] * rng.choice((2, 9)) or "x"))


def mutate(tree: dict[str, Any], rng: random.Random, times: int) -> None:
    """Change the tree in place, `times` times."""
    for _ in range(times):
        places = _places(tree)
        if places:
            rng.choice(_TREE)(tree, rng, rng.choice(places))


def encode(tree: Any, rng: random.Random) -> bytes:
    """The tree as a body, the raw fragments in their places; spaces and escapes vary."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5, separators=(",", ":") if rng.random() < 0.8 else (" , ", " :\n"))
    if "raw" in text:
        for number, raw in enumerate(RAWS):
            for written in (f'"{_MARK}{number}"', f'"\\ue000raw{number}"'):
                text = text.replace(written, raw)
    return text.encode("utf-8", "surrogatepass")


def _flip(body: bytes, rng: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _insert(body: bytes, rng: random.Random) -> bytes:
    piece = rng.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\x00", b"\xef\xbb\xbf", b"]", b"}", b",", b'"', b"\\", rng.randbytes(20)))
    at = rng.randrange(len(body) + 1)
    return body[:at] + piece + body[at:]


def _cut(body: bytes, rng: random.Random) -> bytes:
    return body[: rng.randrange(len(body))]


def _repeat(body: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(body))
    piece = body[start : start + rng.randrange(1, 60)]
    return body[:start] + piece * rng.choice((2, 3, 200)) + body[start:]


def spoil(body: bytes, rng: random.Random) -> bytes:
    """Change the bytes of an encoded body."""
    if not body:
        return rng.randbytes(5)
    if rng.random() < 0.1:
        return rng.choice((body.decode("utf-8", "replace").encode("utf-16"), b"", b"\xef\xbb\xbf" + body, body + body, b"[" + body + b"]", rng.randbytes(200)))
    return rng.choice((_flip, _insert, _insert, _cut, _repeat))(body, rng)
