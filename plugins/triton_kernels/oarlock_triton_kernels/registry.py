"""The one table of what this package serves: op records, the attention, and the chapters of docs/kernels.md. No torch.

Owns: priorities; which dtypes and sizes each implementation serves.
Reads: `oarlock.backend_api`.
Never: imports a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oarlock.backend_api import AttentionSpec, OpImpl, Support, always

PRIORITY = 10  # above the reference (which needs no record); a device package that knows better takes more
DTYPES = ("float32", "float16", "bfloat16")
MAX_HEAD_DIM, MAX_GROUP, MIN_BLOCK_SIZE = 256, 64, 8
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, slots=True)
class Chapter:
    """One kernel, for the book and for the compile checks."""

    kernel: str  # "module:function" below oarlock_triton_kernels
    launches: str  # "launches.module:function" of a function that yields `launches.Launch` for each model that uses the kernel
    serves: tuple[str, ...]  # the ops that launch it, of the registry; "attention"
    has_products: bool = False  # it multiplies matrices: its code must use the chip's matrix units
    has_copies: bool = False  # it copies tiles by descriptors: its code must do so


def supports_dtype(*, dtype: Any, **_: Any) -> Support:
    """Ops in any of the model dtypes."""
    name = str(dtype).removeprefix("torch.")
    return Support(True) if name in DTYPES else Support(False, (f"the kernels compute in {', '.join(DTYPES)}, not in {name}",))


def _op(op: str, factory: str, prepare: str | None = None, supports: Any = supports_dtype, name: str = "triton", priority: int = PRIORITY) -> OpImpl:
    root = "oarlock_triton_kernels."
    return OpImpl(op=op, name=name, factory=root + factory, priority=priority, supports=supports, prepare=root + prepare if prepare else None)


# ---------------------------------------------------------------- attention
def supports_attention(*, dtype: Any, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int, **_: Any) -> Support:
    """Full and window layers, any soft cap."""
    reasons = list(supports_dtype(dtype=dtype).reasons)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head_dim {head_dim} exceeds {MAX_HEAD_DIM}")
    if num_heads // num_kv_heads > MAX_GROUP:
        reasons.append(f"{num_heads // num_kv_heads} query heads for each kv head are more than {MAX_GROUP}")
    if block_size < MIN_BLOCK_SIZE:
        reasons.append(f"block_size {block_size} is less than {MIN_BLOCK_SIZE}")
    return Support(not reasons, tuple(reasons))


ATTENTION = (
    AttentionSpec(
        name="triton", factory="oarlock_triton_kernels.attention:TritonAttention", priority=PRIORITY, supports=supports_attention, kv_dtypes=KV_DTYPES
    ),
)

# ---------------------------------------------------------------- norms, rotary, activations
ELEMENTWISE: tuple[OpImpl, ...] = tuple(
    _op(op, f"elementwise:{op}") for op in ("rms_norm", "fused_add_rms_norm", "layer_norm", "rotary", "silu_and_mul", "gelu_and_mul", "activation")
)

# ---------------------------------------------------------------- experts
MOE: tuple[OpImpl, ...] = (
    _op("moe_topk", "moe:moe_topk"),
    _op("moe_experts", "moe:moe_experts"),
    *(_op(f"moe_experts_{scheme}", "moe:moe_experts_of_codes", f"codes:pack_{scheme}") for scheme in ("int4", "int8", "fp8")),
)

# ---------------------------------------------------------------- logits: sampling, penalties, log-probabilities
SAMPLING: tuple[OpImpl, ...] = (  # logits are float32 whatever the model's dtype
    *(_op(op, f"sampling:{op}", supports=always) for op in ("greedy", "sample")),
    *(_op(op, f"logits:{op}", supports=always) for op in ("apply_penalties", "apply_bias", "apply_mask", "logprobs")),
)

# ---------------------------------------------------------------- linears
LINEAR: tuple[OpImpl, ...] = (  # a plain one is the library's
    *(_op(f"linear_{scheme}", "linear_codes:linear", f"codes:pack_{scheme}") for scheme in ("int4", "int8", "fp8")),
    _op("linear_w8a8", "linear_w8a8:linear_int8", "linear_w8a8:pack_int8"),
    _op("linear_w8a8_fp8", "linear_w8a8:linear_fp8", "linear_w8a8:pack_fp8"),
    _op("lm_head", "linear_codes:lm_head", "linear_codes:head"),
    _op("embedding", "linear_codes:embedding", "linear_codes:table"),
)

BY_DESCRIPTORS: tuple[OpImpl, ...] = tuple(  # with --triton-descriptors
    _op(op, f"linear_tiles:linear_{kind}", f"linear_tiles:pack_{kind}", name="triton-descriptors", priority=PRIORITY + 1)
    for op, kind in (("linear_w8a8", "int8"), ("linear_w8a8_fp8", "fp8"))
)

OPS: tuple[OpImpl, ...] = (*ELEMENTWISE, *MOE, *SAMPLING, *LINEAR)

_ATTENTION = ("attention",)
_EXPERTS = tuple(impl.op for impl in MOE if impl.op != "moe_topk")
_CODES = ("linear_int4", "linear_int8", "linear_fp8", "lm_head")
_EIGHT_BITS = ("linear_w8a8", "linear_w8a8_fp8")

CHAPTERS: tuple[Chapter, ...] = (
    Chapter("cache:write_kv_kernel", "launches.attention:write_kv", _ATTENTION),
    Chapter("qkv:qkv_kernel", "launches.attention:write_qkv", _ATTENTION),
    Chapter("attention_chunks:attend_chunks_kernel", "launches.attention:chunks", _ATTENTION, has_products=True),
    Chapter("attention_chunks:attend_join_kernel", "launches.attention:join", _ATTENTION),
    Chapter("attention_decode:plan_decodes_kernel", "launches.attention:plan", _ATTENTION),
    Chapter("attention_decode:attend_split_kernel", "launches.attention:split", _ATTENTION, has_products=True),
    Chapter("attention_decode:attend_prefix_kernel", "launches.attention:prefix", _ATTENTION, has_products=True),
    Chapter("attention_decode:attend_merge_kernel", "launches.attention:merge", _ATTENTION),
    *(
        Chapter(f"elementwise:{name}_kernel", f"launches.elementwise:{name}", (name,))
        for name in ("rms_norm", "fused_add_rms_norm", "layer_norm", "rotary")
    ),
    Chapter("elementwise:activation_kernel", "launches.elementwise:activation", ("silu_and_mul", "gelu_and_mul", "activation")),
    Chapter("moe:topk_kernel", "launches.moe:topk", ("moe_topk",)),
    *(Chapter(f"moe:{name}_kernel", "launches.moe:experts", _EXPERTS) for name in ("count_pairs", "place_pairs")),
    Chapter("moe:reorder_kernel", "launches.moe:scattered", ("moe_experts_int4", "moe_experts_int8")),
    *(Chapter(f"moe:{name}_kernel", "launches.moe:experts", _EXPERTS, has_products=True) for name in ("gate_up", "down")),
    Chapter("moe:combine_kernel", "launches.moe:experts", _EXPERTS),
    Chapter("linear_codes:linear_kernel", "launches.linear:weight_only", _CODES, has_products=True),
    Chapter("linear_w8a8:round_rows_kernel", "launches.linear:eight_bits", _EIGHT_BITS),
    Chapter("linear_w8a8:linear_8bit_kernel", "launches.linear:eight_bits", _EIGHT_BITS, has_products=True),
    Chapter("linear_tiles:linear_tiles_kernel", "launches.tiles:tiles", _EIGHT_BITS, has_products=True, has_copies=True),
    *(Chapter(f"sampling:{name}_kernel", "launches.sampling:sample", ("sample",)) for name in ("survey", "cut")),
    *(Chapter(f"sampling:{name}_kernel", "launches.sampling:sample", ("greedy", "sample")) for name in ("draw", "pick")),
    *(Chapter(f"logits:{name}_kernel", "launches.sampling:apply_penalties", ("apply_penalties",)) for name in ("count", "penalties")),
    Chapter("logits:bias_kernel", "launches.sampling:apply_bias", ("apply_bias",)),
    Chapter("logits:mask_kernel", "launches.sampling:apply_mask", ("apply_mask",)),
    *(Chapter(f"logits:{name}_kernel", "launches.sampling:logprobs", ("logprobs",)) for name in ("chunk_logprobs", "logprobs")),
)
