"""OPT: learned positions, layer norms, ReLU, biases. The 350m model norms after each half and projects its embedding.

Owns: how its config.json becomes a ModelSpec and where its tensors lie.
Reads: `model_summary`, `layers.spec`, `models.parts`.
Never: computes.
"""

from __future__ import annotations

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec
from oarlock.runtime.models.parts import activation_of, attention_weights, linear_weights, norm_weights, outer_weights, refuse_values

_OFFSET = 2  # rows of the position table before that of position 0


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    s, c = summary, summary.hf_config
    refuse_values(summary, layer_norm_elementwise_affine=True)
    norm = NormSpec("layer", 1e-5)
    before = c.get("do_layer_norm_before", True)
    attention = AttentionSpec(s.num_heads, s.num_kv_heads, s.head_dim, s.head_dim**-0.5, rope=None)
    mlp = MlpSpec("plain", activation_of(summary, "activation_function", "relu", allowed=("relu", "gelu", "gelu_tanh", "silu")))
    width = c.get("word_embed_proj_dim") or s.hidden_size
    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=(LayerSpec(attention, mlp, norm, "pre" if before else "post"),) * s.num_layers,
        norm=norm,
        learned_positions=c.get("max_position_embeddings", 2048) + _OFFSET,
        position_offset=_OFFSET,
        embed_size=None if width == s.hidden_size else width,
        final_norm=before and not c.get("_remove_final_layer_norm", False),
        tie_embeddings=s.tie_word_embeddings,
    )


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    p, hidden, bias = "model.decoder.", spec.hidden_size, bool(summary.hf_config.get("enable_bias", True))
    width = summary.hf_config.get("ffn_dim") or summary.intermediate_size
    found = outer_weights(spec, prefix=p, norm="final_layer_norm")
    found.append(WeightSpec(("positions", "weight"), (p + "embed_positions.weight",), ((spec.learned_positions, hidden),), kind="embedding"))
    if spec.embed_size is not None:
        found += linear_weights(("project_in",), (p + "project_in",), (hidden,), spec.embed_size, "none")
        found += linear_weights(("project_out",), (p + "project_out",), (spec.embed_size,), hidden, "none")
    for i, layer in enumerate(spec.layers):
        q, at = f"{p}layers.{i}.", ("layers", i)
        found += attention_weights(at, q + "self_attn.", hidden, layer.attention, out="out_proj", qkv_bias=bias, out_bias=bias)
        found += linear_weights((*at, "up"), (q + "fc1",), (width,), hidden, "column", bias=bias)
        found += linear_weights((*at, "down"), (q + "fc2",), (hidden,), width, "row", bias=bias)
        found += norm_weights((*at, "attention_norm"), q + "self_attn_layer_norm", hidden, layer.norm)
        found += norm_weights((*at, "mlp_norm"), q + "final_layer_norm", hidden, layer.norm)
    return found
