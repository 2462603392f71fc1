"""`ModelSpec` and `LayerSpec`: a model family as data.

Owns: the records that say how a decoder is put together.
Reads: nothing of ours.
Never: holds a weight.

A family turns config.json into a ModelSpec; core turns the spec into callables over the op registry. A family is a module or
object with two functions, as core's own are and as a plugin's is, which an `Extension(kind="model")` names:

    model_spec(summary) -> ModelSpec
    weight_specs(summary, spec) -> list[WeightSpec]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class NormSpec:
    """One kind of norm for the whole model."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    unit_offset: bool = False  # the checkpoint stores weight - 1 (Gemma); added at load, and kept in float32 as the sum needs


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer. Head counts are the whole model's; the model divides them over ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: str | None = "default"  # key of ModelSpec.rope; None: no rotary embedding
    rope_interleaved: bool = False
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False  # rms norm over each head, before the rotary embedding


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward part of one layer."""

    kind: Literal["gated", "plain", "moe"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    num_experts: int = 0
    top_k: int = 0
    renormalise: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    placement "pre": x + f(norm(x)). "sandwich": x + norm(f(norm(x))), as Gemma 2 and 3. "post": norm(x + f(x)), as OPT 350m.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    placement: Literal["pre", "sandwich", "post"] = "pre"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. Su et al. 2021, arXiv:2104.09864; `scaling` is config.json's rope_scaling."""

    dim: int  # rotated numbers per head
    theta: float = 10000.0
    scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder-only model."""

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: dict[str, RopeSpec] = field(default_factory=dict)
    embed_scale: float | None = None
    learned_positions: int = 0  # rows of the position table; 0: none
    position_offset: int = 0  # OPT starts at 2
    embed_size: int | None = None  # width of the embedding where it differs from hidden_size (OPT 350m projects in and out)
    final_norm: bool = True
    tie_embeddings: bool = False
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """How one tensor of the weight tree is made from the checkpoint.

    `sources` are checkpoint names, concatenated along dimension 0 after each is sharded on its own.
    """

    path: tuple[str | int, ...]  # ("layers", 3, "qkv", "weight")
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # per source, as the checkpoint keeps it; checked, and what --load-format dummy makes
    shard: Literal["column", "row", "vocab", "expert", "none"] = "none"
    transpose: bool = False  # the checkpoint keeps [in, out] (GPT-2)
    unit_offset: bool = False  # add one
    split: tuple[tuple[int, int], ...] = ()  # for a fused source: (rows, heads) per part, each sharded on its own
    heads: tuple[int, ...] = ()  # per source: head count, so that few KV heads are replicated over many ranks; 0: plain split
    stack: bool = False  # sources become a new leading dimension (experts), in order; each is sharded as if it stood alone
    stack_parts: int = 1  # with stack: this many consecutive sources are concatenated for each entry
    optional: bool = False  # absent from the checkpoint: absent from the tree
    kind: Literal["linear", "embedding", "norm", "experts", "other"] = "other"  # linears and experts may be packed by the device
    dtype: str | None = None  # keep in this dtype whatever the model's


__all__ = ["AttentionSpec", "LayerSpec", "MlpSpec", "ModelSpec", "NormSpec", "RopeSpec", "WeightSpec"]
