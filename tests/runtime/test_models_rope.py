"""Rotary tables and greedy tokens under each kind of scaling, against transformers, where its factors do not change with the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, Tiny
from oarlock.config.resolve import from_kwargs
from oarlock.errors import ModelError
from oarlock.model_summary import load_summary
from oarlock.runtime.layers.rope import inverse_frequencies, rope_table
from oarlock.runtime.layers.spec import RopeSpec
from oarlock.runtime.models.parts import rope_of
from running import assert_same, run

SHORT = [1.0 + 0.1 * i for i in range(8)]
LONG = [2.0 + 0.5 * i for i in range(8)]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-all": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 0.9, "truncate": False,
    },
    "yarn-factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64},
    "longrope-factor": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64, "attention_factor": 1.2,
    },
}  # fmt: skip


def theirs(scaling: dict[str, Any], length: int, theta: float, limit: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=limit, rope_parameters={**scaling, "rope_theta": theta}
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)


@pytest.mark.parametrize("length", [48, 64, 256, 700])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, length):
    """At every length: below, at and beyond the original context."""
    frequencies, factor = inverse_frequencies(RopeSpec(16, 5000.0, SCALINGS[name], 256), length)
    expected, expected_factor = theirs(SCALINGS[name], length, 5000.0, 256)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_each_kind_of_scaling_changes_the_table():
    plain = rope_table(RopeSpec(16, 5000.0, None, 256), 700)
    for name, scaling in SCALINGS.items():
        assert not torch.allclose(rope_table(RopeSpec(16, 5000.0, scaling, 256), 700), plain, atol=1e-2), name


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"'spiral' is not supported; supported are default, linear, dynamic, yarn, llama3, longrope"):
        rope_table(RopeSpec(16, 5000.0, {"rope_type": "spiral"}, 256), 8)


def scaled(name: str, folder: Path, **more: Any) -> Tiny:
    """A Llama (for longrope, a Phi-3) with this scaling; 256 positions."""
    base = FAMILIES["phi3" if name == "longrope" else "llama"]
    values = {**base.values, "max_position_embeddings": 256, **more}
    values |= {"partial_rotary_factor": 1.0} if name == "longrope" else {}
    scaling = dict(SCALINGS[name])
    if name == "longrope":
        values.setdefault("original_max_position_embeddings", scaling.pop("original_max_position_embeddings"))
    return Tiny.make(name, folder, replace(base, values={**values, "rope_parameters": {**scaling, "rope_theta": 10000.0}}))


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "yarn-all", "llama3"])
def test_greedy_tokens_under_scaling_are_those_of_transformers(tmp_path, name):
    tiny = scaled(name, tmp_path)
    assert_same(tiny, tiny.prompts(1, 30, 150), max_model_len=256)


def test_greedy_tokens_under_short_and_long_factors_are_those_of_transformers(tmp_path):
    """transformers takes the long ones once a text exceeds the original context, Oarlock when the served context does."""
    tiny = scaled("longrope", tmp_path, original_max_position_embeddings=128)
    assert_same(tiny, tiny.prompts(1, 60), max_model_len=128)
    assert_same(tiny, tiny.prompts(130, 180), max_model_len=256)


def test_short_and_long_factors_differ(tmp_path):
    tiny = scaled("longrope", tmp_path, original_max_position_embeddings=128)
    prompts = tiny.prompts(30)
    assert run(tiny, prompts, max_model_len=128) != run(tiny, prompts, max_model_len=256)


def test_flags_replace_what_the_checkpoint_says(checkpoint, tmp_path):
    """The same weights under --rope-scaling and --rope-theta, and under a config that says it."""
    plain = checkpoint("llama")
    flags = {"rope_scaling": SCALINGS["llama3"], "rope_theta": 777.0}
    base = FAMILIES["llama"]
    told = Tiny.make("told", tmp_path, replace(base, values={**base.values, "rope_parameters": {**SCALINGS["llama3"], "rope_theta": 777.0}}))
    prompts = plain.prompts(40, 90)
    by_flags = run(plain, prompts, **flags)
    assert by_flags == run(told, prompts)
    assert by_flags != run(plain, prompts)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(16, 5e5, None, 1024)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(16, 5e5, {"rope_type": "linear", "factor": 2.0}, 1024)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, RopeSpec(16, 3e4, None, 1024)),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, RopeSpec(8, 1e4, None, 1024)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG}, "original_max_position_embeddings": 64},
         RopeSpec(16, 1e4, {"original_max_position_embeddings": 64, "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}, 1024)),
    ],
    ids=["theta", "old scaling", "new parameters", "partial", "su"],
)  # fmt: skip
def test_old_and_new_spellings_of_a_config(checkpoint, tmp_path, config, expected):
    values = json.loads((checkpoint("llama").path / "config.json").read_text())
    values.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps({**values, **config}))
    summary = load_summary(from_kwargs(str(tmp_path), device="cpu", load_format="dummy").engine.model)
    assert rope_of(summary) == expected
