"""Gemma 2 and 3: norms that add one, around both halves of a layer; a scaled embedding; windows in most layers.

Owns: how their config.json becomes a ModelSpec and where their tensors lie.
Reads: `model_summary`, `layers.spec`, `models.parts`.
Never: computes.
"""

from __future__ import annotations

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, WeightSpec
from oarlock.runtime.models.parts import (
    activation_of,
    attention_weights,
    gated_mlp_weights,
    norm_weights,
    outer_weights,
    qk_norm_weights,
    refuse_values,
    rope_of,
)

# Weight tree -> checkpoint.
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    s, c = summary, summary.hf_config
    third = s.architecture == "Gemma3ForCausalLM"
    if c.get("use_bidirectional_attention"):
        refuse_values(summary, use_bidirectional_attention=False)
    norm = NormSpec("rms", c.get("rms_norm_eps", 1e-6), unit_offset=True)
    mlp = MlpSpec("gated", activation_of(summary, "hidden_activation", "gelu_pytorch_tanh"))
    rope = {"default": rope_of(summary, theta=1_000_000.0 if third else 10000.0)}
    if third:
        rope["local"] = RopeSpec(s.head_dim, float(c.get("rope_local_base_freq") or 10000.0))
    # Gemma 2's class caps by default; a config that caps nothing says null.
    softcap = c.get("attn_logit_softcapping", None if third else 50.0)

    def attention(index: int) -> AttentionSpec:
        return AttentionSpec(
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            scale=(c.get("query_pre_attn_scalar") or 256) ** -0.5,
            rope="local" if third and _slides(summary, index) else "default",
            window=s.layer_windows[index],
            softcap=softcap,
            qk_norm=third,
        )

    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=tuple(LayerSpec(attention(i), mlp, norm, "sandwich") for i in range(s.num_layers)),
        norm=norm,
        rope=rope,
        embed_scale=s.hidden_size**0.5,
        tie_embeddings=s.tie_word_embeddings,
        logit_softcap=c.get("final_logit_softcapping", None if third else 30.0),
    )


def _slides(summary: ModelSummary, index: int) -> bool:
    """Whether a layer is one of the windowed ones, even where the window is disabled: it keeps their rotary table."""
    c = summary.hf_config
    if c.get("layer_types"):
        return c["layer_types"][index] == "sliding_attention"
    return (index + 1) % (c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6) != 0


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    found, hidden = outer_weights(spec), spec.hidden_size
    bias = bool(summary.hf_config.get("attention_bias", False))
    for i, layer in enumerate(spec.layers):
        p, at = f"model.layers.{i}.", ("layers", i)
        found += attention_weights(at, p + "self_attn.", hidden, layer.attention, qkv_bias=bias, out_bias=bias)
        if layer.attention.qk_norm:
            found += qk_norm_weights(at, p + "self_attn.", layer.attention.head_dim, layer.norm)
        found += gated_mlp_weights(at, p + "mlp.", hidden, summary.intermediate_size)
        for ours, theirs in _NORMS.items():
            found += norm_weights((*at, ours), p + theirs, hidden, layer.norm)
    return found
