"""Llama and the families that differ from it by a few settings: Llama 2 and 3, Mistral, SmolLM2 and 3, Qwen2, Qwen2.5 and Qwen3.

Owns: how their config.json becomes a ModelSpec and where their tensors lie.
Reads: `model_summary`, `layers.spec`, `models.parts`.
Never: computes.
"""

from __future__ import annotations

from oarlock.errors import ModelError
from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec
from oarlock.runtime.models.parts import (
    activation_of,
    attention_weights,
    gated_mlp_weights,
    norm_weights,
    outer_weights,
    qk_norm_weights,
    rope_of,
)

_THETA = {"SmolLM3ForCausalLM": 2_000_000.0}


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    s = summary
    norm = NormSpec("rms", s.hf_config.get("rms_norm_eps", 1e-6))
    mlp = MlpSpec("gated", activation_of(summary, "hidden_act", "silu"))
    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=tuple(LayerSpec(attention_spec(summary, i), mlp, norm) for i in range(s.num_layers)),
        norm=norm,
        rope={"default": rope_of(summary, theta=_THETA.get(s.architecture, 10000.0))},
        tie_embeddings=s.tie_word_embeddings,
    )


def attention_spec(summary: ModelSummary, index: int) -> AttentionSpec:
    """Attention of one layer."""
    s = summary
    rope = "default" if _layer_rotates(summary, index) else None
    qk_norm = s.architecture.startswith("Qwen3")
    return AttentionSpec(s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim**-0.5, rope, window=s.layer_windows[index], qk_norm=qk_norm)


def _layer_rotates(summary: ModelSummary, index: int) -> bool:
    """SmolLM3 leaves the rotary embedding out of some layers: `no_rope_layers` has a 0 for them, else every fourth has none."""
    if summary.architecture != "SmolLM3ForCausalLM":
        return True
    listed = summary.hf_config.get("no_rope_layers")
    if listed is None:
        return (index + 1) % (summary.hf_config.get("no_rope_layer_interval") or 4) != 0
    if len(listed) < summary.num_layers:
        raise ModelError(f"{summary.path}: config value no_rope_layers has {len(listed)} entries for {summary.num_layers} layers")
    return bool(listed[index])


def layer_weights(summary: ModelSummary, layer: LayerSpec, index: int) -> list[WeightSpec]:
    """Everything of one layer but its feed-forward."""
    c, hidden, norm = summary.hf_config, summary.hidden_size, layer.norm
    p, at = f"model.layers.{index}.", ("layers", index)
    biased = bool(c.get("attention_bias", False))
    qkv_bias = biased or summary.architecture == "Qwen2ForCausalLM"
    found = attention_weights(at, p + "self_attn.", hidden, layer.attention, qkv_bias=qkv_bias, out_bias=biased)
    if layer.attention.qk_norm:
        found += qk_norm_weights(at, p + "self_attn.", layer.attention.head_dim, norm)
    found += norm_weights((*at, "attention_norm"), p + "input_layernorm", hidden, norm)
    return found + norm_weights((*at, "mlp_norm"), p + "post_attention_layernorm", hidden, norm)


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    found, bias = outer_weights(spec), bool(summary.hf_config.get("mlp_bias", False))
    for i, layer in enumerate(spec.layers):
        found += layer_weights(summary, layer, i)
        found += gated_mlp_weights(("layers", i), f"model.layers.{i}.mlp.", spec.hidden_size, summary.intermediate_size, bias=bias)
    return found
