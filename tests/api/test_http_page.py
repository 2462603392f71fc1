"""docs/http.md names every route, field, cap and metric there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oarlock.config.options import BY_NAME
from oarlock.server.schema import CHAT, COMPLETIONS, NO_EFFECT
from prometheus_client.parser import text_string_to_metric_families
from toy_server import toy_server

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
WORDS = set(re.findall(r"`([^`]+)`", PAGE))


@pytest.mark.asyncio
async def test_the_page_names_every_route_and_metric() -> None:
    async with toy_server() as toy:
        spec = (await toy.http.get("/openapi.json")).json()
        for path, methods in spec["paths"].items():
            assert path in PAGE and all(method.upper() in PAGE for method in methods)
        await toy.completion()
        families = list(text_string_to_metric_families((await toy.http.get("/metrics")).text))
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    named = {word.partition("{")[0] for word in WORDS if re.match(r"(vllm:|oarlock_)", word)}
    assert served == named


def test_the_page_names_every_field() -> None:
    for name in {*CHAT.fields, *COMPLETIONS.fields}:
        assert name in WORDS, name
    assert set(NO_EFFECT) <= WORDS


def test_the_page_names_real_flags() -> None:
    flags = {word.removeprefix("--").partition(" ")[0] for word in WORDS if word.startswith("--")}
    assert flags and flags <= set(BY_NAME)
