"""OpenAI's own client against a real server that chats and embeds; every vector compared with transformers' own hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from real_server import RealServer, openai_client
from tiny_model import make_tiny_model

KEY = "pooling-key"
TEXTS = ["The capital of France is Paris.", "red green blue", "Two plus two, and so on, until the sentence is long enough for more than one chunk of it."]
LIMIT = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("sim-eager", marks=pytest.mark.full), pytest.param("sim-static", marks=pytest.mark.full)]
)
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--device", request.param, "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256", "--max-num-batched-tokens", "32")
    flags += ("--served-model-name", "tiny", "--api-key", KEY, "--hf-overrides", '{"is_matryoshka": true}', "--kv-cache-memory", "8MiB")
    with RealServer(folder, *flags, log=tmp_path_factory.mktemp("log") / "server.log", defaults=()) as started:
        started.http.headers["Authorization"] = f"Bearer {KEY}"
        yield started


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai_client(server, KEY) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """ids -> transformers' last hidden states [tokens, hidden size]."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()

    return hidden


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_last_and_mean_are_transformers_own_and_the_same_server_chats(client: openai.OpenAI, server: RealServer, reference: Any) -> None:
    ids = [server.tokenize(model="tiny", prompt=text) for text in TEXTS]
    assert max(map(len, ids)) > 32, "one of them takes several steps"
    for pooling in ("last", "mean"):
        wanted = [(states[-1] if pooling == "last" else states.mean(0)) for states in map(reference, ids)]
        for _ in range(2):  # the second time from the prefix cache, where that may be
            answer = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling, "normalize": False})
            assert max(np.abs(np.array(one.embedding) - want).max() for one, want in zip(answer.data, wanted, strict=True)) < LIMIT
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        by_default = client.embeddings.create(model="tiny", input=ids, encoding_format="float", extra_body={"pooling": pooling})
        assert max(np.abs(np.array(one.embedding) - unit(want)).max() for one, want in zip(by_default.data, wanted, strict=True)) < LIMIT
    cut = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8).data[0].embedding
    assert np.abs(np.array(cut) - unit(reference(ids[0])[-1][:8])).max() < LIMIT
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0)
    assert chat.choices[0].message.content and chat.usage is not None and chat.usage.completion_tokens == 5
    assert server.metrics().get("oarlock_compiles_after_warmup", 0) == 0


def test_chat_and_embeddings_at_once(client: openai.OpenAI, server: RealServer, reference: Any) -> None:
    with client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=60, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(stream)
        answer = client.embeddings.create(model="tiny", input=TEXTS[0])
        assert sum(1 for _ in stream) > 50
    want = unit(reference(server.tokenize(model="tiny", prompt=TEXTS[0]))[-1])
    assert np.abs(np.array(answer.data[0].embedding) - want).max() < LIMIT


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions") as caught:
        client.embeddings.create(model="tiny", input="x", dimensions=65)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.embeddings.create(model="tiny", input=[1] * 257)
