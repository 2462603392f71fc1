"""Writes down what `oarlock.backend_api` offers, so that a change to it is seen.

    python tests/contract/public_surface.py --write

Owns: the text form of the surface.
Reads: `oarlock.backend_api` and its runtime half.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).with_name("public_surface.txt")


def describe() -> str:
    """The whole surface as text: one block per public name."""
    import oarlock.backend_api as light
    from oarlock.backend_api import runtime
    from oarlock.backend_api.runtime import model

    out = [f"api {light.API_VERSION[0]}.{light.API_VERSION[1]}"]
    for module in (light, runtime, model):
        for name in sorted(module.__all__):
            out += ["", f"{module.__name__}.{name}", *_members(getattr(module, name))]
    return "\n".join(out) + "\n"


def _members(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [f"    {f.name}: {f.type}{_default(f)}" for f in dataclasses.fields(value)]
    if inspect.isclass(value):
        names = sorted(n for n in dir(value) if (not n.startswith("_") or n == "__init__") and _is_ours(value, n))
        return [f"    {n}{_signature(inspect.getattr_static(value, n))}" for n in names]
    if inspect.isfunction(value):
        return [f"    {_signature(value)}"]
    is_plain = isinstance(value, (str, tuple)) or type(value).__module__ in ("types", "typing", "collections.abc")
    return [f"    = {value if is_plain else type(value).__name__}"]


def _is_ours(cls: type, name: str) -> bool:
    return any(name in base.__dict__ and base.__module__.startswith("oarlock.") for base in cls.__mro__)


def _signature(member: Any) -> str:
    kinds = ((staticmethod, " static"), (classmethod, " class"))
    prefix = next((text for kind, text in kinds if isinstance(member, kind)), "")
    if isinstance(member, property):
        return f": {_plain(str(inspect.signature(member.fget).return_annotation))} (property)" + _abstract(member.fget)
    function = getattr(member, "__func__", member)
    if not callable(function):
        return f" = {member!r}"
    return prefix + _plain(str(inspect.signature(function))) + _abstract(function)


def _abstract(function: Any) -> str:
    return " abstract" if getattr(function, "__isabstractmethod__", False) else ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {getattr(field.default, '__name__', repr(field.default))}"
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def _plain(text: str) -> str:
    """Signatures without the quotes of postponed annotations and without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", text.replace("'", ""))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        COMMITTED.write_text(describe(), encoding="utf-8")
    else:
        print(describe(), end="")
