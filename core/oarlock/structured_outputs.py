"""`StructuredOutputs`: what shape an answer must have. One record for every way in which clients ask for it.

Owns: the fields, their bounds, and the reading of `response_format`, `structured_outputs` and the older `guided_*` fields.
Reads: `errors`.
Never: compiles a grammar (plugins of kind "structured_output" do) or knows a model.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from oarlock.errors import InvalidParameter, show

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHARS = 1 << 17  # of a schema, pattern, grammar or all choices together
MAX_DEPTH = 64  # of a schema's arrays and objects, of a pattern's or a grammar's brackets
OLDER = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar", "guided_json_object": "json_object"}
OLDER |= {"structural_tag": "structural_tag", "guided_whitespace_pattern": "whitespace_pattern", "guided_decoding_backend": "backend"}
BACKENDS = {"guidance": "llguidance", "lmfe": "lm-format-enforcer"}  # other names of one


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of json, regex, choice, grammar, json_object and structural_tag; frozen and within bounds once it exists.

    A schema or tag may be given as a dict or as JSON text (json also as a pydantic model class); text is what is kept.

    Raises:
        InvalidParameter: names the field, the limit and the remedy.
    """

    json: str | None = None  # JSON schema
    regex: str | None = None  # matches the whole answer
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # EBNF (`root ::= …`) or Lark (`start: …`)
    json_object: bool | None = None  # any JSON object
    structural_tag: str | None = None  # {"structures": [{"begin", "schema", "end"}], "triggers": […]}, or {"format": …}
    whitespace_pattern: str | None = None  # between the parts of JSON
    disable_any_whitespace: bool = False  # JSON without any
    disable_additional_properties: bool = False  # objects hold no property that the schema does not list
    backend: str | None = None  # which engine; None: the server's
    param: str = "structured_outputs"  # the request's field that errors name

    def __post_init__(self) -> None:
        given = [name for name in KINDS if self._is_set(name)]
        if len(given) != 1:
            what = f"{' and '.join(given)} are set together" if given else "none of its constraints is set"
            raise InvalidParameter(f"{self.param}: {what}; set exactly one of {', '.join(KINDS)}.", param=self.param)
        for name in ("disable_any_whitespace", "disable_additional_properties", "json_object"):
            if type(getattr(self, name)) is not bool and getattr(self, name) is not None:
                raise self._wrong(name, "true or false")
        if self.whitespace_pattern == "":
            object.__setattr__(self, "whitespace_pattern", None)
            object.__setattr__(self, "disable_any_whitespace", True)
        for name in ("regex", "grammar", "whitespace_pattern", "backend"):
            if getattr(self, name) is not None:
                self._check_text(name, getattr(self, name))
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._json_text(name, getattr(self, name)))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices(self.choice))
        if self.backend is not None:
            object.__setattr__(self, "backend", BACKENDS.get(self.backend, self.backend))
        if self.whitespace_pattern is not None and self.kind not in ("json", "json_object"):
            raise InvalidParameter(f"{self.param}: whitespace_pattern has a meaning in JSON only, and this is {self.kind}; leave it out.", param=self.param)

    @property
    def kind(self) -> Kind:
        """Which constraint it is."""
        return next(name for name in KINDS if self._is_set(name))

    def _is_set(self, name: Kind) -> bool:
        """The schema false is one, which nothing matches; json_object false asks for nothing."""
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)

    @property
    def text(self) -> str:
        """The constraint as text: schema, pattern, grammar or tag; choices as a JSON list; a schema for json_object."""
        kind = self.kind
        if kind == "choice":
            return jsonlib.dumps(self.choice)
        return '{"type":"object"}' if kind == "json_object" else cast("str", getattr(self, kind))

    def _wrong(self, name: str, wanted: str) -> InvalidParameter:
        return InvalidParameter(f"{self.param}: {name} must be {wanted}, not {show(getattr(self, name))}.", param=self.param)

    def _check_text(self, name: str, text: Any) -> None:
        if not isinstance(text, str) or not text:
            raise self._wrong(name, "a string that is not empty")
        if len(text) > MAX_CHARS:
            raise InvalidParameter(f"{self.param}: {name} has {len(text)} characters, but the limit is {MAX_CHARS}; shorten it.", param=self.param)
        if _bracket_depth(text) > MAX_DEPTH:
            raise self._too_deep(name)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidParameter(f"{self.param}: {name} has a lone surrogate, which is no text; leave it out.", param=self.param) from None

    def _too_deep(self, name: str) -> InvalidParameter:
        return InvalidParameter(f"{self.param}: {name} is nested more than {MAX_DEPTH} levels deep, which is the limit; flatten it.", param=self.param)

    def _json_text(self, name: str, value: Any) -> str:
        """Checked JSON text of a schema or tag; an object, or true and false for a schema."""
        if isinstance(value, type) and hasattr(value, "model_json_schema"):  # a pydantic model
            value = value.model_json_schema()
        try:
            if isinstance(value, str):
                if len(value) > MAX_CHARS:
                    self._check_text(name, value)
                value = jsonlib.loads(value)
            if _value_depth(value) > MAX_DEPTH:
                raise self._too_deep(name)
            if not isinstance(value, dict) and not (name == "json" and isinstance(value, bool)):
                raise InvalidParameter(f"{self.param}: {name} must be an object, not {show(value)}.", param=self.param)
            text = jsonlib.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        except RecursionError:
            raise self._too_deep(name) from None
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidParameter):
                raise
            raise InvalidParameter(f"{self.param}: {name} is not valid JSON: {error}.", param=self.param) from None
        if len(text) > MAX_CHARS:
            raise InvalidParameter(f"{self.param}: {name} has {len(text)} characters, but the limit is {MAX_CHARS}; shorten it.", param=self.param)
        return text

    def _choices(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise self._wrong("choice", "a list of strings")
        choices = tuple(value)
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise InvalidParameter(f"{self.param}: choice must list at least one string, and no empty one.", param=self.param)
        choices = tuple(dict.fromkeys(choices))
        if (size := sum(map(len, choices))) > MAX_CHARS:
            raise InvalidParameter(f"{self.param}: choice has {size} characters, but the limit is {MAX_CHARS}; shorten it.", param=self.param)
        return choices


def _bracket_depth(text: str) -> int:
    """Deepest nesting of unescaped brackets."""
    deepest = depth = 0
    skip = False
    for char in text:
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _value_depth(value: Any) -> int:
    """Levels of arrays and objects, up to one more than the limit. Level by level, so no recursion."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH:
        level = [child for item in level if isinstance(item, dict | list | tuple) for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return depth + isinstance(value, dict | list | tuple)
        depth += 1
    return depth


def read(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """The one constraint that a request's fields ask for: response_format, structured_outputs, guided_decoding and OLDER. None: none does.

    Raises:
        InvalidParameter: a value is wrong, or two fields ask for different things.
    """
    older = {name: value for name in OLDER if (value := fields.get(name)) is not None and (name, value) != ("guided_json_object", False)}
    found = [(name, _record(fields[name], name)) for name in ("structured_outputs", "guided_decoding") if fields.get(name) is not None]
    found += [("response_format", one)] if (one := _response_format(fields.get("response_format"))) else []
    settings = {OLDER[name]: older.pop(name) for name in ("guided_whitespace_pattern", "guided_decoding_backend") if name in older}
    found += [(name, StructuredOutputs(**{OLDER[name]: value}, param=name)) for name, value in older.items()]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidParameter(f"{names} both constrain the answer; send one of them.", param=found[1][0])
    if not found:
        if settings:
            name = "guided_decoding_backend" if "backend" in settings else "guided_whitespace_pattern"
            raise InvalidParameter(f"{name} is set, but nothing constrains the answer; leave it out, or add response_format.", param=name)
        return None
    return replace(found[0][1], **settings) if settings else found[0][1]


def _record(value: Any, name: str) -> StructuredOutputs:
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"{name} must be an object, not {show(value)}.", param=name)
    for key in value:
        if key == "param" or key not in StructuredOutputs.__slots__:
            known = ", ".join(field for field in StructuredOutputs.__slots__ if field != "param")
            raise InvalidParameter(f"{name} has the unknown key {key!r:.80}; the keys are {known}.", param=f"{name}.{key!s:.80}")
    return StructuredOutputs(**{key: item for key, item in value.items() if item is not None}, param=name)


def _response_format(value: Any) -> StructuredOutputs | None:
    """OpenAI's field: text, json_object, json_schema, and structural_tag."""
    if value is None:
        return None
    name = "response_format"
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"{name} must be an object, not {show(value)}.", param=name)
    keys = {"text": (), "json_object": (), "json_schema": ("json_schema",), "structural_tag": ("structures", "triggers", "format")}
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in keys:
        raise InvalidParameter(f"{name}.type must be one of {', '.join(keys)}, not {show(kind)}.", param=f"{name}.type")
    for key, item in value.items():
        if key != "type" and key not in keys[kind] and item is not None:
            raise InvalidParameter(f"{name} has the key {key!r:.80}, which type {kind} does not take; leave it out.", param=f"{name}.{key!s:.80}")
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"), f"{name}.json_schema")
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=cast("Any", {k: v for k, v in value.items() if v is not None}), param=name)
    return StructuredOutputs(json_object=True, param=name) if kind == "json_object" else None


def _json_schema(wrapper: Any, name: str) -> StructuredOutputs:
    if not isinstance(wrapper, Mapping):
        raise InvalidParameter(f"{name} must be an object with a schema, not {show(wrapper)}.", param=name)
    for key in wrapper:
        if key not in ("name", "description", "schema", "strict"):
            raise InvalidParameter(f"{name} has the unknown key {key!r:.80}; the keys are name, description, schema and strict.", param=name)
    if wrapper.get("schema") is None:
        raise InvalidParameter(f"{name}.schema is missing; give the JSON schema that the answer must have.", param=f"{name}.schema")
    return StructuredOutputs(json=wrapper["schema"], param=f"{name}.schema")
