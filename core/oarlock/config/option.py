"""`Option`: one row of the option table, and how a raw value becomes a checked one.

Owns: the record, the value kinds and their parsers, and the wording of errors about one option.
Reads: `errors`.
Never: relates two options (`config.resolve` does) or knows argparse (`config.parser` does).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from oarlock.errors import ConfigError

Kind = Literal["str", "int", "float", "bool", "length", "bytes", "gib", "object", "strings", "words", "repeat", "floats"]
Fate = Literal["live", "obsolete", "refused"]
Origin = Literal["cli", "llm"]

SHORT = ("q", "tp", "pp")  # names that take a single dash
UNSET = ("None", "")  # these spell "unset" where unset is possible
_LENGTH_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 2 ** (10 * _power), _letter + "i": 2 ** (10 * _power), _letter + "ib": 2 ** (10 * _power), _letter + "b": 10 ** (3 * _power)}
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its names, its value, where the value goes, and what became of it.

    `live` takes effect; `obsolete` keeps its meaning and warns once, naming `instead`; `refused` belongs to a feature
    that is not built: any value but the default is an error. `built` refuses single values of a live option likewise.
    """

    name: str  # with dashes, without the leading ones: "max-model-len"
    kind: Kind
    default: Any  # as `coerce` returns it; None: unset, the help says what holds then
    help: str
    target: str | None = None  # "cache.block_size"; None: refused, or nothing left to set
    group: str = ""  # heading in the help and in docs/flags.md
    aliases: tuple[str, ...] = ()  # other spellings
    choices: tuple[Any, ...] = ()
    built: tuple[Any, ...] | None = None  # None: every choice
    feature: str = ""  # what is not built, for the error
    remedy: str = "leave it out"
    fate: Fate = "live"
    instead: str = ""  # an obsolete option's successor, by name; or a sentence, where there is none
    low: float | None = None  # inclusive, unless low_open
    high: float | None = None  # inclusive
    low_open: bool = False
    store: Callable[[Any], Any] | None = None  # from the option's value to the field's
    blank_is_unset: bool = True  # False: "" and "None" are errors, as where an empty variable must not mean that nothing was asked for
    offline: bool = True  # False: the server's alone, no keyword of LLM(...)
    extended_by: str = ""  # kind of extension whose names are choices, too

    @property
    def dest(self) -> str:
        """The keyword of `LLM(...)`, and the key in `resolve(values)`."""
        return self.name.replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def flag(name: str) -> str:
    """How a name is spelt on a command line."""
    return f"-{name}" if name in SHORT else f"--{name}"


def spell(option: Option, value: Any, origin: Origin) -> str:
    """An option and its value as the user would have typed them, for messages."""
    shown = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    if origin == "llm":
        return f"{option.dest}={value!r}"
    if option.kind == "bool":
        return flag(option.name) if value in (True, "True", "true") else f"--no-{option.name}"
    return f"{flag(option.name)} {shown}"


def coerce(option: Option, raw: Any, origin: Origin) -> Any:
    """The checked value of one option, from a command-line string or a Python value.

    Raises:
        ConfigError: wrong type, choice or range, or a value whose feature is not built; one line with the remedy.
    """
    nullable = option.default is None or option.default == ()
    if isinstance(raw, list) and len(raw) == 1 and raw[0] in UNSET:
        raw = raw[0]
    if isinstance(raw, str) and raw in UNSET and not option.blank_is_unset:
        raise ConfigError(f"{(flag(option.name) if origin == 'cli' else option.dest)} is empty; give a value, or leave it out", option.name)
    if raw is None or (nullable and isinstance(raw, str) and raw in UNSET):
        if nullable:
            return option.default
        raise ConfigError(f"{spell(option, raw, origin)}: a value is needed; the default is {option.default}", option.name)
    try:
        value = _PARSERS[option.kind](raw)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{spell(option, raw, origin)}: {error}", option.name) from None
    except OverflowError:
        raise ConfigError(f"{spell(option, raw, origin)}: must fit in 64 bits", option.name) from None
    if option.choices and value not in option.choices:
        raise ConfigError(f"{spell(option, raw, origin)}: choose from {', '.join(map(str, option.choices))}", option.name)
    _check_range(option, value, raw, origin)
    built = (option.default,) if option.fate == "refused" else option.built
    if built is not None and value != option.default and value not in built:
        why = f"this version of Oarlock has no {option.feature}"
        raise ConfigError(f"{spell(option, raw, origin)}: {why}; {option.remedy}", option.name)
    return value


