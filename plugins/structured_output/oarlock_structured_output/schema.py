"""What is changed in a JSON schema before it is compiled.

Owns: `closed`.
Reads: nothing of ours.
Never: judges a schema.
"""

from __future__ import annotations

from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # data, not schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names -> schemas


def closed(schema: Any) -> Any:
    """The schema with objects that hold no property beyond those listed, where it does not say otherwise. Depth is bounded before."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _VALUES:
            made[key] = value
        elif key in _MAPS and isinstance(value, dict):
            made[key] = {name: closed(item) for name, item in value.items()}
        else:
            made[key] = closed(value)
    lists = "properties" in schema or schema.get("type") == "object"
    if lists and not {"additionalProperties", "unevaluatedProperties", "patternProperties"} & schema.keys():
        made["additionalProperties"] = False
    return made
