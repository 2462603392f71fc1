"""docs/api.md is what /openapi.json says, and its lists of OpenAI's fields are those whose effect is tested."""

from __future__ import annotations

from pathlib import Path

import gen_api_doc
import pytest
from oarlock.server.schema import CHAT, COMPLETIONS, NO_EFFECT
from test_documented_parameters import OPENAI

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_current() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == gen_api_doc.render(), "run: python tools/gen_api_doc.py"


def test_every_field_of_openai_is_taken_refused_or_named_as_unknown() -> None:
    """A field that the schema loses shows on the page as unknown."""
    every = gen_api_doc.paths()
    page = gen_api_doc._deviations(every)
    assert page.count("| none |\n") == len(gen_api_doc.OPENAI)
    gen_api_doc.body_of(every[COMPLETIONS.path]["post"])["properties"].pop("suffix")
    assert "`suffix` |\n" in gen_api_doc._deviations(every)


def test_what_has_no_effect_says_so_in_the_schema() -> None:
    fields = gen_api_doc.body_of(gen_api_doc.paths()[CHAT.path]["post"])["properties"]
    assert {name for name, field in fields.items() if field.get("description") == gen_api_doc.NO_EFFECT} == set(NO_EFFECT)


@pytest.mark.parametrize("path", OPENAI)
def test_the_fields_of_openai_are_those_whose_effect_is_tested(path: str) -> None:
    assert set(gen_api_doc.OPENAI[path].split()) == set(OPENAI[path].split())
