"""What is changed in a JSON schema before it is compiled.

Owns: `closed`.
Reads: nothing of ours.
Never: judges a schema.
"""

from __future__ import annotations

from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # data, not schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # names -> schemas
_PARTS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")  # say more of the same value, where they stand beside properties
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", *_PARTS}


def closed(schema: Any, *, is_part: bool = False) -> Any:
    """The schema with objects that hold no property beyond those that are listed for them. Depth is bounded before.

    An object stays open where the schema says what else may be in it, or lists nothing, or where the properties of one object are listed in several
    places. `is_part`: it is one of those places.
    """
    if isinstance(schema, list):
        return [closed(item, is_part=is_part) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _VALUES:
            made[key] = value
        elif key in _MAPS and isinstance(value, dict):
            made[key] = {name: closed(item) for name, item in value.items()}
        elif key == "dependentSchemas" and isinstance(value, dict):
            made[key] = {name: closed(item, is_part=True) for name, item in value.items()}
        elif key in ("anyOf", "oneOf"):
            made[key] = closed(value, is_part=is_part or "properties" in schema)
        else:
            made[key] = closed(value, is_part=key in _PARTS)
    if "properties" in schema and not is_part and not _OPEN & schema.keys():
        made["additionalProperties"] = False
    return made
