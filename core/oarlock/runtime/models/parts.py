"""Weight lists and rope settings that many families share.

Owns: the usual names (model.layers.N.self_attn.q_proj, ...) and how they map to the weight tree.
Reads: `model_summary`, `layers.spec`.
Never: decides what a family is made of.
"""

from __future__ import annotations

from typing import Any

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, ModelSpec, RopeSpec, WeightSpec

Path = tuple[str | int, ...]


def rope_of(summary: ModelSummary, dim: int, *, layer_type: str | None = None) -> RopeSpec:
    """The model's rotary settings, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    c: dict[str, Any] = summary.hf_config
    p: dict[str, Any] = c.get("rope_parameters") or {}
    if layer_type is not None and layer_type in p:
        p = p[layer_type]
    scaling = c.get("rope_scaling") or {k: v for k, v in p.items() if k != "rope_theta"} or None
    theta = p.get("rope_theta", c.get("rope_theta", 10000.0))
    fraction = p.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    return RopeSpec(int(dim * fraction), float(theta), scaling, int(c.get("max_position_embeddings") or 0))


def outer_weights(spec: ModelSpec, *, prefix: str = "model.", embed: str = "embed_tokens", norm: str | None = "norm", unit_offset: bool = False) -> list[WeightSpec]:
    """Embedding, final norm and head. A tied head shares the embedding and is set by the worker."""
    found = [WeightSpec(("embed", "weight"), (f"{prefix}{embed}.weight",), kind="embedding")]
    if norm is not None:
        found.append(WeightSpec(("final_norm", "weight"), (f"{prefix}{norm}.weight",), kind="norm", unit_offset=unit_offset))
        if spec.norm.kind == "layer":
            found.append(WeightSpec(("final_norm", "bias"), (f"{prefix}{norm}.bias",), kind="norm", optional=True))
    if not spec.tie_embeddings:
        found.append(WeightSpec(("lm_head", "weight"), ("lm_head.weight",), shard="vocab", kind="linear"))
        found.append(WeightSpec(("lm_head", "bias"), ("lm_head.bias",), shard="vocab", optional=True))
    return found


def qkv_weights(at: Path, prefix: str, attention: AttentionSpec, *, out: str = "o_proj", out_bias: bool = True) -> list[WeightSpec]:
    """Query, key and value as one column-parallel linear, the output as a row-parallel one; biases where the checkpoint has them."""
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)

    def names(kind: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{part}_proj.{kind}" for part in "qkv")

    return [
        WeightSpec((*at, "qkv", "weight"), names("weight"), "column", heads=heads, kind="linear"),
        WeightSpec((*at, "qkv", "bias"), names("bias"), "column", heads=heads, optional=True),
        WeightSpec((*at, "o", "weight"), (f"{prefix}{out}.weight",), "row", kind="linear"),
        *([WeightSpec((*at, "o", "bias"), (f"{prefix}{out}.bias",), optional=True)] if out_bias else []),
    ]


def gated_mlp_weights(at: Path, prefix: str) -> list[WeightSpec]:
    """gate_proj and up_proj as one column-parallel linear, down_proj as a row-parallel one."""
    gate_up = (f"{prefix}gate_proj", f"{prefix}up_proj")
    return [
        WeightSpec((*at, "gate_up", "weight"), tuple(f"{n}.weight" for n in gate_up), "column", kind="linear"),
        WeightSpec((*at, "gate_up", "bias"), tuple(f"{n}.bias" for n in gate_up), "column", optional=True),
        WeightSpec((*at, "down", "weight"), (f"{prefix}down_proj.weight",), "row", kind="linear"),
        WeightSpec((*at, "down", "bias"), (f"{prefix}down_proj.bias",), optional=True),
    ]
