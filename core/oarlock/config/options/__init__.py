"""The one option table. It feeds the command line, `LLM(...)`, docs/flags.md and the tests.

Owns: `OPTIONS`, the index by spelling, and names that users bring along but that belong elsewhere.
Reads: `config.option`, the table files beside this one; `plugins`, when a name is none of core's.
Never: imports argparse or torch; relates two options (`config.resolve` does).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from oarlock.config.option import Option, Origin, flag
from oarlock.config.options import cache, features, model, parallel, server
from oarlock.config.options.plugins import plugin_options, with_extensions
from oarlock.plugins import installed

SERVE = "oarlock serve"  # the command that takes every option of the table

OPTIONS: tuple[Option, ...] = (*model.OPTIONS, *cache.OPTIONS, *parallel.OPTIONS, *features.OPTIONS, *server.OPTIONS)

BY_NAME: dict[str, Option] = {name: option for option in OPTIONS for name in option.names}

# Names of other servers and libraries that are no option here, and where what they mean is said instead.
ELSEWHERE: dict[str, str] = {
    "num-beams": "beam search belongs to the request: SamplingParams(use_beam_search=True, best_of=WIDTH)",
    "max-length": "the length of an answer belongs to the request (max_tokens); the context length is {max-model-len}",
    "min-length": "the least length of an answer belongs to the request: min_tokens",
    "max-new-tokens": "the length of an answer belongs to the request: max_tokens",
    "max-tokens": "the length of an answer belongs to the request: max_tokens in the request or in SamplingParams",
    "max-input-length": "prompt and answer share one limit, {max-model-len}; a request's answer is limited by max_tokens",
    "max-output-length": "the length of an answer belongs to the request: max_tokens; prompt and answer together are limited by {max-model-len}",
    "context-length": "the context length is {max-model-len}",
    "ctx-size": "the context length is {max-model-len}",
    "tool-parser-plugin": "parsers come from installed packages (docs/plugins.md); name one with {tool-call-parser}",
    "reasoning-parser-plugin": "parsers come from installed packages (docs/plugins.md); name one with {reasoning-parser}",
    "request-rate": "the rate of requests belongs to the benchmark: oarlock bench serve --request-rate",
    **dict.fromkeys(
        ("runner", "task", "convert"),
        "nothing is to be chosen: a server gives vectors and scores beside answers, as far as its model has them (docs/pooling.md); leave it out",
    ),
    "temperature": "sampling belongs to the request: temperature in the request or in SamplingParams",
}


def find_option(name: str) -> Option | None:
    """The row of a name: core's, else a plugin's."""
    name = name.replace("_", "-")
    return BY_NAME.get(name) or plugin_options(BY_NAME).get(name)


def spelling(name: str, origin: Origin) -> str:
    """`--max-model-len` on a command line, `max_model_len` as a keyword."""
    return flag(name) if origin == "cli" else name.replace("-", "_")


def _nearest(bare: str, known: list[str]) -> list[str]:
    """A slip of the keyboard; else those that have one word more, as `max-model-len` has more than `max-len`; else what looks alike."""
    words = bare.split("-")
    longer = [name for name in known if 1 < len(words) == name.count("-") and set(words) < set(name.split("-"))]
    close = difflib.get_close_matches(bare, known, n=1, cutoff=0.9 if longer else 0.8)
    return close or longer[:3] or difflib.get_close_matches(bare, known, n=3, cutoff=0.6)


def unknown(name: str, origin: Origin, own: Sequence[str] = (), prog: str = SERVE) -> str:
    """The message for a name that is no option: where it belongs, else what is spelt nearly like it.

    `own`: every flag of the command `prog`, whose help the message names; (): the option table's.
    """
    bare = name.lstrip("-").replace("_", "-")
    if bare in BY_NAME:
        return f"{spelling(bare, origin)} is an option of {SERVE}, not of {prog}"
    if bare in ELSEWHERE and "temperature" not in own:  # a command that takes it takes the request's other fields, too
        text = re.sub(r"\{(.+?)\}", lambda found: spelling(found[1], origin), ELSEWHERE[bare])
        return f"{spelling(bare, origin)}: {text}"
    every = {**BY_NAME, **plugin_options(BY_NAME)}
    known = list(own) or [name for name, option in every.items() if option.offline or origin == "cli"]
    known += [f"no-{o.name}" for o in OPTIONS if o.kind == "bool" and origin == "cli" and not own]
    near = _nearest(bare, known)
    hint = f"; did you mean {' or '.join(spelling(n, origin) for n in near)}?" if near else ""
    where = "" if near else f"; {prog} --help lists them all" if origin == "cli" else "; docs/flags.md lists them all"
    return f"unknown option {spelling(bare, origin)}{hint}{where}{installed().broken_text()}"


__all__ = ["BY_NAME", "ELSEWHERE", "OPTIONS", "Option", "find_option", "plugin_options", "spelling", "unknown", "with_extensions"]
