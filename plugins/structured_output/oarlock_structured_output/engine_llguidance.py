"""Grammars by llguidance: every kind of constraint.

Owns: how a specification becomes its grammar.
Reads: `tags`, `vocabulary`.
Never: encodes a text: only token ids and masks are exchanged.
"""

from __future__ import annotations

import json
from typing import Any

import llguidance

from oarlock_structured_output import tags
from oarlock_structured_output.vocabulary import Vocabulary

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_GRAMMAR = 500_000


class _Tokens:
    """The vocabulary as llguidance wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self._encode = vocabulary.tokens, vocabulary.encode
        self.special_token_ids = [i for i, text in enumerate(vocabulary.tokens) if not text or i in vocabulary.special or i in vocabulary.ends]
        self.eos_token_id = min(vocabulary.ends, default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.encode() if isinstance(text, str) else text)


class Engine:
    """One for a vocabulary; grammars are compiled in forks of its process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        ends = sorted(i for i in vocabulary.ends if i < len(vocabulary.tokens))
        self._tokenizer = llguidance.LLTokenizer(_Tokens(vocabulary), eos_token=ends or [0])  # type: ignore[arg-type]
        every = (1 << 8 * vocabulary.num_mask_bytes) - 1  # the library's masks may be a word longer
        self._shown = every & ~int.from_bytes(vocabulary.bits(ends or [0]), "little")

    def compile(self, wanted: dict[str, Any]) -> Matcher:
        """A matcher at the beginning of a text. Raises ValueError with the library's own words."""
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar(wanted), log_level=0)
        if matcher.is_error():
            raise ValueError(_short(matcher.get_error()))
        return Matcher(matcher, self._shown, self.vocabulary.num_mask_bytes)

    def _grammar(self, wanted: dict[str, Any]) -> str:
        make, text = llguidance.LLMatcher, wanted["text"]
        match wanted["kind"]:
            case "json" | "json_object":
                options: dict[str, Any] = {"whitespace_flexible": not wanted["disable_any_whitespace"]}
                if wanted["whitespace_pattern"] is not None:
                    options["whitespace_pattern"] = wanted["whitespace_pattern"]
                schema = {"true": "{}", "false": '{"enum": []}'}.get(text, text)  # options can be said of an object only
                return make.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
            case "regex":
                return make.grammar_from_regex(text)
            case "choice":
                return make.grammar_from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)))
            case "structural_tag":
                return make.grammar_from_lark(tags.lark(json.loads(text), self.vocabulary))
        return llguidance.grammar_from("grammar", text)


class Matcher:
    """One text as it grows."""

    def __init__(self, matcher: llguidance.LLMatcher, shown: int, num_bytes: int) -> None:
        self._matcher, self._shown, self._num_bytes = matcher, shown, num_bytes

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._shown, self._num_bytes)

    def consume(self, token_ids: list[int]) -> None:
        """Raises ValueError when a token is not allowed, or the grammar becomes too complex."""
        if not self._matcher.consume_tokens(token_ids):
            raise ValueError(_short(self._matcher.get_error()) or "a token is not allowed")

    def mask(self) -> tuple[bytes, bool]:
        """(what may follow, whether the text may end). Raises ValueError."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            if self._matcher.get_error().startswith("NoExtension"):
                return bytes(self._num_bytes), False
            raise ValueError(_short(self._matcher.get_error()))
        left = int.from_bytes(bits, "little") & self._shown
        return left.to_bytes(self._num_bytes, "little"), self._matcher.is_accepting()


def _short(text: str) -> str:
    """The library's message without its dump of state, in one line."""
    head = text.partition("<state>")[0]
    return " ".join(head.split())[:300]
