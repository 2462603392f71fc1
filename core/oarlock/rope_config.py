"""One shape for a config's rotary settings, whichever way the checkpoint or a flag spells them.

Owns: `rope_parameters`, `rope_theta`, `rope_scaling` and `rope_local_base_freq` of `ModelSummary.hf_config`.
Reads: `errors`.
Never: computes frequencies (`runtime` does).

After `normalise_rope` a config that has rotary settings holds
    rope_theta      float, of the full-attention layers
    rope_scaling    None, or an object with rope_type (never "default") and its values; of the full-attention layers
    rope_local_base_freq   float, of the windowed layers, where they differ
    rope_parameters        absent: it is said by the three above
"""

from __future__ import annotations

from typing import Any

from oarlock.errors import ConfigError, ModelError

_WITHOUT_FACTOR = frozenset(("su", "longrope", "default", "mrope"))
_KEEP_LENGTH = frozenset(("su", "longrope", "llama3", "default", "mrope"))  # max_position_embeddings holds the scaled length already


def merge_rope_flags(hf_config: dict[str, Any], scaling: dict[str, Any] | None, theta: float | None) -> dict[str, Any]:
    """`--rope-scaling` and `--rope-theta` over the config's own values. Returns a new dict.

    Raises:
        ConfigError: the scaling lacks its type or factor, or a number is not positive.
    """
    merged = normalise_rope(hf_config)
    if theta is not None:
        if not theta > 0:
            raise ConfigError(f"--rope-theta must be positive, got {theta}", option="--rope-theta")
        merged["rope_theta"] = float(theta)
    if scaling is not None:
        kind = scaling.get("rope_type", scaling.get("type"))
        if not isinstance(kind, str):
            raise ConfigError(f"--rope-scaling needs a rope_type (or type), got {scaling}", option="--rope-scaling")
        factor = scaling.get("factor")
        if kind not in _WITHOUT_FACTOR and (isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0):
            raise ConfigError(f"--rope-scaling of type {kind} needs a positive factor, got {scaling}", option="--rope-scaling")
        merged["rope_scaling"] = scaling
    return merged


def normalise_rope(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The shape of the module's header. Returns a new dict."""
    config = dict(hf_config)
    parameters = config.pop("rope_parameters", None)
    if isinstance(parameters, dict):
        if isinstance(parameters.get("sliding_attention"), dict):
            local = parameters["sliding_attention"]
            if "rope_theta" in local:
                config["rope_local_base_freq"] = _number(local["rope_theta"])
            parameters = parameters.get("full_attention") or {}
        parameters = dict(parameters)
        if "rope_theta" in parameters:
            config["rope_theta"] = _number(parameters.pop("rope_theta"))
        if "partial_rotary_factor" in parameters:
            config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        config["rope_scaling"] = parameters
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling = dict(scaling)
        kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
        scaling.pop("type", None)
        kind = "longrope" if kind == "su" else kind
        config["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **scaling}
    return config


def _number(theta: Any) -> float:
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ModelError(f"config value rope_theta must be a number, got {theta!r:.80}")
    return float(theta)


def scaled_length(hf_config: dict[str, Any], length: int) -> int:
    """The context that rope scaling gives a model whose config says `length` tokens."""
    scaling = hf_config.get("rope_scaling")
    # Gemma 3 states the scaled length in its config.
    if not scaling or scaling["rope_type"] in _KEEP_LENGTH or "gemma3" in hf_config.get("model_type", ""):
        return length
    if scaling["rope_type"] == "yarn":
        length = scaling.get("original_max_position_embeddings") or length
    return int(length * scaling.get("factor", 1.0))
