"""`oarlock COMMAND …`: find the command, import only its module, turn deliberate errors into one line.

Owns: the list of commands, exit codes (0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted).
Reads: `errors`; `extensions` for commands that are none of core's.
Never: imports a command before it is asked for; prints a traceback unless OARLOCK_TRACEBACK is set.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

import oarlock
from oarlock.errors import PIP, ConfigError, OarlockError, UnsupportedByBackend

# name -> ("module:function", one line). The function takes the arguments after the command and returns an exit code.
# A command whose module is not there yet is neither listed nor found.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("oarlock.cli.serve:main", "serve a model over the OpenAI API"),
    "chat": ("oarlock.cli.chat:main", "talk to a model in the terminal"),
    "complete": ("oarlock.cli.complete:main", "complete a text in the terminal"),
    "bench": ("oarlock.cli.bench:main", "measure a server, or a model offline"),
    "top": ("oarlock.cli.top:main", "watch a running server in the terminal"),
    "devices": ("oarlock.cli.devices:main", "list devices, and why each can or cannot be used"),
    "doctor": ("oarlock.cli.doctor:main", "examine the installation and one device closely"),
    "plan": ("oarlock.cli.plan:main", "print the memory plan of a model without loading it"),
    "compile": ("oarlock.cli.compile:main", "compile a model's programs ahead of time, where a device compiles"),
    "conformance": ("oarlock.cli.conformance:main", "test a device against the conformance kit"),
    "new-backend": ("oarlock.cli.new_backend:main", "write the skeleton of a backend"),
}

PLUGIN_COMMANDS = {"run-batch": "batches"}  # command -> the plugin of this repository that brings it


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"oarlock {oarlock.__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in available():
        module, _, function = COMMANDS[name][0].partition(":")
        return run(lambda: getattr(importlib.import_module(module), function)(rest), f"oarlock {name}")
    if name in _plugin_commands(with_own=True):
        return run(lambda: _run_plugin_command(name, rest), f"oarlock {name}")
    print(f"oarlock: {_unknown(name)}", file=sys.stderr)
    return 2


def run(command: Callable[[], int | None], prog: str) -> int:
    """Run a command; errors that were raised on purpose end as one line on stderr."""
    try:
        return command() or 0
    except OarlockError as error:
        if os.environ.get("OARLOCK_TRACEBACK"):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | UnsupportedByBackend) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `oarlock devices | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def available() -> list[str]:
    """Commands whose module exists. Looks for files; imports nothing but the package `oarlock.cli`."""
    return [name for name, (target, _) in COMMANDS.items() if importlib.util.find_spec(target.partition(":")[0]) is not None]


def _plugin_commands(*, with_own: bool = False) -> dict[str, str]:
    """Name -> one line. Core's own commands cannot be replaced. `with_own`: also those that core registers for its own tests."""
    from oarlock import extensions
    from oarlock.device_choice import OWN_DISTRIBUTION

    return {
        part.name: f"{part.help} ({plugin.distribution})"
        for plugin, part in extensions.parts("command")
        if part.name not in COMMANDS and (with_own or plugin.distribution != OWN_DISTRIBUTION)
    }


def _run_plugin_command(name: str, rest: Sequence[str]) -> int | None:
    from oarlock import extensions

    part = extensions.find("command", name)
    assert part is not None
    code: int | None = extensions.load(part)(rest)
    return code


def usage() -> str:
    lines = ["usage: oarlock COMMAND [arguments]", "", f"Oarlock {oarlock.__version__}: LLM inference on any device.", ""]
    lines += [f"  {name:<12} {COMMANDS[name][1]}" for name in available()]
    plugins = _plugin_commands()
    lines += ["", "of plugins:", *(f"  {name:<12} {text}" for name, text in plugins.items())] if plugins else []
    return "\n".join([*lines, "", "oarlock COMMAND --help says more; oarlock --version prints the version."])


def _unknown(name: str) -> str:
    from oarlock.plugins import installed

    what, known = "option" if name.startswith("-") else "command", [*available(), *_plugin_commands()]
    if name in PLUGIN_COMMANDS:
        return f"unknown command {name}; the plugin oarlock-{PLUGIN_COMMANDS[name]} brings it, and is not installed (from a checkout: {PIP} ./plugins/{PLUGIN_COMMANDS[name]})"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(known)}"
    return f"unknown {what} {name}; {hint}{installed().broken_text()}"


if __name__ == "__main__":
    sys.exit(main())
