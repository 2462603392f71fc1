"""A checkpoint that cannot be served is refused in words that name the value at fault and what serves instead."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oarlock.backend_api.runtime import IdentityCommunicator, bind_ops
from oarlock.config.resolve import from_kwargs
from oarlock.errors import ModelError
from oarlock.model_summary import load_summary
from oarlock.runtime.models import FAMILIES, build_model


def build(folder: Path, source: Path, **changes: Any) -> Any:
    """The model of another checkpoint's config with some values changed."""
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    summary = load_summary(from_kwargs(str(folder), device="cpu", load_format="dummy").engine.model)
    return build_model(summary, bind_ops([], "float32"), IdentityCommunicator(0, 1), lambda params, kind: None, 16, torch.float32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "laurel"}, "config value hidden_act is 'laurel'; LlamaForCausalLM is served with silu, swish, gelu"),
        ("llama", {"hidden_act": "relu"}, "config value hidden_act is 'relu'"),
        ("mixtral", {"hidden_act": "gelu"}, "config value hidden_act is 'gelu'; MixtralForCausalLM is served with silu, swish"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, the model has 4 experts"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True: its tokens attend to those that follow them, and the paged attention is causal only"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ],
)
def test_config_values_that_are_not_computed_are_refused(checkpoint, tmp_path, name, changes, message):
    build(tmp_path, checkpoint(name).path)
    with pytest.raises(ModelError, match=re.escape(message)):
        build(tmp_path, checkpoint(name).path, **changes)


def test_every_native_architecture_has_a_tiny_checkpoint():
    import checkpoints

    assert {recipe.model for recipe in checkpoints.FAMILIES.values()} == set(FAMILIES)
    assert not {recipe.model for recipe in checkpoints.GENERIC.values()} & set(FAMILIES)
