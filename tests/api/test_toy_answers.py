"""The server over a scripted engine: shapes, streams, errors in the middle, hang-ups. No model, no process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from oarlock.messages import EngineOutput, EngineOutputs, ErrorInfo, SchedulerStats
from oarlock.server.errors import unavailable
from oarlock.server.state import Phase
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from toy_frontend import EOS, SUMMARY, ToyTokenizer, says
from toy_server import MODEL, PumpedClient, Toy, events, refused, strict, toy_server

pytestmark = pytest.mark.asyncio


async def test_the_whole_answer_of_a_completion() -> None:
    async with toy_server(says("hello")) as toy:
        body = strict((await toy.completion(max_tokens=3, temperature=0)).text)
        assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == MODEL
        assert body["choices"] == [{"index": 0, "text": "hel", "logprobs": None, "finish_reason": "length", "stop_reason": None}]
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


async def test_the_whole_answer_of_a_chat() -> None:
    async with toy_server(says("hello")) as toy:
        body = strict((await toy.chat()).text)
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert bytes(toy.engine.submitted[0].prompt_token_ids) == b"[user]hi[assistant]"
        assert toy.engine.submitted[0].params.max_tokens == 64 - 19


async def test_the_chunks_of_a_chat() -> None:
    async with toy_server(says("hey")) as toy:
        *chunks, done = events(await toy.chat(stream=True))
        assert done == "[DONE]"
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""}, {"content": "h"}, {"content": "e"}, {"content": "y"}, {}
        ]  # fmt: skip
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and all("usage" not in chunk for chunk in chunks)


async def test_a_character_of_several_tokens_comes_whole() -> None:
    async with toy_server(says("a😀b")) as toy:
        chunks = events(await toy.completion(stream=True))[:-1]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "😀", "b", ""]
        logprobs = strict((await toy.completion(logprobs=1)).text)["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b", "<eos>"]
        assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
        content = strict((await toy.chat(logprobs=True)).text)["choices"][0]["logprobs"]["content"]
        assert [item["token"] for item in content][1] == "\\xf0"
        assert bytes(byte for item in content for byte in item["bytes"]).decode() == "a😀b"


async def test_one_write_for_each_step_of_a_stream() -> None:
    writes: list[bytes] = []
    async with toy_server(says("abcd")) as toy:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                writes.append(message["body"])

        await call(toy, send, {"model": MODEL, "prompt": "hi", "stream": True, "n": 3, "max_tokens": 4})
        assert len(writes) == 4 + 1  # every step's three choices together, then [DONE]
        assert writes[0].count(b"data: ") == 3


async def call(toy: Toy, send: Any, body: dict[str, Any], *, hang_up: asyncio.Event | None = None) -> None:
    """One POST /v1/completions by plain ASGI; the client hangs up when told to."""
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await (hang_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/completions",
        "raw_path": b"/v1/completions", "query_string": b"", "headers": [(b"content-type", b"application/json")], "server": ("toy", 80),
    }  # fmt: skip
    await toy.app(scope, receive, send)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "stream": True}], ids=str)
async def test_a_client_that_hangs_up_frees_the_engine_at_once(fields: dict[str, Any]) -> None:
    async with toy_server(lambda request, index: [97], step_s=0.01, max_model_len=100000) as toy:
        hang_up, sent = asyncio.Event(), []

        async def send(message: Any) -> None:
            sent.append(message)

        body = {"model": MODEL, "prompt": "hi", "max_tokens": 90000, "ignore_eos": True, **fields}
        request = asyncio.create_task(call(toy, send, body, hang_up=hang_up))
        while not toy.engine.num_steps > 5:
            await asyncio.sleep(0.01)
        hang_up.set()
        await asyncio.wait_for(request, 1.0)
        await asyncio.sleep(0.1)
        assert not toy.engine.open and toy.state.num_prompts == 0 and not toy.state.open
        assert not any(message.get("body", b"").endswith(b"[DONE]\n\n") for message in sent)


async def test_an_error_in_the_middle_of_a_stream_is_an_event_then_done() -> None:
    async with toy_server(lambda request, index: [97], step_s=0.005) as toy:
        async def fail() -> None:
            while toy.engine.num_steps < 5:
                await asyncio.sleep(0.005)
            (request_id,) = toy.engine.open
            error = ErrorInfo("the row was not finite", kind="request", code="non_finite")
            toy.engine.open.clear()
            toy.engine.on_outputs(EngineOutputs((EngineOutput(request_id, finish_reason="error", error=error),), SchedulerStats()))

        failing = asyncio.create_task(fail())
        payloads = events(await toy.chat(stream=True, max_tokens=40))
        await failing
        assert payloads[-1] == "[DONE]"
        assert payloads[-2]["error"]["message"] == "the row was not finite"
        assert 'outcome="refused"} 1.0' in toy.state.metrics.page().decode()


async def test_an_error_before_the_first_token_is_a_plain_error() -> None:
    async with toy_server() as toy:
        toy.engine.die("gone")
        for stream in (False, True):
            refused(await toy.completion(stream=stream), None, status=503)
        assert (await toy.http.get("/health")).status_code == 503


async def test_a_failed_step_is_a_500_without_its_reason() -> None:
    class Failing(PumpedClient):
        def step(self) -> EngineOutputs:
            outputs = tuple(
                EngineOutput(request_id, finish_reason="error", error=ErrorInfo("/secret/path.py broke", kind="step")) for request_id in list(self.open)
            )
            self.open.clear()
            message = EngineOutputs(outputs, SchedulerStats())
            self.on_outputs(message)
            return message

    async with toy_server() as toy:
        toy.engine.__class__ = Failing
        error = refused(await toy.completion(), None, status=500)
        assert "secret" not in error["message"]


async def test_when_the_server_stops_every_open_request_is_told() -> None:
    async with toy_server(lambda request, index: [97], step_s=0.01, max_model_len=100000) as toy:
        requests = [asyncio.create_task(toy.completion(max_tokens=90000, stream=stream)) for stream in (True, False)]
        while toy.engine.num_steps < 5:
            await asyncio.sleep(0.01)
        toy.state.phase = Phase.DRAINING
        late = await toy.completion()
        assert late.status_code == 503 and late.headers["retry-after"]
        assert (await toy.http.get("/health")).status_code == 503
        assert (await toy.http.get("/metrics")).status_code == 200
        toy.state.end_all(unavailable("The server is shutting down; the request was ended.", "shutting_down", 5))
        streamed, whole = await asyncio.wait_for(asyncio.gather(*requests), 1.0)
        assert events(streamed)[-1] == "[DONE]" and events(streamed)[-2]["error"]["code"] == "shutting_down"
        refused(whole, None, status=503)
        assert toy.state.idle.is_set()
        await asyncio.sleep(0.05)
        assert not toy.engine.open


async def test_one_bad_prompt_of_a_batch_refuses_the_batch() -> None:
    async with toy_server(says("hello")) as toy:
        for stream in (False, True):
            refused(await toy.completion(prompt=["ok", "x" * 200, "ok"], stream=stream), "prompt")
        assert not toy.engine.submitted and toy.state.num_prompts == 0


async def test_batches_are_numbered_by_prompt_then_choice() -> None:
    def script(request: Any, index: int) -> list[int]:
        return [*request.prompt_token_ids, 48 + index, EOS]

    async with toy_server(script) as toy:
        body = strict((await toy.completion(prompt=["a", "b", "c"], n=2)).text)
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"), (4, "c0"), (5, "c1")]
        assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 18
        texts: dict[int, str] = {}
        for chunk in events(await toy.completion(prompt=["a", "b", "c"], n=2, stream=True))[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1", 4: "c0", 5: "c1"}


async def test_the_queue_bound_counts_prompts() -> None:
    engine = EngineConfig(ModelConfig(MODEL), scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_requests=2))
    async with toy_server(lambda r, i: [97], engine=engine, step_s=0.01, max_model_len=100000, max_num_seqs=1) as toy:
        running = asyncio.create_task(toy.completion(prompt=["a", "b"], max_tokens=20))
        while not toy.engine.open:
            await asyncio.sleep(0.005)
        full = await toy.completion(prompt=["a", "b"])
        error = refused(full, None, status=429)
        assert error["type"] == "rate_limit_error" and full.headers["retry-after"] == "1"
        assert (await running).status_code == 200
        assert (await toy.completion(prompt=["a", "b"])).status_code == 200


async def test_unknown_fields_are_named_in_a_header_where_they_are_allowed() -> None:
    async with toy_server(server=ServerConfig(allow_unknown_fields=True)) as toy:
        response = await toy.completion(**{"colour": 1, "x\r\ny: z": 2})
        assert response.status_code == 200 and response.headers["x-oarlock-ignored-fields"] == "colour,x__y__z"
        refused(await toy.completion(max_new_tokens=1), "max_new_tokens")
        assert "pip install ./plugins/structured_output" in refused(await toy.completion(guided_json={}), "guided_json")["message"]


async def test_a_request_may_bring_a_template_where_it_is_allowed() -> None:
    async with toy_server(server=ServerConfig(allow_request_chat_template=True)) as toy:
        assert (await toy.chat(chat_template="{{ messages[0].content }}!{{ mood }}", chat_template_kwargs={"mood": "x"})).status_code == 200
        assert bytes(toy.engine.submitted[0].prompt_token_ids) == b"hi!x"
        refused(await toy.chat(chat_template="{{ broken"), "chat_template")
        refused(await toy.chat(chat_template="{{ raise_exception('no way') }}"), "messages")
        refused(await toy.chat(chat_template="{{ ''.__class__.__mro__ }}"), "messages")


async def test_defaults_come_from_the_checkpoint_and_the_request_wins() -> None:
    from dataclasses import replace

    summary = replace(SUMMARY, generation_config={"temperature": 0.25, "top_k": 7, "max_new_tokens": 3})
    async with toy_server(summary=summary) as toy:
        await toy.completion(top_k=2)
        params = toy.engine.submitted[0].params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 2, 16)
        await toy.chat(use_beam_search=True, n=2)
        assert toy.engine.submitted[1].params.temperature == 0
    async with toy_server(summary=summary, engine=EngineConfig(ModelConfig(MODEL, generation_config="none"))) as toy:
        await toy.completion()
        assert toy.engine.submitted[0].params.temperature == 1.0


async def test_the_response_role_and_echo() -> None:
    async with toy_server(says("!"), server=ServerConfig(response_role="bot")) as toy:
        assert (await toy.chat()).json()["choices"][0]["message"]["role"] == "bot"
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
        body = (await toy.chat(messages=messages, add_generation_prompt=False, echo=True)).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "so!", "refusal": None}


async def test_priority_needs_the_policy() -> None:
    async with toy_server() as toy:
        refused(await toy.completion(priority=1), "priority")
        assert (await toy.completion(priority=0)).status_code == 200
    engine = EngineConfig(ModelConfig(MODEL), scheduler=SchedulerConfig(policy="priority"))
    async with toy_server(engine=engine) as toy:
        assert (await toy.completion(priority=-3)).status_code == 200
        assert toy.engine.submitted[0].priority == -3


async def test_phases_before_and_after_serving() -> None:
    async with toy_server() as toy:
        for phase, code in ((Phase.LOADING, "loading"), (Phase.DEAD, "engine_dead")):
            toy.state.phase = phase
            assert refused(await toy.completion(), None, status=503)["code"] == code
            assert refused(await toy.http.get("/health"), None, status=503)["code"] == code
            assert (await toy.http.get("/v1/models")).status_code == 503
            assert (await toy.http.get("/version")).status_code == 200


async def test_cors_answers_preflights_without_a_key_and_only_when_on() -> None:
    ask = {"Origin": "http://page", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with toy_server(server=ServerConfig(api_keys=("k",), allowed_origins=("http://page",))) as toy:
        preflight = await toy.http.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "http://page"
        response = await toy.http.post("/v1/completions", json={}, headers={"Origin": "http://page"})
        assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://page"
    async with toy_server(server=ServerConfig(api_keys=("k",))) as toy:
        assert (await toy.http.options("/v1/completions", headers=ask)).status_code == 401
    async with toy_server() as toy:
        assert (await toy.http.options("/v1/completions", headers=ask)).status_code == 405


async def test_the_root_path_may_or_may_not_be_stripped_by_the_proxy() -> None:
    async with toy_server(server=ServerConfig(root_path="/llm/", api_keys=("k",))) as toy:
        headers = {"Authorization": "Bearer k"}
        for prefix in ("", "/llm"):
            assert (await toy.http.get(f"{prefix}/health")).status_code == 200
            assert (await toy.http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await toy.http.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
        assert (await toy.http.get("/llm/llm/health")).status_code == 401


async def test_user_middleware_runs() -> None:
    async with toy_server(server=ServerConfig(middleware=("toy_middleware.Tag", "toy_middleware.tag"))) as toy:
        response = await toy.http.get("/health")
        assert response.headers["x-class"] == "1" and response.headers["x-function"] == "1"


async def test_an_unexpected_error_is_an_envelope_without_its_text() -> None:
    async with toy_server() as toy:
        toy.state.template = object()
        error = refused(await toy.chat(), None, status=500)
        assert "object" not in error["message"]


async def test_the_openai_client_understands_everything() -> None:
    async with toy_server(says("hello")) as toy:
        client = AsyncOpenAI(base_url="http://toy/v1", api_key="none", http_client=toy.http, max_retries=0)
        completion = await client.completions.create(model=MODEL, prompt="hi", logprobs=2, echo=True)
        assert completion.choices[0].text == "hihello"
        chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2)
        assert chat.choices[0].message.content == "hello"
        parts = [chunk async for chunk in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
        )]  # fmt: skip
        assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == "hello"
        assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 6
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=[])
        assert bad.value.param == "messages"
        with pytest.raises(NotFoundError):
            await client.completions.create(model="other", prompt="hi")


async def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    engine = EngineConfig(ModelConfig(MODEL, skip_tokenizer_init=True))
    async with toy_server(engine=engine) as toy:
        toy.state.tokenizer = toy.state.template = toy.state.llm.tokenizer = toy.state.llm.processor.tokenizer = None
        toy.state.llm._outputs.tokenizer = None
        refused(await toy.completion(), "prompt")
        refused(await toy.chat(), "messages")
        refused(await toy.http.post("/tokenize", json={"prompt": "a"}), None)
        body = (await toy.completion(prompt=[1, 2], max_tokens=3, return_token_ids=True, logprobs=1)).json()
        assert body["choices"][0]["token_ids"] == list(b"hel") and body["choices"][0]["text"] == ""
        assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in b"hel"]


async def test_special_tokens_show_when_asked() -> None:
    async with toy_server(says("a"), tokenizer=ToyTokenizer(adds_bos=True)) as toy:
        shown = (await toy.chat(skip_special_tokens=False, logprobs=True)).json()["choices"][0]
        assert shown["logprobs"]["content"][-1]["bytes"] == list(b"<eos>")
        hidden = (await toy.chat(logprobs=True)).json()["choices"][0]
        assert hidden["logprobs"]["content"][-1]["bytes"] == []
        echoed = (await toy.completion(prompt="hi", echo=True, logprobs=0)).json()["choices"][0]
        assert echoed["text"] == "hia"
        assert echoed["logprobs"]["tokens"][0] == "<bos>" and echoed["logprobs"]["text_offset"][:3] == [0, 0, 1]


async def test_tokenize_bounds_its_text_before_it_costs_work() -> None:
    async with toy_server(says("a")) as toy:
        fits = await toy.http.post("/tokenize", json={"prompt": "a" * (1 << 20)})
        assert fits.status_code == 200
        assert "1048576" in refused(await toy.http.post("/tokenize", json={"prompt": "a" * ((1 << 20) + 1)}), "prompt")["message"]
        cut = {"model": MODEL, "prompt": "a" * ((1 << 20) + 1), "truncate_prompt_tokens": 5, "max_tokens": 1}
        assert "1048576" in refused(await toy.http.post("/v1/completions", json=cut), "prompt")["message"]
        assert (await toy.http.post("/detokenize", json={"tokens": [97] * (1 << 20)})).json()["prompt"][-3:] == "aaa"
        assert "1048576" in refused(await toy.http.post("/detokenize", json={"tokens": [97] * ((1 << 20) + 1)}), "tokens")["message"]


async def test_logprobs_of_a_batch_are_bounded_together() -> None:
    """Each prompt alone has 2 × 2 entries, all of them 12: they are held until the last prompt is done."""
    engine = EngineConfig(ModelConfig(MODEL, max_logprob_entries=11))
    async with toy_server(says("hello"), engine=engine) as toy:
        for fields, param in (({"prompt_logprobs": 1}, "prompt_logprobs"), ({"echo": True, "logprobs": 1}, "logprobs"), ({"logprobs": 1}, "logprobs")):
            response = await toy.completion(prompt=["hi"] * 3, max_tokens=2, **fields)
            message = refused(response, param)["message"]
            assert "are 12," in message and "limit is 11" in message, message
            assert (await toy.completion(prompt=["hi"] * 2, max_tokens=2, **fields)).status_code == 200
        assert toy.state.num_entries == 0


async def test_prompt_logprobs_of_all_open_requests_are_bounded() -> None:
    engine = EngineConfig(ModelConfig(MODEL, max_logprob_entries=8))
    async with toy_server(says("hello" * 10), engine=engine, step_s=0.02) as toy:
        first = asyncio.create_task(toy.completion(prompt=[1, 2, 3], prompt_logprobs=1, max_tokens=40))
        async with asyncio.timeout(5):
            while not toy.state.num_entries:
                await asyncio.sleep(0)
        assert toy.state.num_entries == 6
        response = await toy.completion(prompt=[1, 2], prompt_logprobs=1, max_tokens=1)
        assert refused(response, None, 429)["code"] == "queue_full" and response.headers["retry-after"] == "1"
        assert (await toy.completion(prompt=[1, 2], max_tokens=1)).status_code == 200
        assert (await first).status_code == 200
        assert (await toy.completion(prompt=[1, 2], prompt_logprobs=1, max_tokens=1)).status_code == 200
        assert toy.state.num_entries == 0 and toy.state.num_prompts == 0


async def test_lists_that_are_too_long_are_refused_before_their_entries_are_read() -> None:
    server = ServerConfig(max_logit_bias=3, max_stop_strings=3, max_bad_words=3)
    async with toy_server(says("hello"), server=server) as toy:
        for name, value in (("logit_bias", {f"no id {i}": 1 for i in range(4)}), ("stop", [1] * 4), ("bad_words", [1] * 4)):
            for send in (toy.completion, toy.chat):
                assert f"{name} has 4 entries; the limit (--max-" in refused(await send(**{name: value}), name)["message"]


async def test_large_answers_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from oarlock.server import answer

    seen = []
    write = answer.encode
    monkeypatch.setattr(answer, "encode", lambda value: seen.append((threading.current_thread(), value)) or write(value))
    monkeypatch.setattr(answer, "THREAD_ENTRIES", 3)
    async with toy_server(says("hello")) as toy:
        for fields in ({"max_tokens": 3}, {"max_tokens": 4}, {"prompt_logprobs": 1, "max_tokens": 1}, {"logprobs": 2, "max_tokens": 2}):
            assert (await toy.completion(**{"logprobs": 0, **fields})).status_code == 200
    threads = [thread for thread, value in seen if "choices" in value]
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False, False]
