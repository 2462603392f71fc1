"""POST /score and /rerank, under each of their names: how well texts go together.

Owns: the forms of queries and documents, how a score and a ranking are written.
Reads: `oarlock.backend_api`, `embeddings`, `fields`.
Never: knows how a classifier reads two texts as one prompt: core does.
"""

from __future__ import annotations

import asyncio
import math
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.backend_api import JsonReply, Pooled, Route, RouteCall, RouteError, RouteFields, RouteServer

from oarlock_pooling.embeddings import floats
from oarlock_pooling.fields import REFUSED, SHARED, bad, check_count, own_id, pool_options, show, usage

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
LIMITS: dict[str, Any] = {"max_tokens_per_query": "integer", "max_tokens_per_doc": "integer"}
TURN = 64  # cosines between which others are served

EVERY: dict[str, Any] = dict.fromkeys((name for pair in PAIRS for name in pair), "any")
SCORE = RouteFields({**SHARED, **LIMITS, **EVERY}, refused=REFUSED)
RERANK = RouteFields(
    {**SHARED, **LIMITS, "query": "string", "documents": "any", "top_n": "integer", "return_documents": "boolean"},
    required=("query", "documents"),
    refused={**REFUSED, "rank_fields": ("documents are texts and have no fields; leave rank_fields out.", ([],))},
)


class Scores:
    """The routes."""

    def __init__(self, server: RouteServer) -> None:
        self._server = server

    def add(self) -> None:
        for path in ("/score", "/v1/score"):
            self._server.add(Route("POST", path, self.score, SCORE, generates=True))
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            self._server.add(Route("POST", path, self.rerank, RERANK, generates=True))

    async def score(self, call: RouteCall) -> JsonReply:
        names = _names(call.values)
        queries, documents = (read_documents(call.values[name], name, self._server.max_prompts) for name in names)
        request_id, scores, tokens = await self._scores(call, queries, documents, names)
        data = [{"index": n, "object": "score", "score": value} for n, value in enumerate(scores)]
        answer = {"id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": self._server.model_names[0], "data": data}
        return JsonReply({**answer, "usage": usage(*tokens)})

    async def rerank(self, call: RouteCall) -> JsonReply:
        values = call.values
        if not values["query"]:
            raise bad("query", "query is empty; give a text.")
        documents, top_n = read_documents(values["documents"], "documents", self._server.max_prompts), values.get("top_n", 0)
        if top_n < 0:
            raise bad("top_n", f"top_n is {top_n}; it must be at least 1, or 0 for all.")
        request_id, scores, tokens = await self._scores(call, [values["query"]], documents, ("query", "documents"))
        best = sorted(range(len(scores)), key=lambda n: -scores[n])[: top_n or None]
        shown = values.get("return_documents", True)
        results = [{"index": n, **({"document": {"text": documents[n]}} if shown else {}), "relevance_score": scores[n]} for n in best]
        return JsonReply({"id": f"rerank-{request_id}", "model": self._server.model_names[0], "usage": usage(*tokens), "results": results})

    async def _scores(self, call: RouteCall, queries: list[str], documents: list[str], names: tuple[str, str]) -> tuple[str, list[float], tuple[int, int]]:
        """(the request's id, a score for each pair, (prompt tokens, cached ones))."""
        server, labels, values = self._server, self._server.labels, call.values
        if len(queries) != 1 and len(queries) != len(documents):
            raise bad(names[0], f"{names[0]} has {len(queries)} texts and {names[1]} {len(documents)}; give one, or as many of each.")
        if len(labels) > 1:
            text = f"This model has {len(labels)} classes, and a score is the one number of a model with one; use /classify."
            raise bad("model", text, "unsupported_field")
        request_id = own_id(values, call.request_id)
        queries = await self._cut(queries, "max_tokens_per_query", values, request_id)
        documents = await self._cut(documents, "max_tokens_per_doc", values, request_id)
        pairs = list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))
        if labels:
            found = await server.pool(pairs, pool_options(values, "classify"), request_id, names[1])
            return request_id, [floats(one.data)[0] for one in found], _tokens(found)
        if "use_activation" in values:
            raise bad("use_activation", "use_activation is for classifiers; the score of two embeddings is their cosine. Leave it out.", "unsupported_field")
        texts = list(dict.fromkeys((*queries, *documents)))
        try:
            found = await server.pool(texts, pool_options(values, "embed", use_activation=False), request_id, names[1])
        except RouteError as error:
            raise _of_field(error, texts, queries, documents, names) from None
        vectors = dict(zip(texts, (floats(one.data) for one in found), strict=True))
        return request_id, await _cosines([(vectors[one], vectors[other]) for one, other in pairs]), _tokens(found)

    async def _cut(self, texts: list[str], field: str, values: Mapping[str, Any], request_id: str) -> list[str]:
        """Each text's first tokens, where a limit is given."""
        limit = values.get(field, 0)
        if not 0 <= limit < self._server.max_model_len:
            raise bad(field, f"{field} is {limit}; it must be at least 1 and below the context of {self._server.max_model_len} tokens, or 0 for no limit.")
        if not limit:
            return texts
        found = []
        for text in texts:
            ids = (await self._server.call("/tokenize", {"prompt": text, "add_special_tokens": False}, request_id))["tokens"]
            kept = await self._server.call("/detokenize", {"tokens": ids[:limit]}, request_id) if len(ids) > limit else {"prompt": text}
            found.append(kept["prompt"])
        return found


