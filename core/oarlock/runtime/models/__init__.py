"""Model families: one small file each, found by architecture name.

Owns: the table of architectures, and what is said of checkpoints that cannot be served.
Reads: `model_summary`, `errors`, `models.base`.
Never: imports a family, or transformers, before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from typing import Any

import torch

from oarlock.backend_api.runtime import Communicator, Ops
from oarlock.errors import ConfigError, ModelError, UnsupportedArchitecture
from oarlock.model_summary import ModelSummary
from oarlock.pooling_params import Pooler, role_of
from oarlock.runtime.layers.spec import ModelSpec, WeightSpec
from oarlock.runtime.models.base import MakeAttention, NativeModel, indivisible_heads
from oarlock.runtime.quantization.kv_cache import Scales

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


def build_model(
    summary: ModelSummary,
    ops: Ops,
    comm: Communicator,
    make_attention: MakeAttention,
    block_size: int,
    dtype: torch.dtype,
    family: Any = None,
    *,
    remote_code: bool = False,
    kv_scales: Scales = (),
    quantised: bool = False,
) -> tuple[Any, list[WeightSpec]]:
    """A model without weights, and the list of the weights it wants.

    `family`: a plugin's, in place of core's. `remote_code`: Python code of the checkpoint may be run where nothing else serves it.
    `kv_scales`: of each layer's fp8 cache; (): 1. `quantised`: weights will be, in the checkpoint or when they are read.

    A family is a module (or object) with `model_spec(summary)` and `weight_specs(summary, spec)`. An architecture without
    one is served through transformers' modelling code where that allows it.

    Raises:
        ModelError: the config holds what the family does not compute; or weights are quantised, without a native file for it.
        ConfigError: the model cannot be divided over so many ranks.
        UnsupportedArchitecture: neither way serves this architecture.
    """
    name, role = role_of(summary.architecture)
    if family is None and name not in FAMILIES:
        if quantised:
            raise ModelError(
                f"{summary.path}: quantised weights, and {summary.architecture} has no native model file: transformers' own code is served with plain weights "
                "only; take an unquantised checkpoint, without --quantization"
            )
        return _from_transformers(summary, comm, make_attention, block_size, dtype, remote_code, kv_scales)
    _check_causal(summary)
    asked = summary.architecture
    if family is None:
        family, summary = importlib.import_module(f"oarlock.runtime.models.{FAMILIES[name]}"), replace(summary, architecture=name)
    spec = family.model_spec(summary)
    weights = family.weight_specs(summary, spec)
    if role != "generate":
        weights = _without_head(weights, spec, len(Pooler.of(asked, summary.hf_config, summary.path, {}).labels))
    _check_division(spec, weights, comm.size)
    return NativeModel(spec, ops, comm, make_attention, block_size, dtype, kv_scales, role), [_divided(weight, comm.size) for weight in weights]


def _from_transformers(
    summary: ModelSummary, comm: Communicator, make_attention: MakeAttention, block_size: int, dtype: torch.dtype, remote_code: bool, kv_scales: Scales
) -> tuple[Any, list[WeightSpec]]:
    from oarlock.runtime.models.transformers_path import Refused, build_from_transformers

    try:
        return build_from_transformers(summary, comm, make_attention, block_size, dtype, remote_code, kv_scales)
    except Refused as refused:
        raise UnsupportedArchitecture(
            f"{summary.architecture} cannot be served. Tried: a native model file (there is none); the generic path over transformers' "
            f"modelling code ({refused}). The nearest architectures with a native file are {', '.join(_nearest(summary.architecture))}; "
            f"all: {', '.join(sorted(FAMILIES))}"
        ) from refused


def _nearest(architecture: str) -> list[str]:
    """Supported architectures whose names are like this one; the commonest where none is."""
    stems = {name.partition("For")[0].removesuffix("LMHeadModel"): name for name in FAMILIES}
    near = difflib.get_close_matches(architecture.partition("For")[0], stems, n=3, cutoff=0.5)
    return [stems[stem] for stem in near] or ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"]


def _check_causal(summary: ModelSummary) -> None:
    """Raises ModelError for weights that were trained to see what comes later in the text."""
    c = summary.hf_config
    key = "is_causal" if c.get("is_causal") is False else "use_bidirectional_attention" if c.get("use_bidirectional_attention") else None
    if key is not None:
        raise ModelError(f"{summary.path}: config value {key} is {c[key]}: its tokens attend to those that follow them, and the paged attention is causal only")


def _without_head(weights: list[WeightSpec], spec: ModelSpec, num_classes: int) -> list[WeightSpec]:
    """The same, with a classification head or none in place of the language-model head, for which no table is kept, either."""
    found = [replace(w, kind="other") if w.path == ("embed", "weight") else w for w in weights if w.path[0] != "lm_head"]
    if num_classes:
        found.append(WeightSpec(("score", "weight"), ("score.weight",), ((num_classes, spec.hidden_size),), kind="linear"))
    return found


def _check_division(spec: ModelSpec, weights: list[WeightSpec], size: int) -> None:
    """Raises ConfigError, with the sizes that work, if the model cannot be divided over so many ranks."""

    def problem(ranks: int) -> str | None:
        reasons = (*(indivisible_heads(layer.attention, ranks) for layer in spec.layers), *(_indivisible(weight, ranks) for weight in weights))
        return next((reason for reason in reasons if reason is not None), None)

    if size == 1 or (reason := problem(size)) is None:
        return
    working = [str(n) for n in range(1, max(layer.attention.num_heads for layer in spec.layers) + 1) if problem(n) is None]
    raise ConfigError(f"--tensor-parallel-size {size} {reason}; sizes that work: {', '.join(working)}", "tensor_parallel_size")


def _divided(weight: WeightSpec, size: int) -> WeightSpec:
    """The same. A vocabulary that cannot be cut into `size` parts stays whole: every rank computes all logits."""
    whole = weight.shard == "vocab" and any(shape[0] % size for shape in weight.shapes)
    return replace(weight, shard="none") if whole else weight


def _indivisible(weight: WeightSpec, size: int) -> str | None:
    """Why it cannot be cut into `size` parts, or None."""
    if size == 1 or weight.shard in ("none", "vocab") or weight.heads:  # heads have a rule of their own
        return None
    along = 0 if (weight.shard == "column") != weight.transpose else 1
    rows = [rows for rows, heads in weight.split if not heads] if weight.split else [shape[along if len(shape) > 1 else 0] for shape in weight.shapes]
    return f"does not divide {weight.sources[0]}, which has {max(rows)} entries to divide" if any(count % size for count in rows) else None
