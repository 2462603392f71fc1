"""Vectors of prompts against transformers' own, however the prompts are cut, cached, preempted or mixed with generation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))  # tiny_model

from checkpoints import FAMILIES, Recipe, Tiny
from oarlock import LLM, PoolingParams, SamplingParams
from oarlock.errors import InvalidParameter, ModelError
from tiny_model import make_tokenizer

LIMIT = 1e-4
DEVICES = ("cpu", "sim-eager", "sim-static")


def states(tiny: Tiny, prompt: list[int]) -> np.ndarray:
    """transformers' last hidden states, [tokens, size]."""
    import torch

    model = tiny._reference()
    with torch.no_grad():
        return model.base_model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()


def wanted(tiny: Tiny, prompt: list[int], pooling: str) -> np.ndarray:
    found = states(tiny, prompt)
    return {"last": found[-1], "mean": found.mean(0), "cls": found[0]}[pooling]


def engine(tiny: Tiny, **options: Any) -> LLM:
    return LLM(str(tiny.path), **{"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 128, **options})


def raw(pooling: str, **fields: Any) -> PoolingParams:
    return PoolingParams(pooling=pooling, use_activation=False, **fields)  # type: ignore[arg-type]


def assert_close(got: Any, want: np.ndarray) -> None:
    assert len(got) == len(want) and np.abs(np.array(got) - want).max() < LIMIT


@pytest.mark.parametrize("device", DEVICES)
def test_every_pooling_on_every_device(checkpoint: Callable[[str], Tiny], device: str) -> None:
    """Chunks of 24 tokens beside each other; the second time the last token's vector comes through the prefix cache, no other."""
    tiny = checkpoint("qwen3")
    prompts = tiny.prompts(1, 5, 40, 24, 64)
    with engine(tiny, device=device, max_num_batched_tokens=24) as llm:
        for pooling in ("last", "mean", "cls"):
            for again in (False, True):
                results = llm.embed([{"prompt_token_ids": p} for p in prompts], pooling_params=raw(pooling), use_tqdm=False)
                for prompt, result in zip(prompts, results, strict=True):
                    assert_close(result.outputs.embedding, wanted(tiny, prompt, pooling))
                    assert (result.num_cached_tokens > 0) is (pooling == "last" and again and len(prompt) > 16)


@pytest.mark.parametrize("budget", [4, 7, 16, 128])
def test_a_mean_is_the_same_in_chunks_of_any_size(checkpoint: Callable[[str], Tiny], budget: int) -> None:
    tiny = checkpoint("llama")
    prompts = tiny.prompts(37, 16, 3)
    with engine(tiny, max_num_batched_tokens=budget) as llm:
        for prompt, result in zip(prompts, llm.embed(prompts, pooling_params=raw("mean"), use_tqdm=False), strict=True):
            assert_close(result.outputs.embedding, wanted(tiny, prompt, "mean"))


@pytest.mark.parametrize("name", ["opt-350m", "gpt2", "gemma2", "granite"])
def test_families_whose_last_steps_differ(checkpoint: Callable[[str], Tiny], name: str) -> None:
    """A projection after the layers, a layer norm, norms with an offset, transformers' own code."""
    tiny = checkpoint(name)
    (prompt,) = tiny.prompts(20)
    with engine(tiny) as llm:
        for pooling in ("last", "mean"):
            (result,) = llm.embed([prompt], pooling_params=raw(pooling), use_tqdm=False)
            assert_close(result.outputs.embedding, wanted(tiny, prompt, pooling))


def test_beside_generation_under_preemption(checkpoint: Callable[[str], Tiny]) -> None:
    """Twelve blocks for four requests of up to four: whoever is preempted begins its sum anew, with swap space or without."""
    tiny = checkpoint("llama")
    prompts = tiny.prompts(50, 33, 61, 20, 45, 58)
    for more in ({}, {"swap_space": "1MiB", "preemption_mode": "swap"}):
        with engine(tiny, num_blocks_override=12, block_size=16, max_num_batched_tokens=16, **more) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
            params = [raw("mean"), greedy, raw("last"), greedy, greedy, raw("mean")]
            results = llm._run(llm._prepare(prompts, params, None), False)
            preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
            assert preempted > 0
            for prompt, given, result in zip(prompts, params, results, strict=True):
                if isinstance(given, SamplingParams):
                    tiny.check(prompt, list(result.outputs[0].token_ids))
                else:
                    assert_close(np.frombuffer(result.pooled, "<f4"), wanted(tiny, prompt, str(given.pooling)))
            assert llm._engine.inbox.stats.num_used_blocks == 0


def bare(checkpoint: Callable[[str], Tiny], folder: Path, steps: list[dict[str, str]], pooling: dict[str, Any], **config: Any) -> Tiny:
    """A checkpoint as sentence-transformers writes it: tensors without `model.`, no head, what it does after the transformer in files beside it."""
    import torch
    from safetensors.torch import load_file, save_file

    tiny = checkpoint("qwen3")
    folder.mkdir()
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(tiny.path / "model.safetensors").items() if name != "lm_head.weight"}
    save_file({name: torch.clone(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**json.loads((tiny.path / "config.json").read_text()), **config}))
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return Tiny(tiny.name, folder, tiny.recipe, _model=tiny._reference())


def step(kind: str, path: str = "") -> dict[str, str]:
    return {"idx": "0", "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def test_what_sentence_transformers_wrote_is_done(checkpoint: Callable[[str], Tiny], tmp_path: Path) -> None:
    steps, mean = [step("Transformer"), step("Pooling", "1_Pooling")], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (prompt,) = checkpoint("qwen3").prompts(21)
    for at, (name, more, architecture) in enumerate((("mean", [], "Qwen3Model"), ("last", [step("Normalize", "2_Normalize")], "Qwen3Model"))):
        pooling = mean if name == "mean" else {"pooling_mode_lasttoken": True}
        tiny = bare(checkpoint, tmp_path / str(at), steps + more, pooling, architectures=[architecture])
        want = wanted(tiny, prompt, name)
        with engine(tiny) as llm:
            (result,) = llm.embed([prompt], use_tqdm=False)
            assert_close(result.outputs.embedding, want / np.linalg.norm(want) if more else want)
            with pytest.raises(InvalidParameter, match="Qwen3Model"):
                llm.generate(prompt_token_ids=[prompt], use_tqdm=False)
    odd = bare(checkpoint, tmp_path / "odd", [*steps, step("Dense", "2_Dense")], mean, tie_word_embeddings=True)
    with engine(odd) as llm:
        with pytest.raises(InvalidParameter, match="Dense"):
            llm.embed([prompt], use_tqdm=False)
        assert llm.generate(prompt_token_ids=[prompt], use_tqdm=False)[0].outputs[0].token_ids, "it has tied embeddings and so a head"


def classifier(folder: Path, name: str, base: str, labels: int, **config: Any) -> Tiny:
    recipe = FAMILIES[base]
    return Tiny.make(name, folder, Recipe(name, recipe.config, {**recipe.values, "num_labels": labels, **config}, gain=recipe.gain, scales=recipe.scales))


@pytest.mark.parametrize(
    ("name", "base"),
    [("Qwen3ForSequenceClassification", "qwen3"), ("Qwen2ForSequenceClassification", "qwen2"), ("LlamaForSequenceClassification", "llama"), ("GPT2ForSequenceClassification", "gpt2")],
)  # fmt: skip
def test_classifiers_give_transformers_own_logits(tmp_path: Path, name: str, base: str) -> None:
    import torch

    tiny = classifier(tmp_path / "three", name, base, 3)
    prompts = tiny.prompts(9, 30)
    with torch.no_grad():
        logits = [tiny._reference()(torch.tensor([p])).logits[0].double().numpy() for p in prompts]
    with engine(tiny, max_num_batched_tokens=16) as llm:
        for prompt, want, plain, result in zip(
            prompts, logits, llm.classify(prompts, pooling_params=PoolingParams(use_activation=False), use_tqdm=False), llm.classify(prompts, use_tqdm=False), strict=True
        ):
            assert_close(plain.outputs.probs, want)
            assert_close(result.outputs.probs, np.exp(want) / np.exp(want).sum())
            assert result.prompt_token_ids == prompt
        for call, wrong in ((lambda: llm.embed(prompts), "classifier"), (lambda: llm.generate(prompt_token_ids=prompts), "no text"), (lambda: llm.score("a", "b"), "3 classes")):
            with pytest.raises(InvalidParameter, match=wrong):
                call()


@pytest.mark.parametrize("device", ["cpu", "sim-static"])
def test_one_label_is_a_score(tmp_path: Path, device: str) -> None:
    """Two texts as one prompt, by a template where there is one; probabilities by the sigmoid."""
    import torch

    tiny = classifier(tmp_path / "one", "Qwen2ForSequenceClassification", "qwen2", 1, vocab_size=448)
    tokenizer = make_tokenizer()
    tokenizer.save(str(tiny.path / "tokenizer.json"))
    (tiny.path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with engine(tiny, device=device, skip_tokenizer_init=False) as llm:
        for given, texts in ((None, ["red green", "red blue"]), (template, ["query:red;document: green;", "query:red;document: blue;"])):
            with torch.no_grad():
                logits = [float(tiny._reference()(torch.tensor([tokenizer.encode(text).ids])).logits[0, 0]) for text in texts]
            results = llm.score("red", [" green", " blue"], chat_template=given, use_tqdm=False)
            assert [r.outputs.score for r in results] == pytest.approx([1 / (1 + np.exp(-x)) for x in logits], abs=LIMIT)
        with pytest.raises(InvalidParameter, match="2 texts and data_2 3"):
            llm.score(["a", "b"], ["c", "d", "e"])


def test_weights_that_look_ahead_are_refused_by_name(checkpoint: Callable[[str], Tiny]) -> None:
    with pytest.raises(ModelError, match="is_causal"):
        engine(checkpoint("llama"), hf_overrides={"is_causal": False})
    with pytest.raises(InvalidParameter, match="no classification head"), engine(checkpoint("llama")) as llm:
        llm.classify([[1, 2]])
