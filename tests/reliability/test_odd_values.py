"""Every place of every body, with every odd value in it: answered or refused, never a 500.

The fuzzer finds such places by luck; this walks them.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import oarlock_batches.routes
import oarlock_messages.routes
import oarlock_pooling.routes
import oarlock_responses.routes
import pytest
from corpus import SAMPLING, SCHEMAS, TOOLS
from mutations import _places
from oarlock.config.sections import ServerConfig
from toy_frontend import says
from toy_server import MODEL, Toy, toy_server

pytestmark = pytest.mark.asyncio

OPTIONS = {
    "responses_max_stored": 5, "responses_max_stored_mib": 8, "batches_max_files": 5, "batches_max_mib": 8, "batches_max_lines": 9, "batches_max_batches": 3, "batches_concurrency": 2,
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 10**400, 0.5, "", "\x00\ue000", [], {}, [None], [["x"]], {"": []}, {"type": {}},
)  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "a"}]
TURNS = [{"role": "system", "content": PARTS}, {"role": "user", "content": "b", "name": "n"}, {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r"}, {"role": "tool", "tool_call_id": "c", "content": "d"}]
NAMED = {"type": "function", "function": {"name": "time"}}
USE = {"type": "tool_use", "id": "t", "name": "time", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": PARTS, "is_error": False}
CLAUDE = {
    "model": MODEL, "system": PARTS, "messages": [{"role": "user", "content": [{**PARTS[0], "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
    "tools": [{"name": "time", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}], "tool_choice": {"type": "none"},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "description": "d", "strict": True, "schema": SCHEMAS[0]}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}, "n": 2, "best_of": 2, "logprobs": 1, "temperature": 1, "echo": True}),
    ("/v1/completions", {"model": MODEL, "prompt": [[5, 6], [7]], "stop": ["a"], "stop_token_ids": [1], "bad_words": ["x"], "allowed_token_ids": [5], "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"model": MODEL, "messages": TURNS, "tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": True, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", {"model": MODEL, "messages": TURNS[:2], "response_format": FORMAT, "chat_template_kwargs": {"a": 1}, "include_reasoning": True, "reasoning_effort": "low"}),
    ("/v1/chat/completions", {"model": MODEL, "messages": TURNS[:2], "structured_outputs": {"choice": ["a", "b"], "whitespace_pattern": " ", "backend": "x", "disable_any_whitespace": True}}),
    ("/v1/chat/completions", {"model": MODEL, "messages": TURNS[:2], "structural_tag": {"structures": [{"begin": "<", "schema": {"type": "object"}, "end": ">"}], "triggers": ["<"]}}),
    ("/v1/chat/completions", {"model": MODEL, "messages": TURNS[:2], "guided_choice": ["a"], "guided_json": SCHEMAS[0], "functions": [], "modalities": ["text"], "documents": []}),
    ("/tokenize", {"model": MODEL, "messages": TURNS, "tools": TOOLS, "return_token_strs": True}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True}),
    ("/detokenize", {"model": MODEL, "tokens": [1, 2]}),
    ("/v1/messages", {**CLAUDE, "max_tokens": 4, "stop_sequences": ["a"], "metadata": {"user_id": "u"}, "service_tier": "auto", "temperature": 0.5}),
    ("/v1/messages/count_tokens", CLAUDE),
    ("/v1/responses", {
        "model": MODEL, "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a", "annotations": []}], "id": "i", "status": "s"}], "instructions": "b", "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"], "text": {"format": {"type": "text"}}, "stream_options": {"include_obfuscation": False}, "stream": True, "previous_response_id": "resp_x",
    }),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "pooling": "mean", "normalize": True, "truncate_prompt_tokens": 3, "truncation_side": "left"}),
    ("/v1/embeddings", {"model": MODEL, "messages": TURNS[:2], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}),
    ("/v1/score", {"model": MODEL, "text_1": ["a"], "text_2": ["b", {"text": "c"}], "max_tokens_per_doc": 2, "max_tokens_per_query": 2}),
    ("/v2/rerank", {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True, "priority": 0, "cache_salt": "s"}),
    ("/classify", {"model": MODEL, "input": [[5, 6], [7]]}),
    ("/v1/chat/completions/render", {"model": MODEL, "messages": TURNS, "tools": TOOLS, "stop": ["a"]}),
    ("/v1/completions/render", {"model": MODEL, "prompt": ["a", "b"], "logit_bias": {"5": 1}}),
    ("/abort_requests", {"request_ids": ["a", "b"]}),
    ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}),
)  # fmt: skip


def variants() -> list[tuple[str, dict[str, Any], str]]:
    """(path, body, what is odd about it): one place of one body at a time."""
    found = []
    bodies = [*BODIES, *(("/v1/completions", {"model": MODEL, "prompt": "a", name: 0}) for name in sorted(SAMPLING))]
    for path, body in bodies:
        for at in range(len(_places(body))):
            for value in ODD:
                tree = json.loads(json.dumps(body))
                container, key = _places(tree)[at]
                container[key] = copy.deepcopy(value)
                found.append((path, tree, f"{key!r}: {value!r:.40}"))
    return found


async def post(toy: Toy, path: str, body: Any) -> tuple[int, bytes]:
    """A client library would take as long as the server."""
    told: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    status, pieces = 0, []

    async def receive() -> Any:
        return told.pop() if told else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [(b"content-type", b"application/json")]}
    await toy.app(scope, receive, send)
    return status, b"".join(pieces)


async def test_every_place_of_every_body_takes_or_refuses_every_odd_value() -> None:
    routes = (oarlock_responses.routes.add, oarlock_messages.routes.add, oarlock_batches.routes.add, oarlock_pooling.routes.add)
    server = ServerConfig(tool_call_parser="hermes", enable_auto_tool_choice=True)
    async with toy_server(says("hello"), options=OPTIONS, server=server, routes=routes) as toy:
        wrong = []
        for path, body, what in variants():
            status, text = await post(toy, path, {**body, "max_tokens": 2} if path.endswith("completions") else body)
            if status >= 500 or b'"server_error"' in text or b'"api_error"' in text:
                wrong.append(f"{path} {what}: {status} {text[-200:]!r}")
        assert not wrong
        assert toy.state.num_prompts == 0 and toy.state.bodies.used == 0
