"""Two texts that are scored against each other.

Owns: how a classifier reads them as one prompt, which queries meet which documents, the score of two embeddings.
Reads: `frontend.chat`, `errors`.
Never: tokenises; runs a prompt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from oarlock.errors import InvalidParameter

if TYPE_CHECKING:
    from oarlock.frontend.chat import ChatTemplate

Text = TypeVar("Text")


def pair_text(query: str, document: str, template: ChatTemplate | None) -> str:
    """The prompt of a pair. A template gets messages of the roles query and document; without one the texts follow each other.

    Raises:
        InvalidParameter: the template refuses them.
    """
    if template is None:
        return query + document
    return template.render([{"role": "query", "content": query}, {"role": "document", "content": document}], add_generation_prompt=False)


def paired(queries: Sequence[Text], documents: Sequence[Text], names: tuple[str, str]) -> list[tuple[Text, Text]]:
    """One query with each document, or each with its own. Raises InvalidParameter naming the first of `names`."""
    if not queries or not documents:
        name = names[0] if not queries else names[1]
        raise InvalidParameter(f"{name} is empty; give at least one text.", param=name)
    if len(queries) == 1:
        queries = list(queries) * len(documents)
    if len(queries) != len(documents):
        raise InvalidParameter(f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}; give one, or as many of each.", param=names[0])
    return list(zip(queries, documents, strict=True))


def cosine(one: array[float], other: array[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one has no length."""
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0
