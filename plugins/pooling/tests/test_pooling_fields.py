"""Every field of /v1/embeddings over a scripted engine, whose vectors are [tokens, last token, first token, 0.5]."""

from __future__ import annotations

import asyncio
import base64
import struct
from dataclasses import replace
from typing import Any

import httpx
import pytest
from oarlock_pooling import routes
from oarlock_pooling.embeddings import EMBEDDINGS
from real_server import ok
from toy_frontend import SUMMARY, ToyTokenizer
from toy_server import MODEL, Toy, refused, strict, toy_server

pytestmark = pytest.mark.asyncio
ODD: list[Any] = [True, 0, 1, -2, 2**63, 10**400, 0.5, 1e300, "", "x", "\x00", [], [1], ["x"], [""], [None], [[]], [{}], {}, {"x": {}}]


def toy(**settings: Any) -> Any:
    summary = replace(SUMMARY, hf_config={"hidden_size": 4, **settings.pop("config", {})}, **settings.pop("changes", {}))
    return toy_server(routes=(routes.add,), summary=summary, **settings)


async def create(here: Toy, **fields: Any) -> httpx.Response:
    return await here.http.post("/v1/embeddings", json={"model": MODEL, "input": "hi", **fields})


async def made(here: Toy, **fields: Any) -> dict[str, Any]:
    return ok(await create(here, **fields))


def asked(here: Toy) -> Any:
    """The engine's last request."""
    return here.engine.submitted[-1]


async def test_the_answer_and_its_usage() -> None:
    async with toy() as here:
        answer = await made(here, input=["axc", "z"], user="me", request_id="mine")
        assert (answer["object"], answer["model"], answer["id"]) == ("list", MODEL, "embd-mine")
        assert [(one["object"], one["index"], one["embedding"]) for one in answer["data"]] == [
            ("embedding", 0, [3, ord("c"), ord("a"), 0.5]), ("embedding", 1, [1, ord("z"), ord("z"), 0.5]),
        ]  # fmt: skip
        usage = {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 2}}
        assert answer["usage"] == usage
        page = (await here.http.get("/metrics")).text
        assert 'vllm:prompt_tokens_total{model_name="toy-model"} 4.0' in page


async def test_every_form_of_input() -> None:
    async with toy() as here:
        for given, wanted in (("ax", 1), ([97, 120], 1), (["ax", "ax"], 2), ([[97, 120], [97, 120]], 2)):
            data = (await made(here, input=given))["data"]
            assert [one["embedding"] for one in data] == [[2, 120, 97, 0.5]] * wanted
        for given in (None, "", [], [[]], [""], [1.5], [True], ["a", [1]], {"a": 1}, 7, [[1], ["a"]], [999], [[97], [-1]]):
            refused(await create(here, input=given), "input")
        error = refused(await create(here, input=[[111], [5000]]), "input[1]")
        assert "5000" in error["message"]
        refused(await create(here, input=["x"] * 1025), "input")
        assert not here.engine.open


async def test_messages_go_through_the_template() -> None:
    async with toy() as here:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        response = await here.http.post("/v1/embeddings", json=body)
        assert response.status_code == 200 and bytes(asked(here).prompt_token_ids) == b"[user]hi"
        await here.http.post("/v1/embeddings", json={**body, "add_generation_prompt": True})
        assert bytes(asked(here).prompt_token_ids) == b"[user]hi[assistant]"
        refused(await here.http.post("/v1/embeddings", json={**body, "input": "x"}), "input")
        refused(await here.http.post("/v1/embeddings", json={"model": MODEL}), "input")
        refused(await here.http.post("/v1/embeddings", json={"model": MODEL, "messages": [{"role": "user"}]}), "messages[0].content")
        refused(await create(here, add_generation_prompt=True), "add_generation_prompt")


async def test_encodings() -> None:
    async with toy() as here:
        vector = (2.0, 105.0, 104.0, 0.5)
        for fields, code in (
            ({}, "<4f"), ({"endianness": "big"}, ">4f"), ({"embed_dtype": "float16"}, "<4e"), ({"embed_dtype": "float16", "endianness": "big"}, ">4e"),
        ):  # fmt: skip
            text = (await made(here, encoding_format="base64", **fields))["data"][0]["embedding"]
            assert struct.unpack(code, base64.b64decode(text)) == vector
        for fields in ({"encoding_format": "bytes"}, {"encoding_format": "base64", "embed_dtype": "fp8_e4m3"}, {"embed_dtype": "float16"}, {"endianness": "middle"}):
            refused(await create(here, **fields), list(fields)[-1])


