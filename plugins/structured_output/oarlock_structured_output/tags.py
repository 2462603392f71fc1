"""Structural tags: free text in which what follows a trigger has a shape, such as a call of a tool.

Owns: the forms of a tag that are read, and the Lark grammar that says the same.
Reads: `vocabulary`.
Never: guesses what an unknown form means.

Forms: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and of {"format": ...} the types triggered_tags and tag
with contents of type json_schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from oarlock_structured_output.vocabulary import Vocabulary

MAX_TAGS = 512


class TagError(ValueError):
    """The tag is not understood; the message says where."""


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TagError(f"{where} must be an object")
    return value


def _text(value: Any, where: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise TagError(f"{where} must be a string{'' if may_be_empty else ' that is not empty'}")
    return value


def _known(value: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in value:
        if key not in keys:
            raise TagError(f"{where} has the key {key!r:.60}, which is not one of {', '.join(keys)}")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
        raise TagError(f"{where} must be an array of 1 to {MAX_TAGS} entries")
    return value


def _newer(form: Mapping[str, Any]) -> tuple[list[tuple[str, Any, str]], list[str], bool, bool]:
    kind = form.get("type")
    if kind == "tag":
        tag = _tag(form, "format")
        return [tag], [tag[0]], True, True
    if kind != "triggered_tags":
        raise TagError(f"format.type is {kind!r:.60}; triggered_tags and tag are understood")
    _known(form, ("type", "triggers", "tags", "at_least_one", "stop_after_first"), "format")
    for name in ("at_least_one", "stop_after_first"):
        if type(form.get(name, False)) is not bool:
            raise TagError(f"format.{name} must be true or false")
    tags = [_tag(_mapping(tag, f"format.tags[{n}]"), f"format.tags[{n}]") for n, tag in enumerate(_list(form.get("tags"), "format.tags"))]
    triggers = [_text(t, "format.triggers") for t in _list(form.get("triggers"), "format.triggers")]
    return tags, triggers, form.get("at_least_one", False), form.get("stop_after_first", False)


def _tag(tag: Mapping[str, Any], where: str) -> tuple[str, Any, str]:
    _known(tag, ("type", "begin", "content", "end"), where)
    content = _mapping(tag.get("content"), f"{where}.content")
    _known(content, ("type", "json_schema"), f"{where}.content")
    if content.get("type") != "json_schema":
        raise TagError(f"{where}.content.type is {content.get('type')!r:.60}; json_schema is understood")
    return _text(tag.get("begin"), f"{where}.begin"), content.get("json_schema"), _text(tag.get("end"), f"{where}.end", may_be_empty=True)


def read(value: Any) -> tuple[list[tuple[str, Any, str]], list[str], bool, bool]:
    """(begin, schema, end) of each tag; the triggers; whether a tag must come; whether the text ends after it.

    Raises:
        TagError: says where the tag is not understood.
    """
    whole = _mapping(value, "structural_tag")
    if "format" in whole:
        _known(whole, ("type", "format"), "structural_tag")
        found = _newer(_mapping(whole["format"], "format"))
    else:
        _known(whole, ("type", "structures", "triggers"), "structural_tag")
        tags = []
        for n, entry in enumerate(_list(whole.get("structures"), "structures")):
            where = f"structures[{n}]"
            tag = _mapping(entry, where)
            _known(tag, ("begin", "schema", "end"), where)
            tags.append((_text(tag.get("begin"), f"{where}.begin"), tag.get("schema", {}), _text(tag.get("end", ""), f"{where}.end", may_be_empty=True)))
        found = tags, [_text(t, "triggers") for t in _list(whole.get("triggers"), "triggers")], False, False
    tags, triggers, *_ = found
    for begin, schema, _end in tags:
        if not isinstance(schema, dict | bool):
            raise TagError(f"the schema of the tag {begin!r:.60} must be an object")
        if sum(begin.startswith(trigger) for trigger in triggers) != 1:
            raise TagError(f"the tag {begin!r:.60} must begin with exactly one of the triggers")
    return found


def lark(value: Any, vocabulary: Vocabulary) -> str:
    """The grammar of a structural tag. Raises TagError."""
    tags, triggers, must, ends = read(value)
    lines = ["%llguidance {}"]
    names = []
    for n, trigger in enumerate(triggers):
        bodies = [
            f"{_literal(begin[len(trigger) :], vocabulary)} %json {json.dumps(schema)} {_literal(end, vocabulary)}"
            for begin, schema, end in tags
            if begin.startswith(trigger)
        ]
        if not bodies:
            continue
        names.append(f"tag_{n}")
        lines += [f"{at}: {body}" for at, body in ((f"body_{n}_{m}", body) for m, body in enumerate(bodies))]
        body = "(" + " | ".join(f"body_{n}_{m}" for m in range(len(bodies))) + ")"
        if trigger.encode() in vocabulary.by_name:
            head = _literal(trigger, vocabulary)
            lines.append(f"tag_{n}: {head if must and ends else f'TEXT {head}'} {body}")
        elif must and ends:
            lines.append(f"tag_{n}: {json.dumps(trigger, ensure_ascii=False)} {body}")
        else:
            lines += [f"head_{n}[lazy]: TEXT {json.dumps(trigger, ensure_ascii=False)}", f"tag_{n}: head_{n} {body}"]
    one = "(" + " | ".join(names) + ")"
    rest = "" if ends else f" {one}* tail"
    start = f"{one}{rest}" if must else (f"tail | {one}" if ends else f"{one}* tail")
    return "\n".join([lines[0], f"start: {start}", "tail: TEXT", "TEXT: /(.|\\n)*/", *lines[1:]])


def _literal(text: str, vocabulary: Vocabulary) -> str:
    """A text in Lark, its special tokens by their id."""
    if not text:
        return ""
    names = sorted((name.decode("utf-8", "replace") for name in vocabulary.by_name), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    known = {name.decode("utf-8", "replace"): i for name, i in vocabulary.by_name.items()}
    return " ".join(f"<[{known[part]}]>" if part in known else json.dumps(part, ensure_ascii=False) for part in parts if part)
