"""`oarlock complete TEXT`: continue a text in the terminal, with a running server or a model loaded here.

Owns: nothing that lives on.
Reads: `cli.answers`.
Never: applies a chat template.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from oarlock.cli.answers import forgive_output, make_answer_parser, open_source, parse_answer_flags, read_input
from oarlock.errors import ConfigError

MAX_TOKENS = 128  # a text has no natural end; servers give 16 when nothing is said


def main(argv: Sequence[str]) -> int:
    """Print the continuation as it comes. Exit code 0, or 130 when it was interrupted.

    Raises:
        ConfigError: there is no text. OarlockError: there is no answer.
    """
    parser = make_answer_parser("oarlock complete", "[TEXT] [--url URL | --model MODEL] [options]", positional=False)
    parser.add_argument("text", nargs="*", metavar="TEXT", help="the text to continue; -: read it from standard input, as without TEXT in a pipe")
    parser.add_argument("--echo", action="store_true", default=False, help="print TEXT before its continuation")
    values, fields = parse_answer_flags(parser, argv)
    text, echo = _text(values.pop("text", [])), values.pop("echo")
    fields.setdefault("max_tokens", MAX_TOKENS)
    forgive_output()
    with open_source(values, loads_model="model" in values and "url" not in values) as source:
        try:
            with closing(source.complete(text, fields)) as answer:
                if echo:
                    print(text, end="", flush=True)
                for piece in answer:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print()
            return 130
        print()
    return 0


def _text(words: list[str]) -> str:
    if len(words) > 1:
        raise ConfigError(f"the text came as {len(words)} arguments; put it in quotes", "text")
    if not words and sys.stdin.isatty():
        raise ConfigError('no text to continue: oarlock complete "The capital of France is", or pipe it in')
    text = words[0] if words and words[0] != "-" else read_input()
    if not text:
        raise ConfigError("the text to continue is empty", "text")
    return text