async def test_pooling_and_length() -> None:
    async with toy() as here:
        for fields, wanted in (
            ({}, ("last", "normalize", False)), ({"pooling": "mean"}, ("mean", "normalize", True)), ({"pooling": "cls", "normalize": False}, ("cls", "none", True)),
            ({"use_activation": False}, ("last", "none", False)),
        ):  # fmt: skip
            await made(here, **fields)
            request = asked(here)
            assert (request.pooling.pooling, request.pooling.activation, request.params.skip_reading_prefix_cache) == wanted
        refused(await create(here, pooling="max"), "pooling")
        refused(await create(here, normalize=True, use_activation=False), "use_activation")
    async with toy(changes={"pooler_config": {"pooling": "mean", "use_activation": False}}) as here:
        await made(here)
        assert (asked(here).pooling.pooling, asked(here).pooling.activation) == ("mean", "none")
        await made(here, pooling="last", normalize=True)
        assert (asked(here).pooling.pooling, asked(here).pooling.activation) == ("last", "normalize")


async def test_dimensions_where_vectors_may_be_cut() -> None:
    async with toy() as here:
        await made(here, dimensions=4)
        assert "is_matryoshka" in refused(await create(here, dimensions=2), "dimensions")["message"]
        for wrong in (0, -1, 5):
            refused(await create(here, dimensions=wrong), "dimensions")
    async with toy(config={"is_matryoshka": True}) as here:
        await made(here, dimensions=3)
        assert asked(here).pooling.dimensions == 3
    async with toy(config={"matryoshka_dimensions": [2, 4]}) as here:
        await made(here, dimensions=2)
        assert "2, 4" in refused(await create(here, dimensions=3), "dimensions")["message"]


async def test_long_prompts_are_refused_or_cut() -> None:
    async with toy(max_model_len=8) as here:
        assert "9 of input;" in refused(await create(here, input="123456789"), "input")["message"]
        await made(here, input="12345678")
        for fields, kept in (
            ({"truncate_prompt_tokens": 3}, b"123"), ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"789"), ({"truncate_prompt_tokens": -1}, b"12345678"),
            ({"truncate_prompt_tokens": 9}, None),
        ):  # fmt: skip
            response = await create(here, input="123456789", **fields)
            if kept is None:
                refused(response, "input")
            else:
                assert response.status_code == 200 and bytes(asked(here).prompt_token_ids) == kept
        refused(await create(here, truncate_prompt_tokens=0), "truncate_prompt_tokens")
        refused(await create(here, truncation_side="left"), "truncation_side")
    async with toy(max_model_len=8, tokenizer=ToyTokenizer(adds_bos=True)) as here:
        await made(here, input="123456789", truncate_prompt_tokens=4)
        assert asked(here).prompt_token_ids == (256, *b"123"), "what the tokenizer adds stays"
        await made(here, input="12", add_special_tokens=False)
        assert asked(here).prompt_token_ids == (*b"12",)


async def test_priority_and_salt_reach_the_engine() -> None:
    async with toy(scheduler={"policy": "priority"}) as here:
        await made(here, priority=-3, cache_salt="s")
        assert (asked(here).priority, asked(here).cache_salt) == (-3, "s")
    async with toy() as here:
        refused(await create(here, priority=1), "priority")
        refused(await create(here, cache_salt=""), "cache_salt")
        refused(await create(here, request_id=""), "request_id")


async def test_every_odd_value_is_a_400_or_an_answer_and_nothing_stays_open() -> None:
    async with toy() as here:
        for name in (*EMBEDDINGS.fields, *EMBEDDINGS.refused, "surprise", "inputs"):
            for value in ODD:
                response = await create(here, **{name: value})
                assert response.status_code in (200, 400, 404), (name, value, response.text)
                if response.status_code != 200:
                    assert strict(response.text)["error"]["param"], (name, value)
        assert not here.engine.open and not here.state.open
        for name, (_, neutral) in EMBEDDINGS.refused.items():
            assert name in refused(await create(here, **{name: 1}), name)["message"] or "leave the field out" in (await create(here, **{name: 1})).text
            for value in neutral:
                await made(here, **{name: value})


async def test_a_full_queue_is_429_and_a_long_list_passes_through_few_seats() -> None:
    async with toy(scheduler={"max_waiting_requests": 2, "max_num_seqs": 2}, max_num_seqs=2, step_s=0.01) as here:
        answer = await made(here, input=["x"] * 50)
        assert len(answer["data"]) == 50 and here.engine.most_open <= 2
        several = await asyncio.gather(*(create(here, input=["x"] * 20) for _ in range(4)))
        assert sorted(response.status_code for response in several) == [200, 200, 429, 429]
        refused(next(response for response in several if response.status_code == 429), None, 429)
        assert here.state.num_prompts == 0


async def test_the_end_of_the_server_ends_it_with_503() -> None:
    async with toy(step_s=5.0) as here:
        task = asyncio.create_task(create(here, input=["a", "b"]))
        while not here.state.open:
            await asyncio.sleep(0.001)
        here.shut_down()
        refused(await task, None, 503)
        assert not here.state.open and len(here.engine.aborts) == 2