def _check_range(option: Option, value: Any, raw: Any, origin: Origin) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if option.kind == "length" and value == -1:
        return
    below = option.low is not None and (value < option.low or (option.low_open and value == option.low))
    if not below and (option.high is None or value <= option.high):
        return
    least = f"{'above' if option.low_open else 'at least'} {option.low}" if option.low is not None else ""
    most = f"at most {option.high}" if option.high is not None else ""
    raise ConfigError(f"{spell(option, raw, origin)}: must be {' and '.join(filter(None, (least, most)))}", option.name)


def _text(raw: Any) -> str:
    if isinstance(raw, str):
        return raw
    if hasattr(raw, "__fspath__"):
        return str(raw)
    raise TypeError(f"must be a string, not {type(raw).__name__}")


def _integer(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise TypeError(f"must be a whole number, not {type(raw).__name__}")
    try:
        value = int(raw)
    except ValueError:
        raise ValueError("must be a whole number") from None
    return _in_64_bits(value)


def _in_64_bits(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise OverflowError
    return value


def _number(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError(f"must be a number, not {type(raw).__name__}")
    try:
        value = float(raw)
    except ValueError:
        raise ValueError("must be a number") from None
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(raw, str) and raw.lower() in known:
        return known[raw.lower()]
    raise TypeError(f"must be true or false, not {raw!r}")


def _length(raw: Any) -> int:
    """Tokens: 4096, 4k (4000), 4K (4096), 1M; auto and -1 are -1."""
    if raw in ("auto", "-1", -1):
        return -1
    if not isinstance(raw, str):
        return _integer(raw)
    match = _NUMBER.fullmatch(raw.strip())
    if match is None or match[2] not in _LENGTH_UNITS:
        raise ValueError("must be a number of tokens such as 4096, 4k (4000), 4K (4096), or auto")
    value = float(match[1]) * _LENGTH_UNITS[match[2]]
    if value != int(value):
        raise ValueError("must be a whole number of tokens")
    return _in_64_bits(int(value))


def _bytes(raw: Any) -> int:
    """Bytes: 1073741824, 512MiB, 4GiB, 4G (a GiB), 4GB (10^9)."""
    if not isinstance(raw, str):
        return _integer(raw)
    match = _NUMBER.fullmatch(raw.strip())
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ValueError("must be a size such as 512MiB, 4GiB or a number of bytes")
    return _in_64_bits(int(float(match[1]) * _BYTE_UNITS[match[2].lower()]))


def _gib(raw: Any) -> float:
    """GiB: 4, 0.5; a size with a unit (512MiB) is converted."""
    if isinstance(raw, str) and raw.strip() and raw.strip()[-1].isalpha():
        return _bytes(raw) / 2**30
    return _number(raw)


def _object(raw: Any) -> dict[str, Any]:
    value = _json(raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict):
        raise TypeError('must be a JSON object such as {"key": 1}')
    return value


def _json(raw: str) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None


def _strings(raw: Any) -> tuple[str, ...]:
    value = _json(raw) if isinstance(raw, str) else raw
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise TypeError('must be a JSON list of strings such as ["*"]')
    return tuple(value)


def _words(raw: Any) -> tuple[str, ...]:
    value = (raw,) if isinstance(raw, str) else tuple(raw)
    if not all(isinstance(v, str) and v for v in value):
        raise TypeError("must be strings, none of them empty")
    return value


def _floats(raw: Any) -> tuple[float, ...]:
    """Numbers: 1.0,2.0 or a JSON list."""
    if isinstance(raw, str):
        raw = _json(raw) if raw.lstrip().startswith("[") else raw.strip("()").split(",")
    if not isinstance(raw, (list, tuple)):
        raise TypeError("must be numbers separated by commas")
    return tuple(_number(v) for v in raw)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _integer,
    "float": _number,
    "bool": _boolean,
    "length": _length,
    "bytes": _bytes,
    "gib": _gib,
    "object": _object,
    "strings": _strings,
    "words": _words,
    "repeat": _words,
    "floats": _floats,
}
