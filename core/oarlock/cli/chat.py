"""`oarlock chat`: a conversation in the terminal, with a running server or with a model loaded here.

Owns: the conversation's history and the commands that begin with a slash.
Reads: `cli.answers`.
Never: writes the conversation to a file; ends on an interrupt while an answer streams (the answer ends).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from oarlock.cli.answers import Source, forgive_output, make_answer_parser, open_source, parse_answer_flags, read_input
from oarlock.errors import ConfigError, EngineDead, OarlockError

PROMPT = "> "
MORE = ". "
HELP = """\
/clear          forget the conversation, keep the system message
/system TEXT    set the system message; without TEXT, remove it
/undo           forget the last question and its answer
/exit           end (so does Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""


def main(argv: Sequence[str]) -> int:
    """Talk until the input ends. What is piped in is one message. Exit code 0, or 130 when a piped message was interrupted."""
    parser = make_answer_parser("oarlock chat", "[--url URL | MODEL] [options]", positional=True)
    parser.description = "Talk to a model until Ctrl-D. Standard input that is no terminal is one message."
    parser.add_argument("--system", metavar="TEXT", help="system message")
    values, fields = parse_answer_flags(parser, argv)
    system = values.pop("system", None)
    forgive_output()
    message = None if sys.stdin.isatty() else read_input()
    if message is not None and not message.strip():
        raise ConfigError("the message on standard input is empty")
    with open_source(values, loads_model="model" in values and "url" not in values) as source:
        conversation = Conversation(source, fields, system)
        if message is None:
            return _talk(conversation)
        return 0 if conversation.ask(message) else 130


class Conversation:
    """What was said so far, and the way to the next answer."""

    def __init__(self, source: Source, fields: dict[str, Any], system: str | None) -> None:
        self.source, self.fields, self.system = source, fields, system
        self.turns: list[dict[str, str]] = []

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def ask(self, text: str) -> bool:
        """Print the answer as it comes. False when it was interrupted; what had come by then is kept.

        Raises:
            OarlockError: there is no answer; the question is forgotten.
        """
        self.turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        is_whole = True
        try:
            with closing(self.source.chat(self.messages(), self.fields)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            is_whole = False
        except BaseException:
            self.turns.pop()
            if pieces:
                print()
            raise
        print()
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        return is_whole

    def undo(self) -> None:
        del self.turns[-2:]


def _talk(conversation: Conversation) -> int:
    try:
        import readline  # noqa: F401  line editing and recall, where Python has it
    except ImportError:
        pass
    print(f"{conversation.source.name}. /help lists the commands, Ctrl-D ends.", file=sys.stderr)
    while (text := _read()) is not None:
        if not text.strip():
            continue
        if text.startswith("/"):
            if not _command(conversation, text):
                return 0
            continue
        try:
            if not conversation.ask(text):
                print("(stopped)", file=sys.stderr)
        except EngineDead:
            raise
        except OarlockError as error:
            print(f"error: {error}", file=sys.stderr)
    return 0


def _read() -> str | None:
    """The next message, of one line or more; None at the end of the input."""
    lines: list[str] = []
    shows_prompt = sys.stdout.isatty()  # an answer that goes to a file is free of prompts
    while True:
        prompt = MORE if lines else PROMPT
        if not shows_prompt:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            line = input(prompt if shows_prompt else "")
        except EOFError:
            print(file=sys.stderr)
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:  # as a shell does: forget the line
            print(file=sys.stderr)
            lines.clear()
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _command(conversation: Conversation, line: str) -> bool:
    """Obey a line that begins with a slash. False: end."""
    name, _, rest = line.partition(" ")
    match name:
        case "/exit" | "/quit":
            return False
        case "/clear":
            conversation.turns.clear()
        case "/undo":
            conversation.undo()
        case "/system":
            conversation.system = rest.strip() or None
        case "/help":
            print(HELP, file=sys.stderr)
        case _:
            print(f"no command {name}; /help lists them", file=sys.stderr)
    return True
