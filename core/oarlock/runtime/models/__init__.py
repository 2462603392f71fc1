"""Model families: one small file each, found by architecture name.

Owns: the table of architectures and the error for an unknown one.
Reads: `model_summary`.
Never: imports a family before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType
from typing import Any

import torch

from oarlock.backend_api.runtime import Communicator, Ops
from oarlock.errors import UnsupportedArchitecture
from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import WeightSpec
from oarlock.runtime.models.base import MakeAttention, NativeModel

FAMILIES = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "moe",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "moe",
    "SmolLM3ForCausalLM": "llama",
}


def family_of(summary: ModelSummary) -> ModuleType:
    """The module that describes this architecture: it has `model_spec(summary)` and `weight_specs(summary, spec)`.

    Raises:
        UnsupportedArchitecture: no file describes it.
    """
    name = FAMILIES.get(summary.architecture)
    if name is None:
        near = difflib.get_close_matches(summary.architecture, FAMILIES, n=3, cutoff=0.3) or sorted(FAMILIES)[:3]
        raise UnsupportedArchitecture(
            f"{summary.architecture} has no native model file; the nearest that do are {', '.join(near)}; supported are {', '.join(sorted(FAMILIES))}"
        )
    return importlib.import_module(f"oarlock.runtime.models.{name}")


def build_model(
    summary: ModelSummary, ops: Ops, comm: Communicator, make_attention: MakeAttention, block_size: int, dtype: torch.dtype, family: Any = None
) -> tuple[Any, list[WeightSpec]]:
    """A model without weights, and the list of the weights it wants. `family`: a plugin's, in place of core's."""
    family = family or family_of(summary)
    spec = family.model_spec(summary)
    return NativeModel(spec, ops, comm, make_attention, block_size, dtype), family.weight_specs(summary, spec)
