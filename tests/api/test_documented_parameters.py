"""Every text parameter that OpenAI and vLLM 0.33 document for the two generating routes takes effect, or is a 400 that names it.

The names are written out here, from OpenAI's own client (openai 3.57, `types.completion_create_params` and `types.chat.completion_create_params`)
and from vLLM's `CompletionRequest` and `ChatCompletionRequest`; older names are those of vLLM 0.5. Whether one takes effect is seen from outside:
in the answer of a scripted server, in what its engine is asked, or in what a real model says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from real_server import RealServer
from test_fill_in import FORMS, FillTokenizer
from toy_frontend import BOS, END, EOS, ToyTokenizer
from toy_server import MODEL, Toy, events, refused, strict, toy_server

CMP, CHT = "/v1/completions", "/v1/chat/completions"
OPENAI = {
    CMP: "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options suffix temperature top_p user",
    CHT: "messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls "
    "prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream "
    "stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options",
}
VLLM_BOTH = (
    "use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo add_special_tokens response_format "
    "structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval "
    "best_of early_stopping guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern"
)
VLLM = {
    CMP: f"{VLLM_BOTH} prompt_embeds",
    CHT: f"{VLLM_BOTH} include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text",
}
DOCUMENTED = {path: sorted({*OPENAI[path].split(), *VLLM[path].split()}) for path in (CMP, CHT)}

# Of no effect on what is generated anywhere: who asks, what is kept, how it is billed. Accepted, and the engine is asked the same.
NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id"}
# Either value holds by itself: a text is its tokens' own bytes, and nothing is ever put between them.
HOLDS_ANYWAY = {"spaces_between_special_tokens"}
# Name -> a value that asks for it.
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"}, "function_call": {"name": "f"}, "functions": [{"name": "f"}], "modalities": ["text", "audio"], "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h", "verbosity": "low", "web_search_options": {},
    "watermarking": True, "logprob_token_ids": [1], "prompt_embeds": "AAAA", "routed_experts_prompt_start": 1, "return_token_offsets": True, "return_mm_kwargs": False,
    "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "repetition_detection": {"max_pattern_size": 2}, "thinking_token_budget": 5,
    "stream_interval": 2, "documents": [{"title": "t", "text": "x"}], "media_io_kwargs": {"image": {}}, "mm_processor_kwargs": {"a": 1}, "return_prompt_text": True,
}  # fmt: skip
# What is asked of the engine: name -> value sent. The engine's own name and value are the same but where a third says otherwise.
ASKED: dict[str, tuple[dict[str, Any], str, Any]] = {
    "frequency_penalty": ({}, "frequency_penalty", 0.5), "presence_penalty": ({}, "presence_penalty", -0.5), "repetition_penalty": ({}, "repetition_penalty", 1.5),
    "temperature": ({}, "temperature", 0.25), "top_p": ({}, "top_p", 0.5), "top_k": ({}, "top_k", 3), "min_p": ({}, "min_p", 0.1), "seed": ({}, "seed", 7),
    "n": ({}, "n", 2), "best_of": ({}, "best_of", 2), "min_tokens": ({}, "min_tokens", 2), "ignore_eos": ({}, "ignore_eos", True), "bad_words": ({}, "bad_words", ("x",)),
    "allowed_token_ids": ({}, "allowed_token_ids", (65,)), "stop_token_ids": ({}, "stop_token_ids", (66,)), "logit_bias": ({}, "logit_bias", ((65, 5.0),)),
    "use_beam_search": ({"n": 2}, "use_beam_search", True), "length_penalty": ({"n": 2, "use_beam_search": True}, "length_penalty", 0.5),
    "early_stopping": ({"n": 2, "use_beam_search": True}, "early_stopping", "never"), "prompt_logprobs": ({}, "prompt_logprobs", 1),
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Shapes of an answer: name -> (value, what goes with it, what it is in `structured_outputs` of the engine's request).
SHAPES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "response_format": ({"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, {}, "json"), "structured_outputs": ({"regex": "a+"}, {}, "regex"),
    "guided_json": (SCHEMA, {}, "json"), "guided_regex": ("a+", {}, "regex"), "guided_choice": (["a", "b"], {}, "choice"), "guided_grammar": ('root ::= "a"', {}, "grammar"),
    "guided_decoding_backend": ("made-up", {"guided_regex": "a+"}, "backend"), "guided_whitespace_pattern": (" ", {"guided_json": SCHEMA}, "whitespace_pattern"),
}  # fmt: skip
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if not (loop.last and not add_generation_prompt) %};"
    "{% endif %}{% endfor %}{{ reasoning_effort }}{{ mood }}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = '<think>Hm.</think>So.<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
SETTINGS: dict[str, Any] = {"max_model_len": 4096, "structured_outputs": (("made-up", ""),), "chat_template": TEMPLATE, "tokenizer": ToyTokenizer(adds_bos=True)}


def engine_side(toy: Toy) -> tuple[Any, ...]:
    request = toy.engine.submitted[-1]
    return request.prompt_token_ids, request.params, request.eos_token_ids, request.priority, request.cache_salt


class Asking:
    """One server, and its answers to requests that differ in some fields."""

    def __init__(self, toy: Toy, path: str) -> None:
        self.toy, self.path = toy, path

    async def post(self, **fields: Any) -> Any:
        base = {"prompt": "hi"} if self.path == CMP else {"messages": [{"role": "user", "content": "hi"}]}
        return await self.toy.http.post(self.path, content=json.dumps({"model": MODEL, **base, **fields}), headers={"Content-Type": "application/json"})

    async def choice(self, **fields: Any) -> dict[str, Any]:
        response = await self.post(**fields)
        assert response.status_code == 200, response.text
        return strict(response.text)["choices"][0]

    async def text(self, **fields: Any) -> str:
        found = await self.choice(**fields)
        return found["text"] if self.path == CMP else found["message"]["content"]

    async def prompt(self, **fields: Any) -> str:
        await self.choice(**fields)
        return "".join("<bos>" if i == BOS else chr(i) for i in self.toy.engine.submitted[-1].prompt_token_ids)


Seen = Callable[[Asking], Any]


async def _stream(at: Asking) -> bool:
    return events(await at.post(stream=True))[-1] == "[DONE]"


async def _usage(at: Asking) -> bool:
    return ["usage" in event and bool(event["usage"]) for event in events(await at.post(stream=True, stream_options={"include_usage": True}))[:-1]][-1]


async def _logprobs(at: Asking) -> bool:
    plain = (await at.choice())["logprobs"]
    asked = (await at.choice(logprobs=2 if at.path == CMP else True))["logprobs"]
    return plain is None and len(asked["token_logprobs" if at.path == CMP else "content"]) > 3


async def _echo(at: Asking) -> bool:
    if at.path == CMP:
        return await at.text(echo=True) == "hi" + await at.text()
    last = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so "}], "add_generation_prompt": False}
    return await at.text(**last, echo=True) == "so " + await at.text(**last)


async def _stop(at: Asking) -> bool:
    found = await at.choice(stop="l")
    return found["finish_reason"] == "stop" and found["stop_reason"] == "l" and await at.text(stop="l") == "he"


async def _format_ids(at: Asking) -> bool:
    found = (await at.choice(logprobs=1 if at.path == CMP else True, return_tokens_as_token_ids=True))["logprobs"]
    tokens = found["tokens"] if at.path == CMP else [item["token"] for item in found["content"]]
    return tokens[0] == "token_id:104"


async def _request_id(at: Asking) -> bool:
    return strict((await at.post(request_id="mine")).text)["id"].endswith("-mine")


async def _salt(at: Asking) -> bool:
    await at.choice(cache_salt="s")
    return at.toy.engine.submitted[-1].cache_salt == "s"


async def _model(at: Asking) -> bool:
    return (await at.post(model="other")).status_code == 404


async def _continued(at: Asking) -> bool:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    return (await at.prompt(messages=messages, continue_final_message=True, add_generation_prompt=False)).endswith("[assistant]so")


async def _max_tokens(at: Asking, name: str = "max_tokens") -> bool:
    found = await at.choice(**{name: 2})
    return found["finish_reason"] == "length" and await at.text(**{name: 2}) == "he"


# What shows in the answer, or in the prompt that the engine gets.
SHOWN: dict[str, Seen] = {
    "model": _model, "max_tokens": _max_tokens, "stream": _stream, "stream_options": _usage, "logprobs": _logprobs, "echo": _echo, "stop": _stop, "request_id": _request_id,
    "cache_salt": _salt, "return_tokens_as_token_ids": _format_ids, "continue_final_message": _continued,
}  # fmt: skip


async def effect(at: Asking, name: str) -> bool:
    """Whether `name` was seen to change something as it should."""
    if name in SHOWN:
        return bool(await SHOWN[name](at))
    if name in ASKED:
        beside, attribute, value = ASKED[name]
        before = await _params(at, **beside)
        sent = {str(token): bias for token, bias in value} if name == "logit_bias" else value
        after = await _params(at, **beside, **{name: sent})
        return getattr(before, attribute) != value == getattr(after, attribute)
    if name in SHAPES:
        value, beside, attribute = SHAPES[name]
        before = (await _params(at, **beside)).structured_outputs
        after = (await _params(at, **beside, **{name: value})).structured_outputs
        return getattr(after, attribute) not in (None, getattr(before, attribute, None))
    match name:
        case "prompt" | "messages":
            other = {"prompt": "other"} if name == "prompt" else {"messages": [{"role": "user", "content": "other"}]}
            return "hi" in await at.prompt() and "other" in await at.prompt(**other)
        case "max_completion_tokens":
            return await _max_tokens(at, name)
        case "skip_special_tokens":
            return await at.text() == "hello" and await at.text(skip_special_tokens=False) == "hello<end>"
        case "include_stop_str_in_output":
            return await at.text(stop="l", include_stop_str_in_output=True) == "hel"
        case "truncate_prompt_tokens":
            whole = await at.prompt()
            return await at.prompt(truncate_prompt_tokens=2) == whole.removeprefix("<bos>")[-2:]
        case "truncation_side":
            whole = await at.prompt(add_special_tokens=False)
            return await at.prompt(add_special_tokens=False, truncate_prompt_tokens=1, truncation_side="right") == whole[:1]
        case "add_special_tokens":
            default = at.path == CMP
            return (await at.prompt()).startswith("<bos>") is default and (await at.prompt(add_special_tokens=not default)).startswith("<bos>") is not default
        case "return_token_ids":
            return "token_ids" not in await at.choice() and (await at.choice(return_token_ids=True))["token_ids"][:2] == [104, 101]
        case "top_logprobs":
            found = await at.choice(logprobs=True, top_logprobs=2)
            return len(found["logprobs"]["content"][0]["top_logprobs"]) == 2
        case "add_generation_prompt":
            return (await at.prompt()).endswith("[assistant]") and not (await at.prompt(add_generation_prompt=False)).endswith("[assistant]")
        case "chat_template_kwargs":
            return "sad" in await at.prompt(chat_template_kwargs={"mood": "sad"})
        case "reasoning_effort":
            return "low" in await at.prompt(reasoning_effort="low")
    raise AssertionError(f"{name} is documented, and this test does not know what to see of it")


async def _params(at: Asking, **fields: Any) -> Any:
    response = await at.post(**fields)
    assert response.status_code == 200, response.text
    return at.toy.engine.submitted[-1].params


ALONE = {"suffix", "priority", "chat_template", "tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}  # tests below: they need a server of another kind


@pytest.mark.asyncio
@pytest.mark.parametrize("path", DOCUMENTED)
async def test_a_documented_parameter_takes_effect(path: str) -> None:
    names = [name for name in DOCUMENTED[path] if name not in {*REFUSED, *NO_EFFECT, *HOLDS_ANYWAY, *ALONE}]
    assert len(names) > 40
    async with toy_server(lambda request, index: [*b"hello", END, EOS], **SETTINGS) as toy:
        for name in names:
            assert await effect(Asking(toy, path), name), name


@pytest.mark.asyncio
@pytest.mark.parametrize("allow_unknown_fields", [False, True])
@pytest.mark.parametrize("path", DOCUMENTED)
async def test_a_documented_parameter_that_cannot_be_honoured_is_named(path: str, allow_unknown_fields: bool) -> None:
    """Also where fields that nobody knows are ignored: these are known."""
    async with toy_server(server=ServerConfig(allow_unknown_fields=allow_unknown_fields)) as toy:
        for name in REFUSED.keys() & set(DOCUMENTED[path]):
            error = refused(await Asking(toy, path).post(**{name: REFUSED[name]}), name)
            assert error["code"] == "unsupported_field" and error["message"], name
        assert not toy.engine.submitted


@pytest.mark.asyncio
@pytest.mark.parametrize("path", DOCUMENTED)
async def test_what_says_nothing_of_the_answer_changes_nothing(path: str) -> None:
    async with toy_server(**SETTINGS) as toy:
        at = Asking(toy, path)
        text, asked = await at.text(), engine_side(toy)
        for name in sorted(NO_EFFECT):
            value = {"a": "b"} if name == "metadata" else True if name == "store" else "x"
            assert await at.text(**{name: value}) == text and engine_side(toy) == asked, name
        for value in (True, False):
            assert await at.text(spaces_between_special_tokens=value) == text


@pytest.mark.asyncio
async def test_suffix_priority_and_templates_of_requests() -> None:
    async with toy_server(tokenizer=FillTokenizer(FORMS["qwen"][0])) as toy:
        at = Asking(toy, CMP)
        await at.choice(suffix="end")
        assert bytes(i for i in toy.engine.submitted[-1].prompt_token_ids if i < 256) == b"hiend"
        assert len(toy.engine.submitted[-1].prompt_token_ids) == 8
    engine = EngineConfig(ModelConfig(MODEL), scheduler=SchedulerConfig(policy="priority"))
    async with toy_server(engine=engine, server=ServerConfig(allow_request_chat_template=True)) as toy:
        for path in DOCUMENTED:
            await Asking(toy, path).choice(priority=-3)
            assert toy.engine.submitted[-1].priority == -3
        assert await Asking(toy, CHT).prompt(chat_template="T{{ messages[0].content }}") == "Thi"
    async with toy_server() as toy:
        refused(await Asking(toy, CHT).post(chat_template="x"), "chat_template")
        for path in DOCUMENTED:
            refused(await Asking(toy, path).post(priority=1), "priority")


@pytest.mark.asyncio
async def test_tools_and_reasoning() -> None:
    async with toy_server(lambda request, index: [*CALLS.encode(), EOS], parsers=("hermes", "qwen3"), **SETTINGS) as toy:
        at = Asking(toy, CHT)
        plain, called = (await at.choice())["message"], (await at.choice(tools=[TOOL]))["message"]
        assert "tool_calls" not in plain and len(called["tool_calls"]) == 2
        assert "<f>" in await at.prompt(tools=[TOOL])
        assert "tool_calls" not in (await at.choice(tools=[TOOL], tool_choice="none"))["message"]
        assert len((await at.choice(tools=[TOOL], parallel_tool_calls=False))["message"]["tool_calls"]) == 1
        assert called["reasoning_content"] == "Hm." and "reasoning_content" not in (await at.choice(include_reasoning=False))["message"]
        assert await _params(at, tools=[TOOL], tool_choice="required") != await _params(at, tools=[TOOL])


def test_every_documented_parameter_is_in_one_list() -> None:
    """A name that is added above and not looked at anywhere fails here."""
    for path, names in DOCUMENTED.items():
        for name in names:
            places = [name in group for group in (REFUSED, NO_EFFECT, HOLDS_ANYWAY, ALONE)]
            assert sum(places) <= 1, (path, name)
    assert REFUSED.keys() | NO_EFFECT | HOLDS_ANYWAY | ALONE <= {*DOCUMENTED[CMP], *DOCUMENTED[CHT]}


def ids(server: RealServer, **fields: Any) -> list[int]:
    return server.cmp(return_token_ids=True, **{"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 1, **fields})["choices"][0]["token_ids"]


def test_sampling_parameters_change_what_a_real_model_says(server: RealServer) -> None:
    """What the scripted engine is asked is what a sampler does."""
    greedy, sampled = ids(server, temperature=0), ids(server)
    first = greedy[0]
    assert greedy == ids(server, temperature=0) and sampled == ids(server) and greedy != sampled
    assert ids(server, seed=2) != sampled
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert ids(server, **fields) == greedy, fields
    assert ids(server, temperature=2.0) != sampled
    again = {"logit_bias": {str(first): 4.0}, "temperature": 0}
    for fields in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
        assert ids(server, **again, **fields) != ids(server, **again), fields
    assert set(ids(server, logit_bias={str(first): 100})) == {first} == set(ids(server, allowed_token_ids=[first]))
    word = server.cmp(temperature=0, max_tokens=1)["choices"][0]["text"]
    assert ids(server, temperature=0, bad_words=[word])[0] != first
    assert ids(server, temperature=0, stop_token_ids=[greedy[3]]) == greedy[: greedy.index(greedy[3]) + 1]
    ends = {"logit_bias": {"2": 100}, "ignore_eos": False}
    assert ids(server, **ends) == [2] and len(ids(server, **ends, min_tokens=3)) > 3 and len(ids(server, **{**ends, "ignore_eos": True})) == 12
    best = server.cmp(max_tokens=6, seed=1, n=1, best_of=4, logprobs=0, ignore_eos=True)["choices"][0]["logprobs"]["token_logprobs"]
    all_four = server.cmp(max_tokens=6, seed=1, n=4, logprobs=0, ignore_eos=True)["choices"]
    assert sum(best) == pytest.approx(max(sum(choice["logprobs"]["token_logprobs"]) for choice in all_four), abs=1e-4) and len(all_four) == 4
    beams = server.cmp(max_tokens=6, n=2, use_beam_search=True, ignore_eos=True)["choices"]
    assert len({choice["text"] for choice in beams}) == 2
