"""Scores, rankings and classes over a scripted engine: a classifier's number is the length of what it read, an embedding is [length, last, first, 0.5]."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import httpx
import pytest
from oarlock_pooling import routes
from oarlock_pooling.classes import CLASSIFY
from oarlock_pooling.scores import PAIRS, RERANK, SCORE
from real_server import ok
from toy_frontend import SUMMARY
from toy_server import MODEL, Toy, refused, strict, toy_server

pytestmark = pytest.mark.asyncio
ODD: list[Any] = [True, -1, 0, 2**63, 10**400, 0.5, "", "x", [], [1], ["x"], [""], [None], [{}], {}, {"text": "x"}, [{"text": 1}], {"content": []}]


def toy(labels: int = 0, template: str | None = None, **settings: Any) -> Any:
    """A model that embeds, or one with so many classes."""
    architecture = "ToyForSequenceClassification" if labels else "ToyForCausalLM"
    config = {"hidden_size": 4, **({"id2label": {str(n): f"class {n}" for n in range(labels)}} if labels else {})}
    return toy_server(routes=(routes.add,), summary=replace(SUMMARY, architecture=architecture, hf_config=config), chat_template=template, **settings)


async def post(here: Toy, path: str, **fields: Any) -> httpx.Response:
    return await here.http.post(path, json={"model": MODEL, **fields})


async def made(here: Toy, path: str, **fields: Any) -> dict[str, Any]:
    return ok(await post(here, path, **fields))


def read(here: Toy) -> list[str]:
    """What the engine was given, as text."""
    return [bytes(request.prompt_token_ids).decode() for request in here.engine.submitted]


def cosine(one: str, other: str) -> float:
    a, b = ([len(t), ord(t[-1]), ord(t[0]), 0.5] for t in (one, other))
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


async def test_a_classifier_reads_both_texts_as_one() -> None:
    async with toy(1) as here:
        for path, names in (("/score", PAIRS[0]), ("/v1/score", PAIRS[1]), ("/score", PAIRS[2]), ("/score", PAIRS[3])):
            here.engine.submitted.clear()
            answer = await made(here, path, **{names[0]: "qq", names[1]: ["one", "three"]})
            assert [(one["index"], one["object"], one["score"]) for one in answer["data"]] == [(0, "score", 5), (1, "score", 7)]
            assert read(here) == ["qqone", "qqthree"] and answer["usage"]["prompt_tokens"] == 12 and answer["object"] == "list"
            assert {r.pooling.activation for r in here.engine.submitted} == {"sigmoid"}
        await made(here, "/score", text_1=["a", "b"], text_2=["x", "y"], use_activation=False)
        assert read(here)[-2:] == ["ax", "by"] and here.engine.submitted[-1].pooling.activation == "none"


async def test_a_template_joins_them_where_the_server_was_given_one() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}?"
    async with toy(1, template) as here:
        await made(here, "/score", text_1="q", text_2="d")
        assert read(here) == ["<query>q<document>d?"]


async def test_embeddings_are_compared_by_their_cosine() -> None:
    async with toy() as here:
        answer = await made(here, "/score", queries="qx", documents=["one", "qx", "a much longer text"])
        assert [one["score"] for one in answer["data"]] == pytest.approx([cosine("qx", t) for t in ("one", "qx", "a much longer text")], abs=1e-6)
        assert sorted(read(here)) == sorted(["qx", "one", "a much longer text"]), "each text is computed once"
        assert answer["usage"]["prompt_tokens"] == sum(map(len, read(here)))
        refused(await post(here, "/score", text_1="a", text_2="b", use_activation=True), "use_activation")
        assert "queries[1]" in refused(await post(here, "/score", queries=["ok", "x" * 99], documents=["a", "b"]), "queries[1]")["message"]
        refused(await post(here, "/score", queries="x" * 99, documents=["a", "b"]), "queries")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_a_ranking_has_the_best_first(path: str) -> None:
    documents = ["four", "a much longer text", "to", {"text": "middle one"}]
    async with toy(1) as here:
        answer = await made(here, path, query="q", documents=documents)
        assert [(r["index"], r["relevance_score"], r["document"]["text"]) for r in answer["results"]] == [
            (1, 19, "a much longer text"), (3, 11, "middle one"), (0, 5, "four"), (2, 3, "to"),
        ]  # fmt: skip
        assert answer["usage"]["total_tokens"] == 38 and answer["model"] == MODEL and answer["id"].startswith("rerank-")
        answer = await made(here, path, query="q", documents=documents, top_n=2, return_documents=False)
        assert answer["results"] == [{"index": 1, "relevance_score": 19}, {"index": 3, "relevance_score": 11}]
        for fields, param in (({"top_n": -1}, "top_n"), ({"query": ""}, "query"), ({"documents": []}, "documents"), ({"documents": ["a", ""]}, "documents[1]")):
            refused(await post(here, path, **{"query": "q", "documents": ["d"], **fields}), param)
    async with toy() as here:
        answer = await made(here, path, query="qx", documents=["one", "qx"])
        assert [r["index"] for r in answer["results"]] == [1, 0] and answer["results"][0]["relevance_score"] == pytest.approx(1)


async def test_texts_are_cut_before_they_are_joined() -> None:
    async with toy(1) as here:
        await made(here, "/score", text_1="query", text_2=["document", "d"], max_tokens_per_query=2, max_tokens_per_doc=3)
        assert read(here) == ["qudoc", "qud"]
        await made(here, "/score", text_1="query", text_2="document", truncate_prompt_tokens=7)
        assert read(here)[-1] == "querydo"
        refused(await post(here, "/score", text_1="a", text_2="b", max_tokens_per_doc=64), "max_tokens_per_doc")
        refused(await post(here, "/score", text_1="a", text_2="x" * 99), "text_2")


async def test_names_go_together() -> None:
    async with toy(1) as here:
        for fields in ({}, {"text_1": "a"}, {"text_1": "a", "documents": "b"}, {"queries": "a", "documents": "b", "items": "c"}, {"text_1": "a", "text_2": "b", "items": "c"}):
            error = refused(await post(here, "/score", **fields), next(iter(fields), "queries") if len(fields) < 2 else min(fields))
            assert "text_1 and text_2" in error["message"]
        refused(await post(here, "/score", text_1=["a", "b"], text_2=["x"]), "text_1")
        refused(await post(here, "/score", text_1="a", text_2=[["x"]]), "text_2")


async def test_several_classes_have_no_score_but_their_probabilities() -> None:
    async with toy(4) as here:
        assert "/classify" in refused(await post(here, "/score", text_1="a", text_2="b"), "model")["message"]
        answer = await made(here, "/classify", input=["axc", "a"])
        assert answer["data"] == [
            {"index": 0, "label": "class 1", "probs": [3, 99, 97, 0.5], "num_classes": 4}, {"index": 1, "label": "class 1", "probs": [1, 97, 97, 0.5], "num_classes": 4},
        ]  # fmt: skip
        assert answer["usage"]["prompt_tokens"] == 4
        await made(here, "/classify", messages=[{"role": "user", "content": "hi"}])
        assert read(here)[-1] == "[user]hi"
        refused(await here.http.post("/v1/embeddings", json={"model": MODEL, "input": "x"}), "model")
        refused(await here.completion(), "model")
        refused(await here.chat(), "model")
    async with toy() as here:
        refused(await post(here, "/classify", input="x"), "model")


async def test_every_odd_value_is_a_400_or_an_answer_and_nothing_stays_open() -> None:
    cases = ((1, "/score", SCORE, {"text_1": "a", "text_2": "b"}), (1, "/rerank", RERANK, {"query": "a", "documents": ["b"]}), (4, "/classify", CLASSIFY, {"input": "a"}))
    for labels, path, table, plain in cases:
        async with toy(labels) as here:
            for name in (*table.fields, *table.refused, "surprise"):
                for value in ODD:
                    response = await post(here, path, **{**plain, name: value})
                    assert response.status_code in (200, 400, 404), (path, name, value, response.text)
                    if response.status_code != 200:
                        assert strict(response.text)["error"]["param"], (path, name, value)
            assert not here.engine.open and not here.state.open
