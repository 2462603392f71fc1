"""Two thousand mutated requests with a fixed seed, and whether the fuzzer would see what it looks for."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import fuzz
import pytest
from corpus import COVERED, GENERATING, Asked, Corpus
from wire import Answer

COUNT, SEED = 2000, 2026
JSON = {b"content-type": b"application/json", b"x-request-id": b"r"}
EVENTS = {b"content-type": b"text/event-stream; charset=utf-8", b"x-request-id": b"r"}


def test_two_thousand_mutated_requests_do_no_harm(tmp_path: Path) -> None:
    with fuzz.fuzzed_server("null", tmp_path) as server:
        before = server.alive()
        run = fuzz.Fuzz(server, SEED)
        asyncio.run(run.run(0, COUNT))
        report = run.report()
        run.settle()
        assert run.tally.defects == []
        assert server.alive() == before
        assert report["requests"] == COUNT and report["reached_engine"] >= 0.30
        assert report["fuzzer_share_of_a_core"] <= fuzz.SHARE + 0.02
        paths = {path for path in server.http.get("/openapi.json").json()["paths"] if path not in COVERED}
        assert {path for _, path, _ in run.corpus.other} == paths, "every route of the server's is asked"


def test_a_seed_and_a_number_give_the_same_request_again() -> None:
    made = [[fuzz.make(7, at, Corpus({"paths": {}}))[1].whole() for at in range(300)] for _ in range(2)]
    assert made[0] == made[1] and len(set(made[0])) > 290


def test_routes_that_the_corpus_does_not_know_are_asked_by_their_schema() -> None:
    schema = {"type": "object", "properties": {"model": {"type": "string"}, "texts": {"type": "array", "items": {"type": "string"}}}, "required": ["model", "texts"]}
    corpus = Corpus({"paths": {"/v1/later/{name}": {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}, "get": {}}}})
    made = [fuzz.make(1, at, corpus)[0] for at in range(400)]
    asked = Counter((one.method, one.path) for one in made if one.path == "/v1/later/x")
    assert asked["POST", "/v1/later/x"] > 5 and asked["GET", "/v1/later/x"] > 5
    assert any(one.fields and one.fields["model"] == "tiny" and one.fields["texts"] for one in made if one.path == "/v1/later/x")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(200, JSON, b"{}"), ""),
        (Answer(400, JSON, b'{"error":{"message":"no"}}'), ""),
        (Answer(500, JSON, b'{"error":{"message":"no"}}'), "500"),
        (Answer(200, {b"content-type": b"application/json"}, b"{}"), "X-Request-Id"),
        (Answer(400, JSON, b"no"), "envelope"),
        (Answer(400, JSON, b'{"error":"no"}'), "envelope"),
        (Answer(400, JSON, json.dumps({"error": {"message": "<x object at 0x7f>"}}).encode()), "inside"),
        (Answer(200, EVENTS, b"data: {}\n\ndata: [DONE]\n\n"), ""),
        (Answer(200, EVENTS, b"data: {}\n\n"), "without its end"),
        (Answer(200, EVENTS, b'data: {"error":{"type":"server_error"}}\n\ndata: [DONE]\n\n'), "in a stream"),
    ],
)
def test_what_is_wrong_with_an_answer_is_seen(answer: Answer, words: str) -> None:
    found = fuzz.fault(Asked("POST", GENERATING[0], {}), answer)
    assert words in found and bool(found) is bool(words)


def test_the_slope_of_memory_is_seen() -> None:
    assert fuzz.slope([(at, 5000 + 3 * at) for at in range(0, 100, 10)]) == pytest.approx(3)
    assert fuzz.slope([(at, 5000 + at % 20) for at in range(0, 100, 10)]) == pytest.approx(0, abs=0.1)
