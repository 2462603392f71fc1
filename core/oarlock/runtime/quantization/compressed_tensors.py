"""compressed-tensors checkpoints: packed int4 and int8 weights, int8 with int8 activations, fp8 with and without fp8 activations.

Owns: how its settings choose modules, and how its tensors become the common form.
Reads: `backend_api.runtime`, `quantization.packing`.
Never: opens a file.

    pack-quantized    weight_packed [out, words] int32, packed along in with 2^(bits-1) added; weight_scale; weight_shape [2];
                      asymmetric: weight_zero_point [out * bits / 32, groups] int32, packed along out in the same way
    int-quantized     weight [out, in] int8; weight_scale; asymmetric: weight_zero_point of the scale's shape, int8
    float-quantized   weight [out, in] float8_e4m3fn; weight_scale
    weight_scale      [1] for a tensor, [out, 1] for channels, [out, groups] for groups, [out / rows, in / columns] for blocks
    input_scale       [1], where activations are static; weight_g_idx [in] int32, where activation order scattered the groups
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight, StoredTensor
from oarlock.runtime.quantization.packing import unpack_words, words_for
from oarlock.runtime.quantization.patterns import check_pattern

FP8 = torch.float8_e4m3fn
READ = "pack-quantized (4 and 8 bits), int-quantized (8 bits) and float-quantized (8 bits)"
_PLAIN = ("dense",)


@dataclass(frozen=True, slots=True)
class WeightArgs:
    """What one config group says of its weights."""

    bits: int
    kind: str  # "int" or "float"
    strategy: str  # "tensor", "channel", "group" or "block"
    group_size: int  # of "group"
    block: tuple[int, int]  # rows and columns of "block"
    symmetric: bool
    ordered: bool  # weight_g_idx says the group of each column

    def scale_shape(self, out_size: int, in_size: int) -> tuple[int, ...]:
        """Raises ValueError for sizes that the groups do not divide."""
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "channel":
            return (out_size, 1)
        size = self.group_size if self.strategy == "group" else self.block[1]
        if in_size % size:
            raise ValueError(f"its {in_size} inputs are no multiple of the {self.strategy} size {size}")
        return (out_size if self.strategy == "group" else -(-out_size // self.block[0]), in_size // size)


class CompressedFormat(LinearFormat):
    """Linears of one config group."""

    def __init__(self, layout: str, weights: WeightArgs, activations: str) -> None:
        """`activations`: "none", "dynamic" or "static"."""
        self.layout, self.weights, self.activations = layout, weights, activations

    @property
    def scheme(self) -> Any:
        if self.weights.kind == "float":
            return "fp8" if self.activations == "none" else "w8a8_fp8"
        if self.activations != "none":
            return "w8a8"
        return "int4" if self.weights.bits == 4 else "int8"

    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        w = self.weights
        scale = w.scale_shape(out_size, in_size)
        found = {"weight_scale": StoredTensor(scale)}
        if self.layout == "pack-quantized":
            found["weight_packed"] = StoredTensor((out_size, words_for(in_size, w.bits)), torch.int32)
            found["weight_shape"] = StoredTensor((2,), torch.int64, optional=True)
            if not w.symmetric:
                found["weight_zero_point"] = StoredTensor((words_for(out_size, w.bits), scale[-1]), torch.int32)
        else:
            found["weight"] = StoredTensor((out_size, in_size), FP8 if w.kind == "float" else torch.int8)
            if not w.symmetric:
                found["weight_zero_point"] = StoredTensor(scale, torch.int8)
        if w.ordered:
            found["weight_g_idx"] = StoredTensor((in_size,), torch.int32, is_index=True)
        if self.activations == "static":
            found["input_scale"] = StoredTensor((1,))
        return found

    def check(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> None:
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [out_size, in_size]:
            raise ValueError(f"weight_shape says {tensors['weight_shape'].tolist()}, config.json calls for {[out_size, in_size]}")
        if self.weights.ordered and not 0 <= int(tensors["weight_g_idx"].min()) <= int(tensors["weight_g_idx"].max()) < tensors["weight_scale"].shape[1]:
            raise ValueError(f"weight_g_idx holds groups outside 0 .. {tensors['weight_scale'].shape[1] - 1}")

    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        w, zeros = self.weights, None
        if self.layout == "pack-quantized":
            codes = unpack_words(tensors["weight_packed"], w.bits, in_size)
            if not w.symmetric:
                zeros = unpack_words(tensors["weight_zero_point"].t(), w.bits, out_size).t().to(torch.int16)
            if w.bits == 8:
                codes, zeros = (codes.to(torch.int16) - 128).to(torch.int8), None if zeros is None else zeros - 128
        else:
            codes = tensors["weight"]
            zeros = None if w.symmetric else self._per_row(tensors["weight_zero_point"], out_size).to(torch.int16)
        scales = self._per_row(tensors["weight_scale"], out_size).float()
        static = tensors["input_scale"].float() if self.activations == "static" else None
        return QuantizedWeight(codes, scales, zeros, groups=tensors["weight_g_idx"] if w.ordered else None, input_scale=static)

    def _per_row(self, scale: torch.Tensor, out_size: int) -> torch.Tensor:
        """[out, groups], from any strategy's shape."""
        if self.weights.strategy == "tensor":
            return scale.view(1, 1).expand(out_size, 1)
        return scale.repeat_interleave(self.weights.block[0], 0)[:out_size] if self.weights.strategy == "block" else scale


