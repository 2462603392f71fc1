"""The command line made from the option table. It records what was typed; values are checked by `config.resolve`.

Owns: the argparse parser, dash and underscore spellings, the message for an unknown flag.
Reads: `config.options`.
Never: checks a value; fills in a default.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from oarlock.config.option import Option, flag
from oarlock.config.options import BY_NAME, OPTIONS, plugin_options, unknown
from oarlock.errors import ConfigError

_METAVARS = {"int": "N", "float": "X", "length": "N", "bytes": "SIZE", "gib": "GIB", "object": "JSON", "strings": "JSON", "floats": "X,X"}
# Where the last word of a name says nothing about its value.
_VALUES = {"uds": "PATH", "middleware": "PACKAGE.NAME", "lora-modules": "NAME=PATH", "drain-grace": "SECONDS", "stall-time": "SECONDS"}


class _Typed(argparse.Action):
    """Stores the raw text of an option; the same option under two names with two values is an error."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        seen: dict[str, str] = namespace.__dict__.setdefault("_spelt", {})
        before = getattr(namespace, self.dest, None)
        if self.dest in seen and seen[self.dest] != option_string and before != values:
            parser.error(f"{seen[self.dest]} and {option_string} are the same option, and their values differ")
        seen[self.dest] = option_string or ""
        setattr(namespace, self.dest, values)


class _Boolean(argparse.Action):
    """--x and --no-x."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of ending the process, and says what an unknown flag may have meant."""

    def error(self, message: str) -> NoReturn:
        head, _, names = message.partition("required: ")
        raise ConfigError(f"{names} is missing; {self.prog} --help says what it takes" if names and head.startswith("the following") else message)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """All arguments, or ConfigError. Underscores in flags count as dashes."""
        found, extra = self.parse_known_args([_dashed(a) for a in args] if args is not None else None, namespace)
        self.refuse(extra)
        return found

    def refuse(self, extra: Sequence[str]) -> None:
        """Raises ConfigError for arguments that nothing took; the first flag among them is the one at fault."""
        wrong = next((a.partition("=")[0] for a in extra if a.startswith("-")), None)
        if wrong is not None:
            raise ConfigError(unknown(wrong, "cli", [name.lstrip("-") for name in self._option_string_actions], self.prog))
        if extra:
            raise ConfigError(f"unexpected argument {extra[0]!r}; {f'usage: {self.usage}' if self.usage else f'{self.prog} --help says what it takes'}")


def _dashed(argument: str) -> str:
    """`--max_model_len=4096` as `--max-model-len=4096`; values are left alone."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def make_parser(prog: str = "oarlock serve", *, offline: bool = False, positional: bool = True) -> Parser:
    """A parser of every option (`offline`: of those that `LLM(...)` takes too), plugins' included, with an optional MODEL in front."""
    parser = Parser(prog=prog, usage=f"{prog} [MODEL] [options]", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    if positional:
        parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="hub name, folder or .gguf file; the same as --model")
    groups: dict[str, Any] = {}
    for option in (*OPTIONS, *plugin_options(BY_NAME).values()):
        if option.offline or not offline:
            group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
            _add(group, option)
    return parser


def _add(group: Any, option: Option) -> None:
    names = [flag(name) for name in option.names]
    settings: dict[str, Any] = {"dest": option.dest, "help": _help(option).replace("%", "%%")}
    if option.kind == "bool":
        group.add_argument(*names, *(f"--no-{n}" for n in option.names), action=_Boolean, nargs=0, **settings)
        return
    settings["metavar"] = _VALUES.get(option.name) or _METAVARS.get(option.kind, option.name.rpartition("-")[2].upper())
    if option.choices and len(option.choices) <= 4:
        settings["metavar"] = "{" + ",".join(map(str, option.choices)) + "}"
    if option.kind == "repeat":
        group.add_argument(*names, action="append", **settings)
    elif option.kind == "words":
        group.add_argument(*names, nargs="+", action="extend", **settings)
    else:
        group.add_argument(*names, action=_Typed, **settings)


def _help(option: Option) -> str:
    text = option.help
    if len(option.choices) > 4:
        text += f" One of {', '.join(map(str, option.choices))}."
    if option.default not in (None, (), {}):
        text += f" [{_shown(option)}]"
    if option.fate == "obsolete":
        text += f" (obsolete; use {flag(option.instead)})" if option.instead in BY_NAME else f" (obsolete: {option.instead})"
    missing = [str(c) for c in option.choices if option.built is not None and c not in option.built and c != option.default]
    if option.fate == "refused" or (option.built is not None and len(missing) == len(option.choices) - (option.default in option.choices)):
        text += f" (not in this version{'' if option.fate == 'refused' or option.default is None else f': only {option.default}'})"
    elif missing:
        text += f" (not in this version: {', '.join(missing)})"
    return text


def _shown(option: Option) -> str:
    """A default as it would be typed."""
    value = option.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.kind == "bytes":
        return f"{value >> 20}MiB" if value % 2**20 == 0 else str(value)
    return json.dumps(list(value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def parse(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """What the user typed, by keyword; nothing else.

    Raises:
        ConfigError: unknown flag (with the nearest known ones), a flag without its value, or two different models.
    """
    namespace, extra = parser.parse_known_args([_dashed(argument) for argument in argv])
    parser.refuse(extra)
    values = {key: value for key, value in vars(namespace).items() if key != "_spelt"}
    positional = values.pop("model_positional", None)
    if positional is not None and values.setdefault("model", positional) != positional:
        raise ConfigError(f"two models were given, {positional} and --model {values['model']}; give one", "model")
    return values


def with_environment(values: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, Any]:
    """`values` and the API key of the environment, unless one was typed. Returns a new dict."""
    environ = dict(os.environ) if environ is None else environ
    key = environ.get("OARLOCK_API_KEY") or environ.get("VLLM_API_KEY")
    return values if not key or "api_key" in values else {**values, "api_key": [key]}


__all__ = ["BY_NAME", "Parser", "make_parser", "parse", "with_environment"]
