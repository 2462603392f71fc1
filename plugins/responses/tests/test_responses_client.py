"""OpenAI's own Python client against a real server over the null device: create, stream, retrieve, cancel, delete."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import openai
import pytest
from real_server import RealServer, null_server, openai_client, wait_until
from tiny_model import make_tiny_model

KEY = "responses-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
    with null_server(folder, KEY, "--responses-max-stored", "8", log=tmp_path_factory.mktemp("log") / "server.log") as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai_client(server, KEY) as made:
        yield made


def test_create_retrieve_delete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="Name three colours.", instructions="Be brief.", max_output_tokens=12)
    assert made.status == "incomplete" and made.output_text and made.usage is not None and made.usage.output_tokens == 12
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(made.id)


def test_the_stream_helper_ends_with_what_create_answers(client: openai.OpenAI) -> None:
    given = {"model": "tiny", "input": [{"role": "user", "content": "Name three colours."}], "max_output_tokens": 20}
    whole = client.responses.create(**given)
    deltas = []
    with client.responses.stream(**given) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
                assert event.snapshot == "".join(deltas)
            elif event.type == "response.incomplete":
                final = event.response
    assert "".join(deltas) == whole.output_text == final.output_text
    assert final.usage is not None and whole.usage is not None and final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="One.", max_output_tokens=4)
    second = client.responses.create(model="tiny", input="Two.", max_output_tokens=4, previous_response_id=first.id)
    by_hand = client.responses.create(
        model="tiny", max_output_tokens=4, store=False,
        input=[{"role": "user", "content": "One."}, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Two."}],
    )  # fmt: skip
    assert second.output_text == by_hand.output_text and second.usage.input_tokens == by_hand.usage.input_tokens  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="--responses-max-stored") as caught:
        client.responses.create(model="tiny", input="Two.", previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id" and caught.value.code == "previous_response_not_found"


def test_background_and_cancel(client: openai.OpenAI, server: RealServer) -> None:
    made = client.responses.create(model="tiny", input="x", max_output_tokens=1500, background=True)
    if made.status == "in_progress":
        made = client.responses.cancel(made.id)
    assert made.status in ("cancelled", "incomplete", "completed")
    made = client.responses.create(model="tiny", input="x", max_output_tokens=5, background=True)
    deadline = time.monotonic() + 10
    while made.status == "in_progress":
        assert time.monotonic() < deadline
        made = client.responses.retrieve(made.id)
    assert made.output_text == client.responses.create(model="tiny", input="x", max_output_tokens=5).output_text


@pytest.mark.asyncio
async def test_async(server: RealServer) -> None:
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.base_url}/v1", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input="hi", max_output_tokens=8)
        parts = [event.delta async for event in await client.responses.create(model="tiny", input="hi", max_output_tokens=8, stream=True) if event.type == "response.output_text.delta"]
        assert "".join(parts) == whole.output_text


def test_wrong_key_and_model_and_fields(client: openai.OpenAI, server: RealServer) -> None:
    with openai.OpenAI(api_key="wrong", base_url=f"{server.base_url}/v1", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError):
            wrong.responses.create(model="tiny", input="hi")
        with pytest.raises(openai.AuthenticationError):
            wrong.responses.retrieve("resp_x")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.responses.create(model="tiny", input="hi", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model="tiny", input="hi", max_output_tokens=10**6)


def test_a_client_that_hangs_up_ends_its_request(server: RealServer) -> None:
    before = server.metrics()["oarlock_requests_total"]
    body = b'{"model": "tiny", "max_output_tokens": 2000, "stream": true, "input": "x"}'
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + body)
        seen = b""
        while b"output_text.delta" not in seen:
            piece = sock.recv(1 << 16)
            assert piece, seen
            seen += piece
    server.kv_idle()
    wait_until(lambda: server.metrics()["oarlock_requests_total"] == before + 1, 5.0)
