"""What reads tool calls and reasoning out of generated text: the interface of the extension kinds tool_parser and reasoning_parser.

Owns: the interface and its records.
Reads: nothing.
Never: knows a format.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. What follows a call's name as arguments belongs to that call, until the next call."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str  # call: the function's name; arguments: more of the JSON text of its arguments


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser is told about the request."""

    functions: Mapping[str, Mapping[str, Any]]  # the functions offered: name -> JSON schema of the parameters
    prompt_end: str = ""  # the last characters of the prompt, which may have begun the reasoning
    calls_are_read: bool = False  # a reasoning parser: whether a tool parser reads the content after it
    is_forced: bool = False  # the answer can be nothing but calls


class TextParser:
    """Reads one choice's text, as it comes. One object for each choice, made when its first text comes.

    The pieces, joined, must not depend on how the text was cut. Text that is no call, whether malformed or of another kind, is content.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()  # special tokens that it reads: they show in its text, others as the request says

    def __init__(self, context: ParserContext) -> None:
        self.context = context

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        raise NotImplementedError

    def finish(self, reason: str) -> list[Piece]:
        """What was held back, at the text's end. `reason`: "length" where a limit cut it, else "stop"."""
        raise NotImplementedError

    @classmethod
    def call_tags(cls, functions: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """How calls of these functions are written, so that their arguments can be held to the schemas: a structural tag,
        {"structures": [{"begin", "schema", "end"}], "triggers": [...]}; None where the format cannot be said so."""
        return None

    def make_call_id(self) -> str:
        """An id for a call, in the form that the model's chat template takes back."""
        return f"call_{uuid.uuid4().hex[:24]}"
