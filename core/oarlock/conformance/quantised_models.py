"""Quantised forms of a tiny model's checkpoint, packed here as the formats' descriptions say and without the code that reads them.

Owns: the kinds, and a packer for each.
Reads: torch, numpy.
Never: imports a reader; uses a device.

Weights are rounded to the nearest step, group by group: what a quantiser does at its simplest. `plain` holds what the codes mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "group_size": 16, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
_FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_INT8_TOKEN = {**_FP8_TOKEN, "type": "int"}


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp[.]gate$"]}


# kind -> quantization_config
KINDS: dict[str, dict[str, Any]] = {
    "gptq-2": {**_GPTQ, "bits": 2, "sym": False},
    "gptq-3": {**_GPTQ, "bits": 3, "checkpoint_format": "gptq_v2"},
    "gptq-4": {**_GPTQ, "bits": 4},
    "gptq-4-zeros": {**_GPTQ, "bits": 4, "sym": False, "group_size": 32},
    "gptq-4-order": {**_GPTQ, "bits": 4, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq-8": {**_GPTQ, "bits": 8, "group_size": -1},
    "gptq-8-zeros": {**_GPTQ, "bits": 8, "sym": False},
    "packed-4": _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "packed-4-zeros": _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    "packed-8": _compressed("pack-quantized", {"strategy": "channel"}),
    "int8": _compressed("int-quantized", {"strategy": "channel"}),
    "w8a8": _compressed("int-quantized", {"strategy": "channel"}, _INT8_TOKEN),
    "w8a8-static": _compressed("int-quantized", {"strategy": "tensor"}, {**_INT8_TOKEN, "strategy": "tensor", "dynamic": False}),
    "fp8": _compressed("float-quantized", {"type": "float", "strategy": "channel"}),
    "fp8-dynamic": _compressed("float-quantized", {"type": "float", "strategy": "channel"}, _FP8_TOKEN),
    "fp8-static": _compressed("float-quantized", {"type": "float", "strategy": "tensor"}, {**_FP8_TOKEN, "strategy": "tensor", "dynamic": False}),
    "fp8-block": _compressed(
        "float-quantized", {"type": "float", "strategy": "block", "block_structure": [16, 16]}, {**_FP8_TOKEN, "strategy": "group", "group_size": 16}
    ),
}
INPUT_AMAX = 6.0  # what static scales allow an activation


@dataclass(frozen=True, slots=True)
class Quantised:
    """A checkpoint in its quantised form."""

    settings: dict[str, Any]  # config.json's quantization_config
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)  # the same names as the unquantised checkpoint; float32


def linears_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights that quantisers quantise: projections and experts; embeddings, heads, routers and norms stay."""
    kept = ("embed", "lm_head", ".mlp.gate.", "block_sparse_moe.gate.", "wte", "wpe")
    return [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in kept)]


def quantise(kind: str, tensors: dict[str, torch.Tensor]) -> Quantised:
    """All linears of a checkpoint, whose weights are [out, in] (multiples of 32, groups dividing them). O(weights)."""
    made, linears = Quantised(KINDS[kind]), set(linears_of(tensors))
    for name, tensor in tensors.items():
        if name not in linears:
            made.tensors[name] = made.plain[name] = tensor
            continue
        stored, made.plain[name] = _gptq(tensor, made.settings) if kind.startswith("gptq") else _pack_compressed(tensor, made.settings)
        made.tensors.update({f"{name.removesuffix('weight')}{key}": value.contiguous() for key, value in stored.items()})
    return made


def packed_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, columns] of unsigned integers -> [rows, words] int32: one long string of bits a row, low bits first."""
    string = (codes.numpy().astype(np.int64)[..., None] >> np.arange(bits)) & 1
    string = string.reshape(codes.shape[0], -1).astype(np.uint8)
    string = np.pad(string, ((0, 0), (0, -string.shape[1] % 32)))
    return torch.from_numpy(np.packbits(string, axis=1, bitorder="little").view("<i4").copy())


def _round(weight: torch.Tensor, groups: torch.Tensor, bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [out, in] of 0 .. 2^bits - 1, zeros and scales [out, groups], meaning [out, in]). Scales are float16's numbers."""
    top, count = 2**bits - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(weight.shape[0], count), torch.full((weight.shape[0], count), 2.0 ** (bits - 1))
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (top // 2)
        else:
            scales[:, group] = (part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)) / top
    scales = scales.half().float().clamp(min=2.0**-14)
    if not symmetric:
        for group in range(count):
            # From 1: the older convention of gptq stores the zero less one.
            zeros[:, group] = (-weight[:, groups == group].amin(1) / scales[:, group]).round().clamp(1, top)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return codes, zeros, scales, (codes - zeros[:, groups]) * scales[:, groups]


def _gptq(weight: torch.Tensor, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    bits, columns = settings["bits"], weight.shape[1]
    size = columns if settings["group_size"] == -1 else settings["group_size"]
    groups = torch.arange(columns) // size
    if settings["desc_act"]:  # the same for all linears of one input, as a quantiser that goes by its inputs has it
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    codes, zeros, scales, plain = _round(weight, groups, bits, symmetric=settings["sym"])
    stored = zeros - int(settings["checkpoint_format"] == "gptq")
    found = {"qweight": packed_words(codes, bits).t(), "qzeros": packed_words(stored.t(), bits), "scales": scales.t().half()}
    return {**found, "g_idx": groups.to(torch.int32)}, plain


def _pack_compressed(weight: torch.Tensor, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    group = settings["config_groups"]["group_0"]
    args, layout, columns = group["weights"], settings["format"], weight.shape[1]
    inputs = group["input_activations"]
    static = {"input_scale": torch.tensor([INPUT_AMAX / (448.0 if args["type"] == "float" else 127.0)])} if inputs and not inputs["dynamic"] else {}
    if args["type"] == "float":
        rows, across = {"tensor": weight.shape, "channel": (1, columns), "block": args.get("block_structure")}[args["strategy"]]
        blocks = weight.reshape(weight.shape[0] // rows, rows, columns // across, across)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(FP8)
        plain = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
        return {"weight": codes.reshape(weight.shape), "weight_scale": scale.flatten() if args["strategy"] == "tensor" else scale, **static}, plain
    size = args.get("group_size", columns)
    if args["strategy"] == "tensor":
        weight_scale = (weight.abs().max() / 127).view(1)
        codes = (weight / weight_scale).round()
        return {"weight": codes.to(torch.int8), "weight_scale": weight_scale, **static}, codes * weight_scale
    codes, zeros, scales, plain = _round(weight, torch.arange(columns) // size, args["num_bits"], symmetric=args["symmetric"])
    if layout == "int-quantized":
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales, **static}, plain
    found = {"weight_packed": packed_words(codes, args["num_bits"]), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return found if args["symmetric"] else {**found, "weight_zero_point": packed_words(zeros.t(), args["num_bits"]).t()}, plain
