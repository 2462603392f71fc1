"""Fills the weight tree from a checkpoint: pull each tensor, shard, concatenate, place. Never two copies of the model.

Owns: sharding arithmetic and the check that every checkpoint tensor is used.
Reads: `layers.spec.WeightSpec`, a checkpoint (names, shape, get), `quantization.loading`, `backend_api.runtime.Device`.
Never: knows a file format or a model family.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from oarlock.backend_api.runtime import Device, LinearFormat, Quantization
from oarlock.errors import WeightMismatch
from oarlock.runtime.joining import cat, stack
from oarlock.runtime.layers.spec import WeightSpec
from oarlock.runtime.quantization.kv_cache import KV_SCALE
from oarlock.runtime.quantization.loading import QuantizedReader

# Tensors that checkpoints carry and no model reads: tables that are computed, buffers of training.
IGNORED = (
    "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.bias", "attn.masked_bias", "attention.bias",
    "attention.masked_bias", "embed_positions._float_tensor",
)  # fmt: skip


Read = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]  # (name, shape, dtype) -> a tensor as the checkpoint keeps it
Formats = tuple[LinearFormat, ...] | None  # how each source of a quantised weight is stored; None: plainly
Wanted = list[tuple[WeightSpec, Formats]]


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


def _tied_table(wanted: Wanted) -> WeightSpec | None:
    """The embedding that is the head's weight, too."""
    found = {spec.path: spec for spec, _ in wanted if spec.kind != "other"}  # of a model without a head the table is no embedding but "other"
    return None if ("lm_head", "weight") in found else found.get(("embed", "weight"))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own: a view of a mapped file would keep the whole file there."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor


