"""Rotary tables, made once on the host in float32: the same bits on every device.

Owns: frequencies for each rope_scaling type.
Reads: `layers.spec`.
Never: runs in a step.

Source: RoPE, Su et al. 2021, arXiv:2104.09864; YaRN, Peng et al. 2023, arXiv:2309.00071; LongRoPE, arXiv:2402.13753.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from oarlock.errors import ModelError
from oarlock.runtime.layers.spec import RopeSpec

SCALING_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su")


def rope_table(spec: RopeSpec, length: int) -> torch.Tensor:
    """cos and sin for positions 0 .. length - 1. [length, 2, dim / 2] float32, host.

    Raises:
        ModelError: an unknown scaling type.
    """
    frequencies, factor = inverse_frequencies(spec, length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.stack([angles.cos() * factor, angles.sin() * factor], 1)


def inverse_frequencies(spec: RopeSpec, length: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [dim / 2] float32, attention factor) for contexts of up to `length` tokens."""
    scaling = spec.scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "mrope"):
        return _plain(spec.theta, spec.dim), 1.0
    if kind == "linear":
        return _plain(spec.theta, spec.dim) / float(scaling["factor"]), 1.0
    if kind == "dynamic":
        return _dynamic(spec, scaling, length), 1.0
    if kind == "llama3":
        return _llama3(spec, scaling), 1.0
    if kind == "yarn":
        return _yarn(spec, scaling)
    if kind in ("longrope", "su"):
        return _longrope(spec, scaling, length)
    raise ModelError(f"rope_scaling type {kind!r} is not supported; supported are {', '.join(SCALING_TYPES)}")


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dynamic(spec: RopeSpec, scaling: dict[str, Any], length: int) -> torch.Tensor:
    """NTK-aware scaling, fixed at the served context length: one table for all positions, so that cached KV stays valid."""
    limit = spec.max_position_embeddings
    if length <= limit:
        return _plain(spec.theta, spec.dim)
    factor = float(scaling["factor"])
    base = spec.theta * ((factor * length / limit) - (factor - 1)) ** (spec.dim / (spec.dim - 2))
    return _plain(base, spec.dim)


def _llama3(spec: RopeSpec, scaling: dict[str, Any]) -> torch.Tensor:
    plain = _plain(spec.theta, spec.dim)
    factor, low, high = float(scaling["factor"]), float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(spec: RopeSpec, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    dim, theta = spec.dim, spec.theta
    original = float(scaling.get("original_max_position_embeddings") or spec.max_position_embeddings)
    factor = float(scaling.get("factor") or spec.max_position_embeddings / original)
    plain = _plain(theta, dim)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_factor(scaling, factor)


def _yarn_factor(scaling: dict[str, Any], factor: float) -> float:
    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(factor, float(scaling["mscale"])) / magnitude(factor, float(scaling["mscale_all_dim"]))
    return magnitude(factor)


def _longrope(spec: RopeSpec, scaling: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    """The long factors when the served context exceeds the original one, for all positions, so that cached KV stays valid."""
    original = float(scaling.get("original_max_position_embeddings") or spec.max_position_embeddings)
    chosen = scaling["long_factor"] if length > original else scaling["short_factor"]
    ext = torch.tensor(chosen, dtype=torch.float32)
    frequencies = 1.0 / (ext * spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim))
    if scaling.get("attention_factor") is not None:
        return frequencies, float(scaling["attention_factor"])
    factor = scaling.get("factor") or spec.max_position_embeddings / original
    return frequencies, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