class CompressedTensors(Quantization):
    """The settings of one checkpoint: groups of modules, and modules left out."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, dict):
            raise ValueError(f"config_groups is {groups!r:.80}; an object of groups is needed")  # noqa: TRY004  what a factory promises
        _refuse_extras(settings)
        self._ignore = tuple(settings.get("ignore") or ())
        self._groups: list[tuple[tuple[str, ...], CompressedFormat | None]] = [
            (tuple(group.get("targets") or ("Linear",)), _format(name, group, settings.get("format"))) for name, group in groups.items()
        ]
        for where, targets in (("ignore", self._ignore), *(("targets", targets) for targets, _ in self._groups)):
            for target in targets:
                if not isinstance(target, str):
                    raise ValueError(f"{where} has {target!r:.80}; names of modules are needed")  # noqa: TRY004  as above
                if target.startswith("re:"):
                    check_pattern(target[3:], where)

    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        """Modules by name or regular expression before modules by class."""
        if any(_matches(target, prefix) for target in self._ignore):
            return None
        by_name = next((found for targets, found in self._groups if any(_matches(target, prefix) for target in targets)), None)
        return by_name or next((found for targets, found in self._groups if "Linear" in targets), None)


def _matches(target: str, prefix: str) -> bool:
    """A name (perhaps within a composite), or "re:" and a regular expression that matches from the beginning."""
    if target.startswith("re:"):
        return re.match(target[3:], prefix) is not None
    return target == prefix or target.endswith(f".{prefix}")


def _refuse_extras(settings: dict[str, Any]) -> None:
    """Raises ValueError for what would change results and is not computed."""
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity not in _PLAIN:
        raise ValueError(f"sparsity_config.format is {sparsity!r}; sparse weights are not read")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ValueError("transform_config holds transforms of weights or activations, which are not computed")


def _format(name: str, group: dict[str, Any], overall: str | None) -> CompressedFormat | None:
    """Raises ValueError for settings that are not read."""
    weights = group.get("weights")
    if weights is None:
        return None
    args, layout, inputs = _weight_args(name, weights), group.get("format") or overall, group.get("input_activations")
    if layout in ("naive-quantized", "mixed-precision", None):
        layout = "float-quantized" if args.kind == "float" else "int-quantized"
    bits = {"pack-quantized": ((4, "int"), (8, "int")), "int-quantized": ((8, "int"),), "float-quantized": ((8, "float"),)}.get(layout)
    if bits is None or (args.bits, args.kind) not in bits:
        raise ValueError(f"config group {name} holds {args.bits}-bit {args.kind} weights as {layout}; {READ} are read")
    activations = _activations(name, inputs, args)
    if group.get("output_activations"):
        raise ValueError(f"config group {name} quantises output activations, which is not computed")
    if activations != "none" and args.kind == "int" and (args.strategy == "group" or not args.symmetric or args.bits != 8):
        raise ValueError(f"config group {name} has 8-bit activations beside weights that are not symmetric 8-bit ones with a scale for each tensor or channel")
    return CompressedFormat(layout, args, activations)


def _weight_args(name: str, weights: dict[str, Any]) -> WeightArgs:
    strategy = weights.get("strategy") or ("group" if (weights.get("group_size") or -1) > 0 else "channel" if weights.get("group_size") == -1 else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ValueError(f"config group {name} scales weights by {strategy}; tensor, channel, group and block are read")
    ordered = weights.get("actorder") in ("group", "dynamic", True)
    block = weights.get("block_structure") or (1, 1)
    if isinstance(block, str):
        block = [int(part) for part in block.split("x")]
    size = int(weights.get("group_size") or 0)
    if strategy == "group" and size < 1:
        raise ValueError(f"config group {name} has group_size {weights.get('group_size')!r}; a positive number is needed")
    kind = str(weights.get("type", "int")).lower()
    if not weights.get("symmetric", True) and (kind == "float" or strategy not in ("group", "channel")):
        raise ValueError(f"config group {name} has zero points with {kind} weights by {strategy}; they are read with integers by group or channel")
    if ordered and (kind == "float" or strategy != "group"):
        raise ValueError(f"config group {name} has actorder {weights['actorder']!r} with {kind} weights by {strategy}; it is read with integers by group")
    symmetric = bool(weights.get("symmetric", True))
    return WeightArgs(int(weights.get("num_bits", 8)), kind, strategy, size, (int(block[0]), int(block[1])), symmetric, ordered)


def _activations(name: str, inputs: dict[str, Any] | None, weights: WeightArgs) -> str:
    if inputs is None:
        return "none"
    strategy, kind = inputs.get("strategy") or "tensor", str(inputs.get("type", "int")).lower()
    wrong = None
    if int(inputs.get("num_bits", 8)) != 8 or kind != weights.kind or not inputs.get("symmetric", True):
        wrong = f"{inputs.get('num_bits', 8)}-bit {'' if inputs.get('symmetric', True) else 'asymmetric '}{kind} activations beside {weights.bits}-bit {weights.kind} weights"
    elif inputs.get("dynamic", False) is True:
        if strategy == "group":
            wrong = None if weights.strategy == "block" and inputs.get("group_size") == weights.block[1] else "activations in groups that are not the weights' blocks"
        elif strategy != "token" or weights.strategy == "block":
            wrong = f"dynamic activations by {strategy} beside weights by {weights.strategy}"
    elif inputs.get("dynamic") or strategy != "tensor":
        wrong = f"static activations by {strategy}"
    if wrong:
        raise ValueError(f"config group {name} has {wrong}; symmetric 8-bit activations of the weights' type are read: dynamic by token, static by tensor")
    return "dynamic" if inputs.get("dynamic") else "static"