class WeightLoader:
    """Loads one model on one rank."""

    def __init__(
        self, source: Source, device: Device, dtype: torch.dtype, rank: int, size: int, prepare: dict[str, Callable[..., Any]], quantization: Quantization | None = None
    ) -> None:
        self.source, self.device, self.dtype, self.rank, self.size, self.prepare = source, device, dtype, rank, size, prepare
        self.quantised = QuantizedReader(quantization, source.names(), source.is_dummy, rank, size) if quantization is not None else None
        self.bytes = 0

    def load(self, specs: Iterable[WeightSpec], progress: Callable[[Wanted], Iterable[tuple[WeightSpec, Formats]]] = lambda s: s) -> dict[str, Any]:
        """The whole tree.

        Raises:
            WeightMismatch: a tensor is missing, has the wrong shape, or is left over; the message names it.
        """
        tree: dict[str, Any] = {}
        wanted = self.wanted(specs)
        tied = _tied_table(wanted)
        for spec, formats in progress(wanted):
            if formats is not None and self._keeps_codes(spec, formats):
                self._load_quantised(tree, spec, formats)
                continue
            if spec is tied and self._tie_codes(tree, spec):
                continue
            whole = self._whole(spec, self._read) if formats is None else self._head(spec, formats, self._read_stored)
            self.bytes += whole.nbytes
            placed = self.device.place(".".join(map(str, spec.path)), whole, spec.shard)
            prepare = self.prepare.get("moe_experts" if spec.kind == "experts" else spec.kind)
            is_packed = prepare is not None and placed.dim() == (3 if spec.kind == "experts" else 2) and spec.kind != "embedding"
            _put(tree, spec.path, prepare(placed) if is_packed else placed if spec.kind == "linear" or spec is tied else _alone(placed))
        if tied is not None and "lm_head" not in tree:
            prepare, table = self.prepare.get("lm_head"), tree["embed"]["weight"]
            tree["lm_head"] = {"weight": prepare(table) if prepare is not None else table}
            if not self._share_head(tree) and prepare is not None:
                tree["embed"]["weight"] = _alone(table)
        return tree

    def _load_quantised(self, tree: dict[str, Any], spec: WeightSpec, formats: tuple[LinearFormat, ...]) -> None:
        assert self.quantised is not None
        path, weight = self.quantised.path(spec, formats), self.quantised.weight(spec, formats, self._shard, self._read_stored)
        by_runs = "groups" not in weight and weight["scales"].shape[-1] > 1  # then scales are divided as the columns are
        for name, tensor in weight.items():
            self.bytes += tensor.nbytes
            follows = name == "codes" or (name not in ("groups", "input_scale") if spec.shard != "row" else name in ("scales", "zeros", "offsets") and by_runs)
            weight[name] = self.device.place(".".join(map(str, (*path, name))), tensor, spec.shard if follows else "none")
        prepare = self.prepare.get(f"moe_experts_{path[-2]}" if spec.kind == "experts" else f"linear_{path[-1]}")
        form = prepare(weight) if prepare is not None else weight
        # The device's `lm_head` keeps the sums of rows of any dtype in float32; a quantised linear does so for float32 rows alone.
        as_head = self.prepare["lm_head"](form) if spec.kind == "lm_head" and "lm_head" in self.prepare else None
        _put(tree, path if as_head is None else spec.path, form if as_head is None else as_head)

    def _keeps_codes(self, spec: WeightSpec, formats: tuple[LinearFormat, ...]) -> bool:
        """A head is multiplied as it is stored where the device has that for its scheme; elsewhere it is a plain weight."""
        return spec.kind != "lm_head" or f"linear_{formats[0].scheme}" in self.prepare

    def _tie_codes(self, tree: dict[str, Any], embed: WeightSpec) -> bool:
        """The head of tied embeddings from the embedding's codes, where the checkpoint and the device have them; whether it serves as the table, too."""
        spec, formats = self._tied(embed)
        if formats is None:
            return False
        self._load_quantised(tree, spec, formats)
        return self._share_head(tree)

    def _share_head(self, tree: dict[str, Any]) -> bool:
        """Whether the device's `embedding` takes what its head does; then the table is kept in that form alone."""
        (form,) = tree["lm_head"].values()
        shared = self.prepare["embedding"](form) if "embedding" in self.prepare else None
        if shared is not None:
            tree["embed"] = {"weight": shared}
        return shared is not None

    def _tied(self, embed: WeightSpec) -> tuple[WeightSpec, Formats]:
        spec = replace(embed, path=("lm_head", "weight"), kind="lm_head")
        found = self.quantised.quantization.linear(spec.sources[0].removesuffix(".weight"), True) if self.quantised is not None else None
        return spec, (found,) if found is not None and self._keeps_codes(spec, (found,)) else None

    def _head(self, spec: WeightSpec, formats: tuple[LinearFormat, ...], read: Any) -> torch.Tensor:
        assert self.quantised is not None
        return self.quantised.dequantised(self.quantised.weight(spec, formats, self._shard, read), spec, formats, self.dtype)

    def measure(self, specs: Iterable[WeightSpec]) -> dict[str, int]:
        """Bytes of what `load` would place, by the first part of the path; nothing is read. Raises WeightMismatch as `load`."""
        found: dict[str, int] = {}
        known: dict[Any, int] = {}  # layers are alike
        wanted = self.wanted(specs)
        for spec, formats in wanted:
            like = (spec.shapes, spec.shard, spec.transpose, spec.split, spec.heads, spec.stack, spec.stack_parts, spec.dtype, formats)
            if like not in known:
                known[like] = self._measured(spec, formats)
            found[str(spec.path[0])] = found.get(str(spec.path[0]), 0) + known[like]
        if (embed := _tied_table(wanted)) is not None:
            head, tied = self._tied(embed)
            found["lm_head"] = self._measured(head, tied) if tied is not None else found["embed"] if "lm_head" in self.prepare else 0
            if "embedding" in self.prepare:
                del found["embed"]
        return found

    def _measured(self, spec: WeightSpec, formats: Formats) -> int:
        def meta(name: str, shape: tuple[int, ...], dtype: torch.dtype | None, is_index: bool = False) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

        if formats is None or self.quantised is None:
            return self._whole(spec, meta).nbytes
        if not self._keeps_codes(spec, formats):
            return self._head(spec, formats, meta).nbytes
        return sum(tensor.nbytes for tensor in self.quantised.weight(spec, formats, self._shard, meta).values())

    def wanted(self, specs: Iterable[WeightSpec]) -> Wanted:
        """Those that the checkpoint has, and how it stores them. Raises WeightMismatch for one that must be there, and for tensors that nothing wants."""
        names, used, unused_biases = self.source.names(), set[str](), set[str]()
        found: Wanted = []
        experts: dict[Any, str] = {}
        for spec in specs:
            formats = self.quantised.formats(spec) if self.quantised is not None else None
            if formats is not None and self.quantised is not None and self.quantised.quantization.of_plain and not self._keeps_codes(spec, formats):
                formats = None  # a plain head that would be dequantised stays as it is
            if spec.stack and self.quantised is not None:
                scheme = self.quantised.scheme(spec, formats) if formats is not None else "plain"
                if experts.setdefault(spec.path[:-1], scheme) != scheme:
                    raise WeightMismatch(f"{spec.sources[0]} is stored as {scheme}, the experts' other weights as {experts[spec.path[:-1]]}; they are computed as one")
            if formats is not None and self.quantised is not None:
                sources, missing = self.quantised.stored(spec, formats)
                unused_biases.update(s.removesuffix("weight") + "bias" for s in spec.sources)
            else:
                sources, missing = list(spec.sources), [s for s in spec.sources if s not in names]
            if (missing or self.source.is_dummy) and spec.optional:
                continue
            if missing and not self.source.is_dummy:
                near = ", ".join(sorted(n for n in names if n.split(".")[-2:] == missing[0].split(".")[-2:])[:3])
                raise WeightMismatch(f"the checkpoint lacks {missing[0]}, needed for {'.'.join(map(str, spec.path))}" + (f"; it has {near}" if near else ""))
            found.append((spec, formats))
            used.update(sources)
        if self.quantised is not None and self.quantised.plain and not any(formats for _, formats in found):
            raise WeightMismatch(
                f"its settings say that {self.quantised.plain} and others are quantised, but every linear of the checkpoint is a plain tensor; "
                "take quantization_config out of config.json, or use the files that belong to it"
            )
        left = sorted(n for n in names - used if not n.endswith(IGNORED) and not KV_SCALE.search(n))
        # Older quantisers gave every linear a bias, of zeros where the model has none.
        left = [n for n in left if n not in unused_biases or bool(self.source.get(n).any())]
        if left:
            raise WeightMismatch(f"{len(left)} tensors of the checkpoint belong nowhere in this model, the first is {left[0]}")
        return found

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.source.get_shaped(name, shape, dtype) if self.source.is_dummy else self.source.get(name, dtype)

    def _read_stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, is_index: bool) -> torch.Tensor:
        """As the checkpoint keeps it."""
        if not self.source.is_dummy:
            return self.source.get(name)
        return torch.zeros(shape, dtype=dtype) if is_index else self.source.get_shaped(name, shape, dtype or self.dtype)

    def _whole(self, spec: WeightSpec, read: Read) -> torch.Tensor:
        """This rank's part of a weight, contiguous."""
        try:
            parts = [self._part(spec, at, name, read) for at, name in enumerate(spec.sources)]
            if spec.stack:
                n = spec.stack_parts
                whole = stack([cat(parts[i : i + n]) for i in range(0, len(parts), n)])
            else:
                whole = cat(parts)
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
        if spec.shard == "row" and self.size > 1 and tensor.dim() == 2:
            return tensor.chunk(self.size, 1)[self.rank]
        return self._shard(spec, at, tensor)

    def _shard(self, spec: WeightSpec, at: int, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of dimension 0, where that is the one to divide."""
        if spec.shard != "column" and spec.shard != "vocab":
            return tensor
        if not spec.split:
            return shard_rows(tensor, spec.heads[at] if spec.heads else 0, self.rank, self.size)
        cut = torch.split(tensor, [rows for rows, _ in spec.split], 0)
        return cat([shard_rows(t, heads, self.rank, self.size) for t, (_, heads) in zip(cut, spec.split, strict=True)])


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
