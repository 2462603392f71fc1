"""The fp8 KV cache: its dtype, and the scale of each layer's keys and values.

Owns: which tensors of a checkpoint are such scales, and where scales come from.
Reads: `config`, `kv_scales`, `model_summary`, `errors`, a checkpoint.
Never: quantises a key (layers scale, attention casts).

e4m3 keeps key / scale, of one scale for each layer; e5m2 has the range for a plain cast, and takes none.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from oarlock.config.sections import EngineConfig
from oarlock.errors import WeightMismatch
from oarlock.kv_scales import read_scales
from oarlock.model_summary import ModelSummary

KV_SCALE = re.compile(r"\blayers\.(\d+)\..*\b(k_scale|v_scale|kv_scale)$")
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
Scales = tuple[tuple[float, float], ...]  # of each layer: (keys, values)


def cache_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """What --kv-cache-dtype names; `auto` is the model's."""
    return DTYPES.get(name, model)


def layer_scales(config: EngineConfig, summary: ModelSummary, source: Any, rank: int) -> Scales:
    """The scales of this rank's layers: those of --quantization-param-path, else the checkpoint's, else 1.

    Raises:
        ConfigError: the file is not what it must be.
        WeightMismatch: a scale in the checkpoint is no positive number, or a layer has one for keys alone.
    """
    if config.cache.kv_cache_dtype != "fp8_e4m3":
        return ()
    if config.cache.kv_scales_path is not None:
        given = read_scales(config.cache.kv_scales_path, summary.hf_config.get("model_type"), summary.num_layers, config.parallel.tensor_parallel_size)
        return tuple((scale, scale) for scale in given[rank])
    found: dict[int, dict[str, float]] = {}
    for name in source.names():
        match = KV_SCALE.search(name)
        if match is not None:
            kinds = ("k_scale", "v_scale") if match[2] == "kv_scale" else (match[2],)
            found.setdefault(int(match[1]), {}).update(dict.fromkeys(kinds, _number(name, source.get(name))))
    half = next((layer for layer, scales in found.items() if len(scales) == 1), None)
    if half is not None:
        raise WeightMismatch(f"layer {half} of the checkpoint has {', '.join(found[half])} and not the other; an fp8 KV cache needs scales for keys and values")
    return tuple((found[n]["k_scale"], found[n]["v_scale"]) if n in found else (1.0, 1.0) for n in range(summary.num_layers))


def _number(name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1:
        raise WeightMismatch(f"{name} has shape {list(tensor.shape)}; one scale for the whole layer is served")
    scale = float(tensor.float())
    if not math.isfinite(scale) or scale <= 0:
        raise WeightMismatch(f"{name} is {scale}; a scale must be a number above 0")
    return scale
