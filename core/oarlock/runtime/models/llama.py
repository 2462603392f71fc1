"""Llama and the families that differ from it by a few numbers: Llama 2 and 3, Mistral, SmolLM2.

Owns: how their config.json becomes a ModelSpec and where their tensors lie.
Reads: `model_summary`, `layers.spec`.
Never: computes.
"""

from __future__ import annotations

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec
from oarlock.runtime.models.parts import attention_weights, gated_mlp_weights, norm_weights, outer_weights, rope_of

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    c, s = summary.hf_config, summary
    norm = NormSpec("rms", c.get("rms_norm_eps", 1e-6))

    def layer(index: int) -> LayerSpec:
        attention = AttentionSpec(s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim**-0.5, window=s.layer_windows[index])
        return LayerSpec(attention, MlpSpec("gated", "silu"), norm)

    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=tuple(layer(i) for i in range(s.num_layers)),
        norm=norm,
        rope={"default": rope_of(summary, s.head_dim)},
        tie_embeddings=s.tie_word_embeddings,
    )


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    found, hidden = outer_weights(spec), spec.hidden_size
    for i, layer in enumerate(spec.layers):
        p, at = f"model.layers.{i}.", ("layers", i)
        found += attention_weights(at, p + "self_attn.", hidden, layer.attention)
        found += gated_mlp_weights(at, p + "mlp.", hidden, summary.intermediate_size)
        found += norm_weights((*at, "attention_norm"), p + "input_layernorm", hidden)
        found += norm_weights((*at, "mlp_norm"), p + "post_attention_layernorm", hidden)
    return found
