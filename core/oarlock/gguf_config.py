"""Say a GGUF header's metadata in the keys of a Hugging Face config.json.

Owns: the table of GGUF architectures and their keys.
Reads: `gguf_header`, `errors`.
Never: derives anything from the config (`model_summary` does); reads weights, bar the few floats of rope factors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oarlock.errors import ModelError, UnsupportedArchitecture
from oarlock.gguf_header import GGUFHeader

# GGUF architecture -> (HF architecture, HF model_type, fixed config values that the header does not carry).
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {"hidden_act": "silu"}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {"hidden_act": "silu", "use_sliding_window": False, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", {"hidden_act": "silu", "no_rope_layer_interval": 4, "use_sliding_window": False}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "gemma2",
        {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 6}),
    "phi3": ("Phi3ForCausalLM", "phi3", {"hidden_act": "silu"}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {"activation_function": "gelu_new"}),
}
# GGUF key (after "<architecture>.") -> HF key. Keys that are absent stay absent.
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GPT2_KEYS = {
    "max_position_embeddings": "n_positions", "num_hidden_layers": "n_layer", "hidden_size": "n_embd",
    "intermediate_size": "n_inner", "num_attention_heads": "n_head",
}  # fmt: skip
_TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}  # general.file_type of files that are not quantised


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """The config.json that this file would have had.

    Raises:
        UnsupportedArchitecture: the architecture is not in the table.
        ModelError: a key that every architecture has is missing, or the file is one of several parts.
    """
    meta = header.metadata
    name = meta.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedArchitecture(f"{header.path}: GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if meta.get("split.count", 1) > 1:
        raise ModelError(f"{header.path} is one of {meta['split.count']} parts of a model; join them first (llama-gguf-split --merge)")
    architecture, model_type, fixed = ARCHITECTURES[name]
    config: dict[str, Any] = {"model_type": model_type, **fixed}
    for key, hf_key in _KEYS.items():
        if f"{name}.{key}" in meta:
            config[hf_key] = _number(header, f"{name}.{key}")
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if key not in config:
            raise ModelError(f"{header.path} is corrupt: its metadata lacks the key for {key}")
    experts = meta.get(f"{name}.expert_count", 0)
    if experts:
        config["num_local_experts" if name == "llama" else "num_experts"] = experts
        if name == "llama":
            architecture, config["model_type"] = "MixtralForCausalLM", "mixtral"
    config["vocab_size"] = _vocab_size(header, name)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    for key, hf_key in _TOKEN_IDS.items():
        if f"tokenizer.ggml.{key}" in meta:
            config[hf_key] = meta[f"tokenizer.ggml.{key}"]
    ends = [
        meta[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id") if key in meta
    ]
    if len(set(ends)) > 1:
        config["eos_token_id"] = list(dict.fromkeys(ends))
    _biases(header, config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = meta.get(f"{name}.rope.dimension_count") or head_dim
    if rotary_dim < head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _rope_scaling(header, name)
    if scaling:
        config["rope_scaling"] = scaling
    # Quantised files carry no dtype. Gemma's activations leave float16's range; the others were made for it.
    quantised = "bfloat16" if name.startswith("gemma") else "float16"
    plain = _DTYPES.get(meta.get("general.file_type", -1))
    config["dtype"], config["gguf_blocks"] = plain or quantised, plain is None
    _special_cases(name, config)
    config["architectures"] = [architecture]
    return config


def _number(header: GGUFHeader, key: str) -> Any:
    """A scalar, or the common value of a per-layer array."""
    value = header.metadata[key]
    if isinstance(value, np.ndarray):
        if len(set(value.tolist())) != 1:
            raise ModelError(f"{header.path}: {key} differs from layer to layer ({value.tolist()}), which is not supported")
        return value.tolist()[0]
    return value


def _vocab_size(header: GGUFHeader, name: str) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    return int(header.metadata.get(f"{name}.vocab_size") or header.array_lengths.get("tokenizer.ggml.tokens", 0))


def _biases(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Llama and Qwen3 say by a flag whether attention has biases; the file says it by having them."""
    if config["model_type"] in ("llama", "qwen3", "smollm3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors


def _rope_scaling(header: GGUFHeader, name: str) -> dict[str, Any] | None:
    meta, prefix = header.metadata, f"{name}.rope.scaling"
    original = meta.get(f"{prefix}.original_context_length")
    if "rope_factors_long.weight" in header.tensors:
        factors = {kind: _floats(header, f"rope_factors_{kind}.weight") for kind in ("short", "long")}
        return {
            "rope_type": "longrope", "short_factor": factors["short"], "long_factor": factors["long"],
            "original_max_position_embeddings": original,
            **({"attention_factor": meta[f"{prefix}.attn_factor"]} if f"{prefix}.attn_factor" in meta else {}),
        }  # fmt: skip
    if "rope_freqs.weight" in header.tensors:
        # Llama 3.1's scaling is stored as its result, one divisor a frequency; the lowest frequency has the plain factor.
        return {
            "rope_type": "llama3", "factor": max(_floats(header, "rope_freqs.weight")), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": original or 8192,
        }  # fmt: skip
    kind, factor = meta.get(f"{prefix}.type"), meta.get(f"{prefix}.factor")
    if kind in (None, "none") or factor in (None, 0.0):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    return {**scaling, "original_max_position_embeddings": original} if original else scaling


def _floats(header: GGUFHeader, tensor_name: str) -> list[float]:
    tensor = header.tensors.get(tensor_name)
    if tensor is None or tensor.type_name != "F32":
        raise ModelError(f"{header.path}: {tensor_name} must be there and float32")
    return [float(value) for value in np.fromfile(header.path, "<f4", tensor.nbytes // 4, offset=tensor.offset)]


def _special_cases(name: str, config: dict[str, Any]) -> None:
    if name == "gpt2":
        for key, gpt2_key in _GPT2_KEYS.items():
            if key in config:
                config[gpt2_key] = config.pop(key)
    if name == "gemma3":
        # The header holds the base of the full layers only. 27B (62 layers) scales by hidden size over heads, others by head_dim.
        config.setdefault("rope_local_base_freq", 10000.0)
        wide = config["num_hidden_layers"] == 62
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    if name == "gemma2":
        wide = config["num_hidden_layers"] == 46
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
