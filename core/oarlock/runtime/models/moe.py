"""Mixtral and Qwen3-MoE: Llama's and Qwen3's layers with a mixture of experts for a feed-forward.

Owns: which layers are sparse, and where routers and experts lie.
Reads: `model_summary`, `layers.spec`, `models.llama`, `models.parts`.
Never: computes.
"""

from __future__ import annotations

from oarlock.errors import ModelError
from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import LayerSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec
from oarlock.runtime.models.llama import attention_spec, layer_weights
from oarlock.runtime.models.parts import activation_of, gated_mlp_weights, moe_weights, outer_weights, rope_of


def model_spec(summary: ModelSummary) -> ModelSpec:
    """config.json as data."""
    s, c = summary, summary.hf_config
    mixtral = _is_mixtral(summary)
    norm = NormSpec("rms", c.get("rms_norm_eps", 1e-5 if mixtral else 1e-6))
    activation = activation_of(summary, "hidden_act", "silu", allowed=("silu",))
    experts, top_k = _experts(summary)
    renormalise = True if mixtral else bool(c.get("norm_topk_prob", False))
    sparse = MlpSpec("moe", activation, experts, top_k, renormalise)
    dense = MlpSpec("gated", activation)
    return ModelSpec(
        hidden_size=s.hidden_size,
        vocab_size=s.vocab_size,
        layers=tuple(LayerSpec(attention_spec(summary, i), sparse if _is_sparse(summary, i) else dense, norm) for i in range(s.num_layers)),
        norm=norm,
        rope={"default": rope_of(summary, theta=1_000_000.0 if mixtral else 10000.0)},
        tie_embeddings=s.tie_word_embeddings,
    )


def weight_specs(summary: ModelSummary, spec: ModelSpec) -> list[WeightSpec]:
    """Where each weight comes from."""
    found, hidden, mixtral = outer_weights(spec), spec.hidden_size, _is_mixtral(summary)
    for i, layer in enumerate(spec.layers):
        found += layer_weights(summary, layer, i)
        at, p = ("layers", i), f"model.layers.{i}."
        if layer.mlp.kind == "gated":
            found += gated_mlp_weights(at, p + "mlp.", hidden, summary.intermediate_size)
        elif mixtral:
            p, names = p + "block_sparse_moe.", ("w1", "w3", "w2")
            found += moe_weights(at, p + "gate", p + "experts.{}", hidden, summary.intermediate_size, layer.mlp.num_experts, names=names)
        else:
            p, names, width = p + "mlp.", ("gate_proj", "up_proj", "down_proj"), summary.hf_config.get("moe_intermediate_size", 768)
            found += moe_weights(at, p + "gate", p + "experts.{}", hidden, width, layer.mlp.num_experts, names=names)
    return found


def _is_mixtral(summary: ModelSummary) -> bool:
    return summary.architecture == "MixtralForCausalLM"


def _experts(summary: ModelSummary) -> tuple[int, int]:
    """(experts, experts of each token)."""
    c = summary.hf_config
    experts = c.get("num_local_experts") or c.get("num_experts") or (8 if _is_mixtral(summary) else 128)
    top_k = c.get("num_experts_per_tok") or (2 if _is_mixtral(summary) else 8)
    if top_k > experts:
        raise ModelError(f"{summary.path}: config value num_experts_per_tok is {top_k}, the model has {experts} experts")
    return experts, top_k


def _is_sparse(summary: ModelSummary, index: int) -> bool:
    """Qwen3-MoE may keep some layers dense."""
    c = summary.hf_config
    return _is_mixtral(summary) or (index not in (c.get("mlp_only_layers") or ()) and (index + 1) % c.get("decoder_sparse_step", 1) == 0)
