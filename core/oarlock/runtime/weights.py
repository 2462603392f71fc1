"""Fills the weight tree from a checkpoint: pull each tensor, shard, concatenate, place. Never two copies of the model.

Owns: sharding arithmetic and the check that every checkpoint tensor is used.
Reads: `layers.spec.WeightSpec`, a checkpoint (names, shape, get), `backend_api.runtime.Device`.
Never: knows a file format or a model family.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from oarlock.backend_api.runtime import Device
from oarlock.errors import WeightMismatch
from oarlock.runtime.layers.spec import WeightSpec

# Tensors that checkpoints carry and no model reads: tables that are computed, buffers of training.
IGNORED = (
    "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.bias", "attn.masked_bias", "attention.bias",
    "attention.masked_bias", "embed_positions._float_tensor",
)  # fmt: skip


Read = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]  # (name, shape, dtype) -> a tensor as the checkpoint keeps it


class Source(Protocol):
    """The part of a checkpoint that loading needs."""

    is_dummy: bool  # weights are made up from the shapes asked for

    def names(self) -> set[str]: ...
    def get_shaped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...
    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor: ...


def shard_rows(tensor: torch.Tensor, heads: int, rank: int, size: int) -> torch.Tensor:
    """This rank's part of dimension 0. `heads` > 0: whole heads, replicated when there are fewer heads than ranks.

        rank      0     1     2     3
        heads 8  |0 1| |2 3| |4 5| |6 7|
        heads 2  | 0 | | 0 | | 1 | | 1 |
    """
    if size == 1:
        return tensor
    parts = size if not heads or heads % size == 0 else heads
    if tensor.shape[0] % parts:
        raise WeightMismatch(f"a dimension of {tensor.shape[0]} cannot be cut into {parts} equal parts")
    return tensor.chunk(parts, 0)[rank if parts == size else rank * heads // size]


class WeightLoader:
    """Loads one model on one rank."""

    def __init__(self, source: Source, device: Device, dtype: torch.dtype, rank: int, size: int, prepare: dict[str, Callable[[torch.Tensor], Any]]) -> None:
        self.source, self.device, self.dtype, self.rank, self.size, self.prepare = source, device, dtype, rank, size, prepare
        self.bytes = 0

    def load(self, specs: Iterable[WeightSpec], progress: Callable[[Iterable[WeightSpec]], Iterable[WeightSpec]] = lambda s: s) -> dict[str, Any]:
        """The whole tree.

        Raises:
            WeightMismatch: a tensor is missing, has the wrong shape, or is left over; the message names it.
        """
        tree: dict[str, Any] = {}
        for spec in progress(self.wanted(specs)):
            whole = self._whole(spec, self._read)
            self.bytes += whole.numel() * whole.element_size()
            placed = self.device.place(".".join(map(str, spec.path)), whole, spec.shard)
            prepare = self.prepare.get(spec.kind)
            _put(tree, spec.path, prepare(placed) if prepare is not None and placed.dim() == 2 else placed)
        return tree

    def measure(self, specs: Iterable[WeightSpec]) -> dict[str, int]:
        """Bytes of what `load` would place, by the first part of the path; nothing is read. Raises WeightMismatch as `load`."""
        found: dict[str, int] = {}
        for spec in self.wanted(specs):
            whole = self._whole(spec, lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
            found[str(spec.path[0])] = found.get(str(spec.path[0]), 0) + whole.numel() * whole.element_size()
        return found

    def wanted(self, specs: Iterable[WeightSpec]) -> list[WeightSpec]:
        """Those that the checkpoint has. Raises WeightMismatch for one that must be there, and for tensors that nothing wants."""
        names, found, used = self.source.names(), [], set()
        for spec in specs:
            missing = [s for s in spec.sources if s not in names]
            if (missing or self.source.is_dummy) and spec.optional:
                continue
            if missing and not self.source.is_dummy:
                near = ", ".join(sorted(n for n in names if n.split(".")[-2:] == missing[0].split(".")[-2:])[:3])
                raise WeightMismatch(f"the checkpoint lacks {missing[0]}, needed for {'.'.join(map(str, spec.path))}" + (f"; it has {near}" if near else ""))
            found.append(spec)
            used.update(spec.sources)
        left = sorted(n for n in names - used if not n.endswith(IGNORED))
        if left:
            raise WeightMismatch(f"{len(left)} tensors of the checkpoint belong nowhere in this model, the first is {left[0]}")
        return found

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.source.get_shaped(name, shape, dtype) if self.source.is_dummy else self.source.get(name, dtype)

    def _whole(self, spec: WeightSpec, read: Read) -> torch.Tensor:
        """This rank's part of a weight, contiguous."""
        try:
            parts = [self._part(spec, at, name, read) for at, name in enumerate(spec.sources)]
            if spec.stack:
                n = spec.stack_parts
                whole = torch.stack([torch.cat(parts[i : i + n]) for i in range(0, len(parts), n)])
            else:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        except (RuntimeError, WeightMismatch) as error:
            raise WeightMismatch(f"{' + '.join(spec.sources)}: {error}") from error
        return whole.contiguous()

    def _part(self, spec: WeightSpec, at: int, name: str, read: Read) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype) if spec.dtype else self.dtype
        shape = spec.shapes[at]
        tensor = read(name, shape, dtype)
        if not tensor.is_floating_point():
            raise WeightMismatch(f"holds {tensor.dtype}, a floating point tensor was expected")
        if tuple(tensor.shape) != shape:
            raise WeightMismatch(f"has shape {list(tensor.shape)}, config.json calls for {list(shape)}")
        tensor = tensor.to(dtype)
        if spec.transpose:
            tensor = tensor.t()
        if spec.unit_offset:
            tensor = (tensor.float() + 1).to(dtype)
        if spec.shard == "column" or spec.shard == "vocab":
            if spec.split:
                cut = torch.split(tensor, [rows for rows, _ in spec.split], 0)
                return torch.cat([shard_rows(t, heads, self.rank, self.size) for t, (_, heads) in zip(cut, spec.split, strict=True)])
            return shard_rows(tensor, spec.heads[at] if spec.heads else 0, self.rank, self.size)
        if spec.shard == "row" and self.size > 1 and tensor.dim() == 2:
            return tensor.chunk(self.size, 1)[self.rank]
        return tensor


def _put(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set tree[path], growing dicts and lists."""
    for key, following in itertools.pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            while len(tree) <= key:
                tree.append({})
            tree = tree[key]
        else:
            tree = tree.setdefault(key, empty)
    tree[path[-1]] = value
