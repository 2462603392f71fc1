"""From a checkpoint's quantised tensors to this rank's part of a scheme: read, shard, pack, join. One linear at a time.

Owns: the common form's way through sharding, fused projections and experts.
Reads: `backend_api.runtime`, `layers.spec`, `quantization.schemes`, `errors`.
Never: knows a method, a file format or a model family; places a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from oarlock.backend_api.runtime import LinearFormat, Quantization, QuantizedWeight
from oarlock.errors import ConfigError, WeightMismatch
from oarlock.runtime.joining import cat, stack
from oarlock.runtime.layers.spec import WeightSpec
from oarlock.runtime.quantization.schemes import DEQUANTISE, Weight, pack_int4

Shard = Callable[[torch.Tensor], torch.Tensor]  # this rank's part of dimension 0
ReadStored = Callable[[str, tuple[int, ...], torch.dtype | None, bool], torch.Tensor]  # (name, shape, dtype, is_index)
# Experts are weight-only: what a checkpoint says of their activations is not rounded away, they stay as they are.
_OF_EXPERTS = {"int4": "int4", "int8": "int8", "w8a8": "int8", "fp8": "fp8", "w8a8_fp8": "fp8"}


class QuantizedReader:
    """The quantised linears of one checkpoint, for one rank."""

    def __init__(self, quantization: Quantization, names: set[str], is_dummy: bool, rank: int, size: int) -> None:
        self.quantization, self.checkpoint, self.is_dummy, self.rank, self.size = quantization, names, is_dummy, rank, size
        self.plain = ""  # a linear that the settings call quantised and the checkpoint keeps plain
        self.under: dict[str, set[str]] = {}  # module -> what it has: {"qweight", "scales", ...}
        for name in names:
            module, _, last = name.rpartition(".")
            self.under.setdefault(module, set()).add(last)

    def formats(self, spec: WeightSpec) -> tuple[LinearFormat, ...] | None:
        """How each source of a weight is stored; None: they are plain tensors.

        Raises:
            WeightMismatch: parts of one fused linear are stored in different ways, or in a way that is not read.
        """
        is_experts = spec.kind == "experts"
        if (spec.kind not in ("linear", "lm_head") and not is_experts) or len(spec.shapes[0]) != 2:
            return None
        found = [self._format(spec, at) for at in range(len(spec.sources))]
        kinds = {entry.scheme if entry is not None else "plain" for entry in found}
        if kinds == {"plain"}:
            return None
        if len(kinds) > 1:
            raise WeightMismatch(f"{' + '.join(spec.sources[:3])} are computed as one, but are stored as {' and '.join(sorted(kinds))}")
        if is_experts and kinds == {"codebook"}:
            raise WeightMismatch(f"{spec.sources[0]}: experts of a codebook are not served")
        return tuple(entry for entry in found if entry is not None)

    def _format(self, spec: WeightSpec, at: int) -> LinearFormat | None:
        prefix = _prefix(spec, at)
        try:
            found = self.quantization.linear(prefix, spec.kind == "lm_head")
            if found is None:
                return None
            if self.quantization.of_plain:
                if "router" in spec.path:  # its choices are not worth the bytes
                    return None
            # Settings seldom say that routers and the like were left out; a weight without scales beside it does.
            elif "weight" in self.under.get(prefix, ()) and self.under[prefix] <= {"weight", "bias"}:
                self.plain = self.plain or prefix
                return None
            found.tensors(*_sizes(spec, at))
        except ValueError as error:
            raise WeightMismatch(f"{prefix}: {error}") from error
        return found

    def scheme(self, spec: WeightSpec, formats: Sequence[LinearFormat]) -> str:
        return _OF_EXPERTS[formats[0].scheme] if spec.stack else formats[0].scheme

    def path(self, spec: WeightSpec, formats: Sequence[LinearFormat]) -> tuple[str | int, ...]:
        """(..., "qkv", "weight") -> (..., "qkv", scheme); (..., "experts", "w13") -> (..., "experts", scheme, "w13")."""
        scheme = self.scheme(spec, formats)
        return (*spec.path[:-1], scheme, spec.path[-1]) if spec.stack else (*spec.path[:-1], scheme)

    def stored(self, spec: WeightSpec, formats: Sequence[LinearFormat]) -> tuple[list[str], list[str]]:
        """(tensors of the checkpoint that are read, tensors that it lacks)."""
        used, missing = [], []
        for at, found in enumerate(formats):
            for name, stored in found.tensors(*_sizes(spec, at)).items():
                full = f"{_prefix(spec, at)}.{name}"
                if full in self.checkpoint:
                    used.append(full)
                elif not stored.optional:
                    missing.append(full)
        return used, missing

    def weight(self, spec: WeightSpec, formats: Sequence[LinearFormat], shard: Callable[[WeightSpec, int, torch.Tensor], torch.Tensor], read: ReadStored) -> Weight:
        """This rank's part, packed.

        Raises:
            WeightMismatch: a tensor is misshapen, or values contradict the settings; the message names it.
        """
        parts = []
        for at, found in enumerate(formats):
            whole = self._common(spec, at, found, read)
            mine = self._mine(spec, at, whole, found.scheme, lambda tensor, at=at: shard(spec, at, tensor))
            parts.append(_packed(mine, self.scheme(spec, formats), experts=spec.stack))
        if not spec.stack:
            return _joined(parts, spec.sources)
        n = spec.stack_parts
        each = [_joined(parts[i : i + n], spec.sources[i : i + n]) for i in range(0, len(parts), n)]
        try:
            return {name: stack([weight[name] for weight in each]) for name in each[0]}
        except (RuntimeError, KeyError) as error:
            raise WeightMismatch(f"{spec.sources[0]}: the experts differ in how they are quantised: {error}") from error

    def dequantised(self, weight: Weight, spec: WeightSpec, formats: Sequence[LinearFormat], dtype: torch.dtype) -> torch.Tensor:
        """A plain weight made of a packed one: of the head, whose sums are kept in float32 by an op of its own."""
        return DEQUANTISE[formats[0].scheme](weight, _sizes(spec, 0)[1], torch.float32).to(dtype)

    def _common(self, spec: WeightSpec, at: int, found: LinearFormat, read: ReadStored) -> QuantizedWeight:
        prefix, (out_size, in_size), tensors = _prefix(spec, at), _sizes(spec, at), {}
        for name, stored in found.tensors(out_size, in_size).items():
            full = f"{prefix}.{name}"
            if stored.optional and full not in self.checkpoint:
                continue
            turned = spec.transpose and name == "weight"  # plain tensors may be kept the other way round
            tensor = read(full, stored.shape[::-1] if turned else stored.shape, stored.dtype, stored.is_index)
            tensor = tensor.t() if turned else tensor
            tensors[name] = tensor = tensor.view(stored.shape) if tensor.numel() == 1 == prod(stored.shape) else tensor  # scalars come as [] and [1]
            if tuple(tensor.shape) != stored.shape:
                raise WeightMismatch(f"{full} has shape {list(tensor.shape)}, its settings and config.json call for {list(stored.shape)}")
            if tensor.dtype != stored.dtype if stored.dtype is not None else not tensor.is_floating_point():
                raise WeightMismatch(f"{full} holds {tensor.dtype}, its settings call for {stored.dtype or 'a floating point tensor'}")
        try:
            if not self.is_dummy and not any(tensor.is_meta for tensor in tensors.values()):
                found.check(tensors, out_size, in_size)
            return found.read(tensors, out_size, in_size)
        except ValueError as error:
            raise WeightMismatch(f"{prefix}: {error}") from error

    def _mine(self, spec: WeightSpec, at: int, whole: QuantizedWeight, scheme: str, shard: Shard) -> QuantizedWeight:
        """This rank's rows, or columns."""
        if self.size == 1 or spec.shard == "none":
            return whole
        if spec.shard != "row":
            per_row = {name: getattr(whole, name) for name in ("codes", "scales", "zeros", "offsets", "codebook")}
            return replace(whole, **{name: shard(tensor) for name, tensor in per_row.items() if tensor is not None})
        columns, num_groups = whole.codes.shape[1], whole.scales.shape[1]
        width = columns // self.size
        low = self.rank * width
        mine = replace(whole, codes=whole.codes[:, low : low + width])
        if num_groups == 1 and whole.groups is None:
            return mine
        if whole.groups is None and width % (columns // num_groups) == 0:
            first, last = low * num_groups // columns, (low + width) * num_groups // columns
            tables = {name: getattr(whole, name) for name in ("scales", "zeros", "offsets")}
            return replace(mine, **{name: table[:, first:last] for name, table in tables.items() if table is not None})
        if scheme == "w8a8_fp8":  # activations are scaled by whole groups
            works = max(ranks for ranks in range(1, self.size) if num_groups % ranks == 0)
            raise ConfigError(
                f"--tensor-parallel-size {self.size} cuts {spec.sources[at]} inside its groups of {columns // num_groups} columns; use {works}", "tensor_parallel_size"
            )
        every = torch.arange(columns, dtype=torch.int32) // (columns // num_groups) if whole.groups is None else whole.groups
        return replace(mine, groups=every[low : low + width])  # any group may have columns here: all scales are kept


def _prefix(spec: WeightSpec, at: int) -> str:
    return spec.sources[at].removesuffix(".weight")


def _sizes(spec: WeightSpec, at: int) -> tuple[int, int]:
    """(outputs, inputs) of one source; quantised tensors are never kept the other way round."""
    first, second = spec.shapes[at]
    return (second, first) if spec.transpose else (first, second)


def _packed(weight: QuantizedWeight, scheme: str, *, experts: bool) -> Weight:
    found = {"codes": pack_int4(weight.codes) if scheme == "int4" else weight.codes, "scales": weight.scales}
    for name in ("zeros", "offsets", "groups", "codebook") if experts else ("zeros", "offsets", "groups", "codebook", "input_scale"):
        if getattr(weight, name) is not None:
            found[name] = getattr(weight, name)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _joined(parts: list[Weight], sources: Sequence[str]) -> Weight:
    """Several linears of the same inputs as one: rows below rows. Activations get the largest of the static scales, which cuts nothing off."""
    if len(parts) == 1:
        return parts[0]
    names = " + ".join(sources)
    if len({tuple(part) for part in parts}) > 1 or len({part["scales"].shape[1] for part in parts}) > 1:
        raise WeightMismatch(f"{names} are computed as one, but differ in how they are quantised")
    joined: Weight = {}
    for name, first in parts[0].items():
        every = [part[name] for part in parts]
        if name == "groups":
            if not first.is_meta and any(not torch.equal(first, other) for other in every):
                raise WeightMismatch(f"{names} are computed as one, but order their columns differently (g_idx)")
            joined[name] = first
        else:
            joined[name] = torch.stack(every).amax(0) if name == "input_scale" else cat(every)
    return joined
