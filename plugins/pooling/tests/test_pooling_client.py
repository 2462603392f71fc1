"""OpenAI's own client against a real server that chats and embeds; every vector compared with transformers' own hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from real_server import RealServer, is_bad_request, ok, openai_client
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


def test_scores_of_an_embedding_model_are_cosines(server: RealServer, reference: Any) -> None:
    vectors = [unit(reference(server.tokenize(model="tiny", prompt=text))[-1]) for text in TEXTS]
    answer = ok(server.post("/v1/score", {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS}))
    assert [one["score"] for one in answer["data"]] == pytest.approx([float(vectors[0] @ other) for other in vectors], abs=LIMIT)
    ranked = ok(server.post("/rerank", {"model": "tiny", "query": TEXTS[1], "documents": TEXTS, "top_n": 1}))
    assert [one["index"] for one in ranked["results"]] == [1]


def test_a_classifier_scores_pairs_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    """A checkpoint of the same tokenizer with a head of one label."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1, architectures=["LlamaForSequenceClassification"], pad_token_id=0)
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(config).float().eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "judge")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "judge" / name).write_bytes((folder / name).read_bytes())
    flags = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256", "--served-model-name", "judge", "--kv-cache-memory", "8MiB")
    with RealServer(tmp_path / "judge", *flags, log=tmp_path / "server.log", defaults=()) as server:
        ids = [server.tokenize(model="judge", prompt=TEXTS[1] + text) for text in TEXTS]
        with torch.no_grad():
            logits = [float(model(torch.tensor([one])).logits[0, 0]) for one in ids]
        assert max(logits) - min(logits) > 100 * LIMIT
        for fields, wanted in (({}, [1 / (1 + np.exp(-x)) for x in logits]), ({"use_activation": False}, logits)):
            answer = ok(server.post("/score", {"model": "judge", "queries": TEXTS[1], "documents": TEXTS, **fields}))
            assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=LIMIT)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        ranked = ok(server.post("/v2/rerank", {"model": "judge", "query": TEXTS[1], "documents": TEXTS}))
        assert [one["index"] for one in ranked["results"]] == sorted(range(3), key=lambda n: -logits[n])
        (one,) = ok(server.post("/classify", {"model": "judge", "input": ids[0]}))["data"]
        assert one["label"] == "LABEL_0" and one["probs"] == pytest.approx([1 / (1 + np.exp(-logits[0]))], abs=LIMIT)
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
            assert is_bad_request(server.post(path, {"model": "judge", **body}), "model")
        server.kv_idle()


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions") as caught:
        client.embeddings.create(model="tiny", input="x", dimensions=65)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.embeddings.create(model="tiny", input=[1] * 257)
