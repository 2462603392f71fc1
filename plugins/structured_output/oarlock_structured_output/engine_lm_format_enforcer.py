"""Grammars by lm-format-enforcer: parsers that walk a tree of all tokens, character by character.

Owns: how a specification becomes its parser, and the walk.
Reads: `vocabulary`.
Never: imports torch; ends a text because a parser failed, as the library's own loop does.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

_HIDES_TORCH = "torch" not in sys.modules  # WORKAROUND: the library imports it where it is there, and needs none of it
if _HIDES_TORCH:
    sys.modules["torch"] = None  # type: ignore[assignment]

from lmformatenforcer import (
    CharacterLevelParser,
    CharacterLevelParserConfig,
    JsonSchemaParser,
    RegexParser,
    StringParser,
    TokenEnforcer,
    UnionParser,
)
from lmformatenforcer.tokenenforcer import TokenEnforcerTokenizerData
from lmformatenforcer.tokenlist import TokenList

from oarlock_structured_output.vocabulary import Vocabulary

if _HIDES_TORCH:
    del sys.modules["torch"]
MAX_BLANKS = 12


class Engine:
    """One for a vocabulary; grammars are compiled in forks of its process. Tokens that are no whole characters are never allowed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.texts: dict[int, str] = {}
        for i, raw in vocabulary.text_tokens():
            try:
                self.texts[i] = raw.decode()
            except UnicodeDecodeError:
                continue
        self.data = self._tree(list(self.texts))
        # The library takes control characters for a part of JSON strings and lets a list end with a comma; JSON does neither.
        wrong = re.compile(r"[\x00-\x09\x0b-\x1f]|,\s*[}\]]")
        self.json_data = self._tree([i for i, text in self.texts.items() if not wrong.search(text)])

    def _tree(self, ids: list[int]) -> TokenEnforcerTokenizerData:
        ends, size = sorted(self.vocabulary.ends), len(self.vocabulary.tokens)
        return TokenEnforcerTokenizerData([(i, self.texts[i], True) for i in ids], lambda _: "", ends, False, size)

    def compile(self, wanted: dict[str, Any]) -> Matcher:
        """A matcher at the beginning of a text. Raises ValueError with the library's own words."""
        if wanted["whitespace_pattern"] is not None:
            raise ValueError("lm-format-enforcer has no whitespace_pattern; leave it out, or use llguidance")
        blanks = 0 if wanted["disable_any_whitespace"] else MAX_BLANKS
        data = self.json_data if wanted["kind"] in ("json", "json_object") else self.data
        config = CharacterLevelParserConfig(alphabet=data.tokenizer_alphabet, max_consecutive_whitespaces=blanks)
        return Matcher(self, data, _parser(wanted, config), config)


def _parser(wanted: dict[str, Any], config: CharacterLevelParserConfig) -> CharacterLevelParser:
    text = wanted["text"]
    match wanted["kind"]:
        case "regex":
            return RegexParser(text, config)
        case "choice":
            return UnionParser([StringParser(choice) for choice in json.loads(text)])
    schema = json.loads(text)
    _check_texts(schema)
    if schema is True or schema == {}:
        return JsonSchemaParser(None, config)
    if schema is False:
        raise ValueError("the schema false allows nothing")
    return JsonSchemaParser(schema, config)


def _check_texts(schema: Any) -> None:
    """The library writes the texts of enum and const as they are, which is wrong where JSON must escape them. Depth is bounded before."""
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict):
        for value in (*(schema.get("enum") or ()), schema.get("const")):
            if isinstance(value, str) and json.dumps(value, ensure_ascii=False) != f'"{value}"':
                raise ValueError(f"lm-format-enforcer cannot write the text {value!r:.60}, which JSON escapes; use llguidance")
    for value in values:
        _check_texts(value)


class Matcher:
    """One text as it grows."""

    def __init__(self, engine: Engine, data: TokenEnforcerTokenizerData, parser: CharacterLevelParser, config: CharacterLevelParserConfig) -> None:
        self._engine, self._data, self._parser, self._config = engine, data, parser, config
        self._walker = TokenEnforcer(data, parser)
        parser.config = config  # the walker sets one of its own

    def copy(self) -> Matcher:
        """Parsers do not change: characters make new ones."""
        return Matcher(self._engine, self._data, self._parser, self._config)

    def consume(self, token_ids: list[int]) -> None:
        """Raises ValueError when a token is not allowed."""
        for token in token_ids:
            for char in self._engine.texts[token]:
                if char not in self._parser.get_allowed_characters():
                    raise ValueError(f"the character {char!r} is not allowed")
                self._parser = self._parser.add_character(char)

    def mask(self) -> tuple[bytes, bool]:
        """(what may follow, whether the text may end)."""
        found = TokenList(False, len(self._engine.vocabulary.tokens))
        self._walker._collect_allowed_tokens(self._parser, self._data.tokenizer_tree.root, found, self._parser.shortcut_key())
        return self._engine.vocabulary.bits(found.allowed_tokens), self._parser.can_end()
