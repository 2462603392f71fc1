"""GPT-2: learned positions, layer norms, and linears that its checkpoints keep as [in, out].

Owns: how its config.json becomes a ModelSpec and where its tensors lie.
Reads: `model_summary`, `layers.spec`, `models.parts`.
Never: computes.
"""

from __future__ import annotations

from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec
from oarlock.runtime.models.parts import Path, Shard, activation_of, norm_weights, outer_weights, refuse_values


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    s, c = summary, summary.hf_config
    refuse_values(summary, add_cross_attention=False)
    norm = NormSpec("layer", c.get("layer_norm_epsilon", 1e-5))
    mlp = MlpSpec("plain", activation_of(summary, "activation_function", "gelu_new", allowed=("relu", "gelu", "gelu_tanh", "silu")))
    scale = s.head_dim**-0.5 if c.get("scale_attn_weights", True) else 1.0

    def layer(index: int) -> LayerSpec:
        divisor = index + 1 if c.get("scale_attn_by_inverse_layer_idx", False) else 1
        return LayerSpec(AttentionSpec(s.num_heads, s.num_kv_heads, s.head_dim, scale / divisor, rope=None), mlp, norm)

    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=tuple(layer(i) for i in range(s.num_layers)),
        norm=norm,
        learned_positions=c.get("n_positions") or c.get("max_position_embeddings") or 1024,
        tie_embeddings=s.tie_word_embeddings,
    )


def _transposed(at: Path, name: str, rows: int, width: int, shard: Shard, split: tuple[tuple[int, int], ...] = ()) -> list[WeightSpec]:
    """A linear that the checkpoint keeps as [width, rows], with its bias."""
    bias_shard: Shard = "column" if shard == "column" else "none"
    return [
        WeightSpec((*at, "weight"), (f"{name}.weight",), ((width, rows),), shard, transpose=True, split=split, kind="linear"),
        WeightSpec((*at, "bias"), (f"{name}.bias",), ((rows,),), bias_shard, split=split),
    ]


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    p, hidden = "transformer.", spec.hidden_size
    width = summary.hf_config.get("n_inner") or 4 * hidden
    found = outer_weights(spec, prefix=p, embed="wte", norm="ln_f")
    found.append(WeightSpec(("positions", "weight"), (p + "wpe.weight",), ((spec.learned_positions, hidden),), kind="embedding"))
    for i, layer in enumerate(spec.layers):
        q, at = f"{p}h.{i}.", ("layers", i)
        found += _transposed((*at, "qkv"), q + "attn.c_attn", 3 * hidden, hidden, "column", ((hidden, layer.attention.num_heads),) * 3)
        found += _transposed((*at, "o"), q + "attn.c_proj", hidden, hidden, "row")
        found += _transposed((*at, "up"), q + "mlp.c_fc", width, hidden, "column")
        found += _transposed((*at, "down"), q + "mlp.c_proj", hidden, width, "row")
        found += norm_weights((*at, "attention_norm"), q + "ln_1", hidden, layer.norm)
        found += norm_weights((*at, "mlp_norm"), q + "ln_2", hidden, layer.norm)
    return found
