"""The file of --quantization-param-path: scales of an fp8 KV cache, one for each rank and layer.

Owns: the file's form and every message about it.
Reads: `errors`.
Never: imports torch; looks into a checkpoint.

    {"model_type": "llama" or null,
     "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.023, "1": 0.019, ...}, ...}}}     rank -> layer -> scale
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from oarlock.errors import ConfigError

FLAG = "--quantization-param-path"


def read_scales(path: str, model_type: str | None, num_layers: int, num_ranks: int) -> tuple[tuple[float, ...], ...]:
    """Each rank's scale of each layer; one scale serves keys and values.

    Raises:
        ConfigError: the file cannot be read, is of another model, or lacks a rank or layer; nothing is filled in.
    """
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is not JSON: {error}") from None
    cache = found.get("kv_cache") if isinstance(found, dict) else None
    ranks = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(cache, dict) or not isinstance(ranks, dict):
        raise _wrong(path, "must hold an object with kv_cache: {dtype, scaling_factor: {rank: {layer: scale}}}")
    if found.get("model_type") not in (None, model_type):
        raise _wrong(path, f"is for model_type {found['model_type']!r}, the model is {model_type!r}")
    if cache.get("dtype") != "float8_e4m3fn":
        raise _wrong(path, f"has scales for kv_cache.dtype {cache.get('dtype')!r}; float8_e4m3fn is the one that is scaled")
    if set(ranks) != {str(rank) for rank in range(num_ranks)}:
        raise _wrong(path, f"has scales for the ranks {_listed(ranks)}; --tensor-parallel-size {num_ranks} needs {_listed(map(str, range(num_ranks)))}")
    return tuple(_layers(path, rank, ranks[str(rank)], num_layers) for rank in range(num_ranks))


def _layers(path: str, rank: int, layers: Any, num_layers: int) -> tuple[float, ...]:
    wanted = [str(layer) for layer in range(num_layers)]
    if not isinstance(layers, dict) or set(layers) != set(wanted):
        has = f"{len(layers)} layers" if isinstance(layers, dict) else repr(layers)
        lacking = next((layer for layer in wanted if layer not in layers), None) if isinstance(layers, dict) else None
        raise _wrong(path, f"has {has} for rank {rank}; the model has {num_layers}, 0 to {num_layers - 1}" + (f", and {lacking} is missing" if lacking else ""))
    for layer in wanted:
        scale = layers[layer]
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
            raise _wrong(path, f"has the scale {scale!r:.40} for layer {layer} of rank {rank}; a number above 0 is needed")
    return tuple(float(layers[layer]) for layer in wanted)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _wrong(path: str, what: str) -> ConfigError:
    return ConfigError(f"{FLAG} {path}: {what}", "quantization-param-path")
