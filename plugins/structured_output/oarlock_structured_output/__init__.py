"""The entry point: which backends this package has, and the options that bound what a grammar may cost. Light: standard library only.

Owns: the records of the backends and options.
Reads: `oarlock.backend_api`.
Never: imports a grammar library.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import Extension, OptionSpec, Problem, hookimpl

NAMESPACE = "grammar"
BOUNDS = {"time": (0.01, 600.0), "memory-mib": (16, 1 << 20), "processes": (1, 1024)}
BACKENDS = {"llguidance": 30, "outlines": 20, "lm-format-enforcer": 10}  # name -> priority


@hookimpl
def extensions() -> list[Extension]:
    """One record for each backend; one whose library is missing says so when it is made."""
    return [
        Extension("structured_output", name, f"oarlock_structured_output.client:make_{name.replace('-', '_')}", priority)
        for name, priority in BACKENDS.items()
    ]


@hookimpl
def options() -> list[OptionSpec]:
    """What one grammar may cost."""
    return [
        OptionSpec(NAMESPACE, "time", "float", 5.0, "Seconds in which a grammar must be compiled, and each of its masks computed; then its process is killed."),
        OptionSpec(NAMESPACE, "memory-mib", "int", 512, "MiB that a grammar's process may take beside the vocabulary."),
        OptionSpec(NAMESPACE, "processes", "int", 32, "Most grammars that are kept compiled at one time, each in a process; more of them wait."),
    ]


@hookimpl
def check_model(model: Any, config: Any, device: Any) -> list[Problem]:
    """Whether what a grammar may cost is a sensible number."""
    found = []
    for name, (low, high) in BOUNDS.items():
        value = config.device.options.get(f"{NAMESPACE}_{name.replace('-', '_')}")
        if value is not None and not low <= value <= high:
            found.append(Problem("error", f"--{NAMESPACE}-{name} is {value}, and it must be {low:g} to {high:g}", "give such a number, or leave it out"))
    return found
