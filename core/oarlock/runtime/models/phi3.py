"""Phi-3: Llama's layers with fused projections, and rotary settings of its own.

Owns: how its config.json becomes a ModelSpec and where its tensors lie.
Reads: `model_summary`, `layers.spec`, `models.parts`.
Never: computes.
"""

from __future__ import annotations

from dataclasses import replace

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, WeightSpec
from oarlock.runtime.models.parts import activation_of, linear_weights, norm_weights, outer_weights, rope_of


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    s = summary
    norm = NormSpec("rms", s.hf_config.get("rms_norm_eps", 1e-5))
    mlp = MlpSpec("gated", activation_of(summary, "hidden_act", "silu"))

    def layer(index: int) -> LayerSpec:
        return LayerSpec(AttentionSpec(s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim**-0.5, window=s.layer_windows[index]), mlp, norm)

    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=tuple(layer(i) for i in range(s.num_layers)),
        norm=norm,
        rope={"default": _rope(summary)},
        tie_embeddings=s.tie_word_embeddings,
    )


def _rope(summary: ModelSummary) -> RopeSpec:
    """Early checkpoints call their longrope "yarn"."""
    rope = rope_of(summary)
    if rope.scaling and rope.scaling["rope_type"] == "yarn" and "long_factor" in rope.scaling:
        return replace(rope, scaling={**rope.scaling, "rope_type": "longrope"})
    return rope


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    found, hidden, width = outer_weights(spec), spec.hidden_size, summary.intermediate_size
    for i, layer in enumerate(spec.layers):
        a, p, at = layer.attention, f"model.layers.{i}.", ("layers", i)
        parts = tuple((heads * a.head_dim, heads) for heads in (a.num_heads, a.num_kv_heads, a.num_kv_heads))
        rows = sum(rows for rows, _ in parts)
        found += [
            WeightSpec((*at, "qkv", "weight"), (p + "self_attn.qkv_proj.weight",), ((rows, hidden),), "column", split=parts, kind="linear"),
            WeightSpec((*at, "gate_up", "weight"), (p + "mlp.gate_up_proj.weight",), ((2 * width, hidden),), "column", split=((width, 0),) * 2, kind="linear"),
            *linear_weights((*at, "o"), (p + "self_attn.o_proj",), (hidden,), a.num_heads * a.head_dim, "row"),
            *linear_weights((*at, "down"), (p + "mlp.down_proj",), (hidden,), width, "row"),
            *norm_weights((*at, "attention_norm"), p + "input_layernorm", hidden, layer.norm),
            *norm_weights((*at, "mlp_norm"), p + "post_attention_layernorm", hidden, layer.norm),
        ]
    return found