def read_documents(value: Any, name: str, limit: int) -> list[str]:
    """A text or a list of texts; a document may be {"text": …}. Raises RouteError 400."""
    if type(value) is not list:
        value = [value]
    check_count(value, name, limit)
    found = []
    for at, item in enumerate(value):
        where = name if len(value) == 1 else f"{name}[{at}]"
        if type(item) is dict and set(item) == {"text"}:
            item = item["text"]
        if type(item) is dict and ("content" in item or "type" in item):
            raise bad(where, f"{where} is a list of parts, but texts only are served: a string, or {{\"text\": …}}.", "unsupported_content")
        if type(item) is not str:
            raise bad(where, f"{where} must be a string or {{\"text\": …}}, not {show(item)}.", "invalid_type")
        if not item:
            raise bad(where, f"{where} is empty; leave it out.")
        found.append(item)
    return found


def _names(values: Mapping[str, Any]) -> tuple[str, str]:
    """Which of the pairs of names a request uses. Raises RouteError 400."""
    given = [pair for pair in PAIRS if all(name in values for name in pair)]
    used = {name for pair in PAIRS for name in pair if name in values}
    if len(given) != 1 or used != set(given[0]):
        known = ", or ".join(" and ".join(pair) for pair in PAIRS)
        raise bad(min(used, default="queries"), f"Give {known}.", "missing_field" if len(used) < 2 else "invalid_value")
    return given[0]


def _of_field(error: RouteError, texts: Sequence[str], queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]) -> RouteError:
    """The same about the field in which the text at fault stands: the engine was sent each text once."""
    place = (error.param or "").removeprefix(names[1])
    if not place.startswith("["):
        return error
    text = texts[int(place[1:-1])]
    name, every = (names[0], queries) if text in queries else (names[1], documents)
    return error.renamed({error.param or "": name if len(every) == 1 else f"{name}[{list(every).index(text)}]"})


async def _cosines(pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    found = []
    for at, (one, other) in enumerate(pairs):
        length = math.hypot(*one) * math.hypot(*other)
        found.append(sum(map(operator.mul, one, other)) / length if length else 0.0)
        if at % TURN == TURN - 1:
            await asyncio.sleep(0)
    return found


def _tokens(found: Sequence[Pooled]) -> tuple[int, int]:
    return sum(len(one.token_ids) for one in found), sum(one.num_cached_tokens for one in found)
