"""`sim-static`: a device that compiles for fixed shapes, simulated on CPU tensors by a runner that forgives nothing.

Owns: the device object, its buckets and the strict graph runner.
Reads: `oarlock.backend_api`, `counters`.
Never: accepts a shape it did not compile; keeps state alive that a program replaced.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, GraphRunner, PureProgram, few_buckets

from oarlock_sim import BLOCK_SIZES, DTYPES, KV_DTYPES, MEMORY_GIB, SWAP_BYTES
from oarlock_sim.counters import COUNT

# Two sizes on the axes where rounding up can go wrong, one where it cannot: every combination is compiled at start-up.
_CHUNK_TOKENS = (32, 128)
_FEW_ROWS = 4


class SimStaticDevice(Device):
    """Options: "sim_memory", the simulated size in GiB."""

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        super().__init__(index, options)
        self._total_bytes = int(self.options.get("sim_memory", MEMORY_GIB) * 2**30)
        self._placed_bytes = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            execution="compiled",
            dynamic_shapes=False,
            dtypes=DTYPES,
            kv_dtypes=KV_DTYPES,
            block_sizes=BLOCK_SIZES,
            host_is_device=True,  # no simulated copy: functional updates copy whole caches, so the cache must stay small
            kv_update="functional",
            collectives=("gloo",),
            default_swap_bytes=SWAP_BYTES,
        )

    def activate(self) -> None:
        """Nothing to make current."""

    def memory_info(self) -> tuple[int, int]:
        """The simulated size, less the weights that are placed and alive."""
        return self._total_bytes - self._placed_bytes, self._total_bytes

    def place(self, name: str, tensor: torch.Tensor, shard: Literal["column", "row", "vocab", "expert", "none"]) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        self._placed_bytes += size
        weakref.finalize(tensor, self._forget, size)
        return tensor

    def _forget(self, size: int) -> None:
        self._placed_bytes -= size

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        table = few_buckets(max_num_seqs, max_num_batched_tokens, max_blocks, decode_rows=(_FEW_ROWS,), chunk_tokens=_CHUNK_TOKENS, chunk_rows=_FEW_ROWS)
        return {**table, "chunk_lens": table["chunk_tokens"]}  # a second axis of lengths, for the places where rounding up can go wrong

    def describe(self) -> str:
        return f"simulated static compiler, {self._total_bytes >> 20} MiB, over CPU operators"



class StrictRunner(GraphRunner):
    """Checks what compiled devices take for granted.

    A program must be compiled before it is called, be called with exactly the shapes it was compiled for, and leave its
    inputs as they are; dead state is freed at once. The null block is full of NaN after every run, and every block is until it is
    first written.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._compiled: set[str] = set()

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        """Raises ValueError for a tag that was compiled before: its key would be compiled twice."""
        if tag in self._compiled:
            raise ValueError(f"program {tag} is compiled twice; keep the first and call it again")
        self._compiled.add(tag)
        COUNT["compiles"] += 1
        # Nothing is compiled while serving, so whatever the cache holds now is garbage: let it be garbage that shows.
        for path, tensor in _tensors(example[1]):
            if _is_kv(path, tensor):
                tensor.fill_(math.nan)
        expected = list(_signature(example))

        def run(*args: Any) -> Any:
            _check_signature(tag, expected, list(_signature(args)))
            versions = list(_versions(args))
            result = fn(*args)
            for path, tensor, version in versions:
                if tensor._version != version:
                    raise RuntimeError(f"program {tag} wrote to its input {path} in place; a compiled program returns new state instead")
            COUNT["runs"] += 1
            return result

        return run

    def refuses_unwarmed(self) -> bool:
        return True

    def retire(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        live = {t.untyped_storage()._cdata for _, t in _tensors(new)}
        for _, tensor in _tensors(old):
            storage = tensor.untyped_storage()
            if storage._cdata not in live and storage.nbytes():
                storage.resize_(0)
                COUNT["retired"] += 1
        for path, tensor in _tensors(new):
            if _is_kv(path, tensor):
                tensor[0] = math.nan


def _is_kv(path: str, tensor: torch.Tensor) -> bool:
    """Cache tensors: floating point, blocks first, at least [num_blocks, block_size, something], in state named kv…"""
    return path.startswith("kv") and tensor.is_floating_point() and tensor.dim() >= 3


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested dicts, lists, tuples and dataclass-like objects, with where it stands."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for at, value in enumerate(tree):
            yield from _tensors(value, f"{path}[{at}]")


def _signature(args: tuple[Any, ...]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for path, tensor in _tensors(args):
        yield path, tuple(tensor.shape), tensor.dtype


def _check_signature(tag: str, expected: list[Any], got: list[Any]) -> None:
    if expected == got:
        return
    for want, have in zip(expected, got, strict=False):
        if want != have:
            raise RuntimeError(f"program {tag} was compiled for {want[0]} {list(want[1])} {want[2]} and called with {have[0]} {list(have[1])} {have[2]}")
    raise RuntimeError(f"program {tag} was compiled for {len(expected)} tensors and called with {len(got)}")


def _versions(args: tuple[Any, ...]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Version counters, which torch raises on every write. Tensors made in inference mode have none."""
    for path, tensor in _tensors(args):
        if not tensor.is_inference():
            yield path, tensor, tensor._version
