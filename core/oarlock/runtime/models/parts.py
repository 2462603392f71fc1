"""Weight lists and rope settings that many families share.

Owns: the usual names (model.layers.N.self_attn.q_proj, ...) and how they map to the weight tree.
Reads: `model_summary`, `layers.spec`.
Never: decides what a family is made of.
"""

from __future__ import annotations

from typing import Any, Literal

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, ModelSpec, RopeSpec, WeightSpec

Path = tuple[str | int, ...]
Shard = Literal["column", "row", "vocab", "expert", "none"]


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
    hidden, vocab, width = spec.hidden_size, spec.vocab_size, spec.embed_size or spec.hidden_size
    found = [WeightSpec(("embed", "weight"), (f"{prefix}{embed}.weight",), ((vocab, width),), kind="embedding")]
    if norm is not None:
        found += norm_weights(("final_norm",), f"{prefix}{norm}", hidden, spec.norm.kind, unit_offset=unit_offset)
    if not spec.tie_embeddings:
        found.append(WeightSpec(("lm_head", "weight"), ("lm_head.weight",), ((vocab, width),), "vocab", kind="linear"))
        found.append(WeightSpec(("lm_head", "bias"), ("lm_head.bias",), ((vocab,),), "vocab", optional=True))
    return found


def norm_weights(at: Path, name: str, size: int, kind: str = "rms", *, unit_offset: bool = False) -> list[WeightSpec]:
    """A norm's weight, and the bias that layer norms have."""
    found = [WeightSpec((*at, "weight"), (f"{name}.weight",), ((size,),), unit_offset=unit_offset, kind="norm")]
    if kind == "layer":
        found.append(WeightSpec((*at, "bias"), (f"{name}.bias",), ((size,),), kind="norm"))
    return found


def linear_weights(at: Path, names: tuple[str, ...], outs: tuple[int, ...], width: int, shard: Shard, *, bias: bool | None = None, heads: tuple[int, ...] = ()) -> list[WeightSpec]:
    """One linear, or several concatenated. `bias`: True required, False none, None where the checkpoint has one."""
    bias_shard: Shard = shard if shard in ("column", "vocab") else "none"
    found = [WeightSpec((*at, "weight"), tuple(f"{n}.weight" for n in names), tuple((o, width) for o in outs), shard, heads=heads, kind="linear")]
    if bias is not False:
        shapes = tuple((o,) for o in outs)
        found.append(WeightSpec((*at, "bias"), tuple(f"{n}.bias" for n in names), shapes, bias_shard, heads=heads, optional=bias is None))
    return found


def attention_weights(at: Path, prefix: str, hidden: int, a: AttentionSpec, *, out: str = "o_proj", qkv_bias: bool | None = None, out_bias: bool | None = None) -> list[WeightSpec]:
    """Query, key and value as one column-parallel linear, the output as a row-parallel one."""
    heads = (a.num_heads, a.num_kv_heads, a.num_kv_heads)
    names = tuple(f"{prefix}{part}_proj" for part in "qkv")
    return [
        *linear_weights((*at, "qkv"), names, tuple(h * a.head_dim for h in heads), hidden, "column", bias=qkv_bias, heads=heads),
        *linear_weights((*at, "o"), (f"{prefix}{out}",), (hidden,), a.num_heads * a.head_dim, "row", bias=out_bias),
    ]


def gated_mlp_weights(at: Path, prefix: str, hidden: int, intermediate: int, *, bias: bool | None = None) -> list[WeightSpec]:
    """gate_proj and up_proj as one column-parallel linear, down_proj as a row-parallel one."""
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    return [
        *linear_weights((*at, "gate_up"), names, (intermediate, intermediate), hidden, "column", bias=bias),
        *linear_weights((*at, "down"), (f"{prefix}down_proj",), (hidden,), intermediate, "row", bias=bias),
    ]
