"""Anthropic's own Python client against a real server over the null device: sync, async, streamed, and what goes wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import anthropic
import pytest
from real_server import RealServer, null_server, wait_until
from tiny_model import make_tiny_model

KEY = "messages-key"
MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    with null_server(folder, KEY, log=tmp_path_factory.mktemp("log") / "server.log") as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key=KEY, base_url=server.base_url, max_retries=0) as made:
        yield made
    server.kv_idle()


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content)


def test_create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="tiny", max_tokens=12, system="Be brief.", messages=MESSAGES)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens == 12 and text_of(message)
    assert message._request_id and message.id == f"msg_{message._request_id}"


def test_what_is_streamed_is_what_is_answered_whole(client: anthropic.Anthropic) -> None:
    for fields in ({}, {"stop_sequences": ["e"]}, {"messages": [*MESSAGES, {"role": "assistant", "content": "Red"}]}):
        given = {"model": "tiny", "max_tokens": 20, "messages": MESSAGES, **fields}
        whole = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == text_of(whole) == text_of(final)
        assert final.usage == whole.usage and len(final.content) == len(whole.content)
        assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)


def test_raw_events_come_in_order(client: anthropic.Anthropic) -> None:
    types = [event.type for event in client.messages.create(model="tiny", max_tokens=3, messages=MESSAGES, stream=True)]
    assert types[:2] == ["message_start", "content_block_start"] and types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", system="Be brief.", messages=MESSAGES).input_tokens
    assert counted == client.messages.create(model="tiny", max_tokens=1, system="Be brief.", messages=MESSAGES).usage.input_tokens


@pytest.mark.asyncio
async def test_async(server: RealServer) -> None:
    async with anthropic.AsyncAnthropic(api_key=KEY, base_url=server.base_url, max_retries=0) as client:
        whole = await client.messages.create(model="tiny", max_tokens=8, messages=MESSAGES)
        async with client.messages.stream(model="tiny", max_tokens=8, messages=MESSAGES) as stream:
            text = "".join([part async for part in stream.text_stream])
        assert text == text_of(whole)


def test_bearer_and_x_api_key_and_neither(server: RealServer) -> None:
    given = {"model": "tiny", "max_tokens": 1, "messages": MESSAGES}
    with anthropic.Anthropic(auth_token=KEY, api_key=None, base_url=server.base_url, max_retries=0) as bearer:
        assert bearer.messages.create(**given).usage.output_tokens == 1
    with anthropic.Anthropic(api_key="wrong", base_url=server.base_url, max_retries=0) as wrong, pytest.raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(**given)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    response = server.http.post("/v1/messages", json=given, headers={"Authorization": "", "X-API-Key": ""})
    assert response.status_code == 401 and response.json()["type"] == "error"


def test_errors_are_the_client_s_own_kinds(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(model="tiny", max_tokens=1, messages=MESSAGES, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(model="tiny", max_tokens=4000, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="context"), client.messages.stream(model="tiny", max_tokens=4000, messages=MESSAGES):
        pass


def test_a_client_that_hangs_up_ends_its_request(server: RealServer) -> None:
    before = server.metrics()["oarlock_requests_total"]
    body = b'{"model": "tiny", "max_tokens": 2000, "stream": true, "messages": [{"role": "user", "content": "x"}]}'
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for read in (False, True):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(head.encode() + body)
            seen = b""
            while read and b"content_block_delta" not in seen:
                piece = sock.recv(1 << 16)
                assert piece, seen
                seen += piece
    server.kv_idle()
    wait_until(lambda: server.metrics()["oarlock_requests_total"] == before + 2, 5.0)


def test_requests_count_in_the_metrics(client: anthropic.Anthropic, server: RealServer) -> None:
    before = server.metrics()
    usage = client.messages.create(model="tiny", max_tokens=5, messages=MESSAGES).usage
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="tiny", max_tokens=5, messages=[])
    after = server.metrics()
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == usage.input_tokens
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == usage.output_tokens
    assert after["oarlock_requests_total"] - before["oarlock_requests_total"] == 2


def test_the_routes_are_in_the_schema(server: RealServer) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    fields = paths["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert fields["required"] == ["model", "messages", "max_tokens"] and "/v1/messages/count_tokens" in paths
