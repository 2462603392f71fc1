"""docs/api.md is what /openapi.json says, and its lists of OpenAI's fields are those whose effect is tested."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from oarlock.server.schema import CHAT, NO_EFFECT

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_api_doc", ROOT / "tools" / "gen_api_doc.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_current(generator: ModuleType) -> None:
    assert (ROOT / "docs" / "api.md").read_text() == generator.render(), "run: python tools/gen_api_doc.py"


def test_every_field_of_openai_is_taken_refused_or_named_as_unknown(generator: ModuleType) -> None:
    """A field that the schema loses shows on the page as unknown."""
    every = generator.paths()
    page = generator._deviations(every)
    assert page.count("| none |\n") == len(generator.OPENAI)
    every["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"].pop("suffix")
    assert "`suffix` |\n" in generator._deviations(every)


def test_what_has_no_effect_says_so_in_the_schema(generator: ModuleType) -> None:
    fields = generator.body_of(generator.paths()[CHAT.path]["post"])["properties"]
    assert {name for name, field in fields.items() if field.get("description") == generator.NO_EFFECT} == set(NO_EFFECT)
