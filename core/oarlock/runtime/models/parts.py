"""Weight lists and settings that many families share.

Owns: the usual names (model.layers.N.self_attn.q_proj, ...) and how they map to the weight tree.
Reads: `model_summary`, `layers.spec`, `errors`.
Never: decides what a family is made of.
"""

from __future__ import annotations

from typing import Any, Literal

from oarlock.errors import ModelError
from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.spec import AttentionSpec, ModelSpec, NormSpec, RopeSpec, WeightSpec

Path = tuple[str | int, ...]
Shard = Literal["column", "row", "vocab", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# What checkpoints call them. "gelu_new" and "gelu_fast" spell the tanh approximation out.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip


def activation_of(summary: ModelSummary, key: str, default: str, allowed: tuple[str, ...] = ("silu", "gelu", "gelu_tanh")) -> Activation:
    """The activation that config value `key` names.

    Raises:
        ModelError: it is none that this family's feed-forward can apply.
    """
    name = summary.hf_config.get(key) or default
    found = _ACTIVATIONS.get(name)
    if found is None or found not in allowed:
        known = ", ".join(name for name, kind in _ACTIVATIONS.items() if kind in allowed)
        raise ModelError(f"{summary.path}: config value {key} is {name!r}; {summary.architecture} is served with {known}")
    return found


def refuse_values(summary: ModelSummary, **plain: Any) -> None:
    """Refuse config values that this family's file does not compute. `plain` is each key's only served value.

    Raises:
        ModelError: a key has another value.
    """
    for key, value in plain.items():
        found = summary.hf_config.get(key, value)
        if found != value:
            raise ModelError(f"{summary.path}: config value {key} is {found!r}; {summary.architecture} is served only with {value!r}")


def rope_of(summary: ModelSummary, *, theta: float = 10000.0) -> RopeSpec:
    """The rotary settings of the model's full-attention layers. `theta` is the family's, for a config that is silent."""
    c: dict[str, Any] = summary.hf_config
    scaling = c.get("rope_scaling")
    if scaling and c.get("original_max_position_embeddings"):  # Phi-3 keeps it beside the scaling
        scaling = {"original_max_position_embeddings": c["original_max_position_embeddings"], **scaling}
    rotated = int(summary.head_dim * (c.get("partial_rotary_factor") or 1.0))
    return RopeSpec(rotated, float(c.get("rope_theta") or theta), scaling, int(c.get("max_position_embeddings") or 0))


def outer_weights(spec: ModelSpec, *, prefix: str = "model.", embed: str = "embed_tokens", norm: str = "norm") -> list[WeightSpec]:
    """Embedding, final norm and head. A tied head shares the embedding and is set by the worker."""
    hidden, vocab, width = spec.hidden_size, spec.vocab_size, spec.embed_size or spec.hidden_size
    found = [WeightSpec(("embed", "weight"), (f"{prefix}{embed}.weight",), ((vocab, width),), kind="embedding")]
    if spec.final_norm:
        found += norm_weights(("final_norm",), f"{prefix}{norm}", hidden, spec.norm)
    if not spec.tie_embeddings:
        found.append(WeightSpec(("lm_head", "weight"), ("lm_head.weight",), ((vocab, width),), "vocab", kind="lm_head"))
    return found


def norm_weights(at: Path, name: str, size: int, norm: NormSpec) -> list[WeightSpec]:
    """A norm's weight, and the bias that layer norms have."""
    # weight + 1 has too many digits for 16 bits.
    dtype = "float32" if norm.unit_offset else None
    found = [WeightSpec((*at, "weight"), (f"{name}.weight",), ((size,),), unit_offset=norm.unit_offset, kind="norm", dtype=dtype)]
    if norm.kind == "layer":
        found.append(WeightSpec((*at, "bias"), (f"{name}.bias",), ((size,),), kind="norm"))
    return found


def linear_weights(
    at: Path, names: tuple[str, ...], outs: tuple[int, ...], width: int, shard: Shard, *, bias: bool = False, heads: tuple[int, ...] = ()
) -> list[WeightSpec]:
    """One linear, or several concatenated."""
    bias_shard: Shard = "column" if shard == "column" else "none"
    found = [WeightSpec((*at, "weight"), tuple(f"{n}.weight" for n in names), tuple((o, width) for o in outs), shard, heads=heads, kind="linear")]
    if bias:
        found.append(WeightSpec((*at, "bias"), tuple(f"{n}.bias" for n in names), tuple((o,) for o in outs), bias_shard, heads=heads))
    return found


def attention_weights(
    at: Path, prefix: str, hidden: int, a: AttentionSpec, *, out: str = "o_proj", qkv_bias: bool = False, out_bias: bool = False
) -> list[WeightSpec]:
    """Query, key and value as one column-parallel linear, the output as a row-parallel one; norms of query and key."""
    heads = (a.num_heads, a.num_kv_heads, a.num_kv_heads)
    names = tuple(f"{prefix}{part}_proj" for part in "qkv")
    return [
        *linear_weights((*at, "qkv"), names, tuple(h * a.head_dim for h in heads), hidden, "column", bias=qkv_bias, heads=heads),
        *linear_weights((*at, "o"), (f"{prefix}{out}",), (hidden,), a.num_heads * a.head_dim, "row", bias=out_bias),
    ]


def qk_norm_weights(at: Path, prefix: str, head_dim: int, norm: NormSpec) -> list[WeightSpec]:
    """The norms of each query head and each key head."""
    return [w for part in ("q_norm", "k_norm") for w in norm_weights((*at, part), f"{prefix}{part}", head_dim, norm)]


def gated_mlp_weights(at: Path, prefix: str, hidden: int, intermediate: int, *, bias: bool = False) -> list[WeightSpec]:
    """gate_proj and up_proj as one column-parallel linear, down_proj as a row-parallel one."""
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    return [
        *linear_weights((*at, "gate_up"), names, (intermediate, intermediate), hidden, "column", bias=bias),
        *linear_weights((*at, "down"), (f"{prefix}down_proj",), (hidden,), intermediate, "row", bias=bias),
    ]


def moe_weights(
    at: Path, router: str, expert: str, hidden: int, intermediate: int, num_experts: int, *, names: tuple[str, str, str]
) -> list[WeightSpec]:
    """Router, and stacked experts [num_experts, ...], each sharded along its intermediate size.

    `expert` holds {} for the expert's number; `names` are its gate, up and down linear.
    """
    gate, up, down = names
    ids = range(num_experts)
    w13 = tuple(f"{expert.format(e)}.{part}.weight" for e in ids for part in (gate, up))
    w2 = tuple(f"{expert.format(e)}.{down}.weight" for e in ids)
    return [
        *linear_weights((*at, "router"), (router,), (num_experts,), hidden, "none"),
        WeightSpec((*at, "experts", "w13"), w13, ((intermediate, hidden),) * len(w13), "column", stack=True, stack_parts=2, kind="experts"),
        WeightSpec((*at, "experts", "w2"), w2, ((hidden, intermediate),) * len(w2), "row", stack=True, kind="experts"),
    ]
