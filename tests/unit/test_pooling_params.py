"""What a checkpoint says of its vectors, and what of a request it can honour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oarlock.errors import ConfigError, InvalidParameter
from oarlock.pooling_params import Pooler, PoolingParams, read_pooler_config, role_of


def pooler(architecture: str = "LlamaForCausalLM", path: str = "/nowhere", asked: dict[str, Any] | None = None, **config: Any) -> Pooler:
    return Pooler.of(architecture, {"hidden_size": 8, **config}, path, asked or {})


@pytest.mark.parametrize(
    ("name", "base", "role"),
    [
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM", "generate"), ("Qwen3Model", "Qwen3ForCausalLM", "embed"), ("Gemma3TextModel", "Gemma3ForCausalLM", "embed"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel", "generate"), ("GPT2Model", "GPT2LMHeadModel", "embed"),
        ("GPT2ForSequenceClassification", "GPT2LMHeadModel", "classify"), ("LlamaForSequenceClassification", "LlamaForCausalLM", "classify"),
    ],
)  # fmt: skip
def test_roles(name: str, base: str, role: str) -> None:
    assert role_of(name) == (base, role)


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"), ({"num_labels": 1}, ("LABEL_0",), "sigmoid"), ({"id2label": {"1": "bad", "0": "good"}}, ("good", "bad"), "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"), ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, ("LABEL_0",), "none"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, ("LABEL_0",), "sigmoid"),
    ],
)  # fmt: skip
def test_classes(config: dict[str, Any], labels: tuple[str, ...], activation: str) -> None:
    made = pooler("LlamaForSequenceClassification", **config)
    assert (made.labels, made.fit(PoolingParams()).activation) == (labels, activation)
    assert made.fit(PoolingParams(use_activation=False)).activation == "none"


def test_an_activation_that_is_not_served_is_named() -> None:
    made = pooler("LlamaForSequenceClassification", num_labels=1, sbert_ce_default_activation_function="torch.nn.Tanh")
    with pytest.raises(InvalidParameter, match="Tanh"):
        made.fit(PoolingParams())


def write(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> str:
    steps = [{"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" if n else ""} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.mark.parametrize(
    ("kinds", "pooling", "wanted"),
    [
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ("last", "normalize")),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, ("mean", "none")),
        (["Transformer", "Pooling"], {"word_embedding_dimension": 8}, ("mean", "none")),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode": "cls"}, ("cls", "normalize")),
    ],
)
def test_files_of_sentence_transformers(tmp_path: Path, kinds: list[str], pooling: dict[str, Any], wanted: tuple[str, str]) -> None:
    params = pooler(path=write(tmp_path, kinds, pooling)).fit(PoolingParams())
    assert (params.pooling, params.activation) == wanted
    asked = pooler(path=str(tmp_path), asked=read_pooler_config({"pooling_type": "LAST", "normalize": True})).fit(PoolingParams())
    assert (asked.pooling, asked.activation) == ("last", "normalize")


@pytest.mark.parametrize(
    ("kinds", "pooling", "named"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "Dense"), (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "max"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls, mean"),
    ],
)  # fmt: skip
def test_steps_that_are_not_served_are_named_when_a_vector_is_asked_for(tmp_path: Path, kinds: list[str], pooling: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        pooler(path=write(tmp_path, kinds, pooling)).fit(PoolingParams())


def test_broken_files_are_named_when_a_vector_is_asked_for(tmp_path: Path) -> None:
    for text in ("{", "[1]", '[{"type": "x.Pooling", "path": "none"}]'):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(InvalidParameter, match=r"modules\.json"):
            pooler(path=str(tmp_path)).fit(PoolingParams())


@pytest.mark.parametrize("given", [{"pooling_type": "STEP"}, {"task": "embed"}, {"use_activation": 1}, {"dimensions": 0}, {"dimensions": "8"}])
def test_a_pooler_config_that_cannot_be_honoured(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--pooler-config"):
        read_pooler_config(given)


@pytest.mark.parametrize(
    "fields", [{"task": "token_embed"}, {"pooling": "max"}, {"dimensions": True}, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "both"}]
)
def test_fields_that_are_not_valid(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PoolingParams(**fields)
    assert caught.value.param == next(iter(fields))
