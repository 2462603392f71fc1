"""The chips of this process, and how weights and state are divided over them.

Owns: the mesh, the sharding of every array.
Reads: `vendor` (JAX).
Never: knows a model; moves data.

One worker drives all its chips from one process: an array is divided over them, or whole on each, and XLA adds the collectives.

    column, vocab, expert   cut along the first dimension      the embedding too: it is a tied head's weight
    row                     cut along the second
    KV cache                cut along the lanes, whole heads on each chip
    all else                whole on each chip
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oarlock_tpu.vendor import Format, Layout, jax, jnp

AXIS = "chips"
_CUT = {"column": 0, "vocab": 0, "expert": 0, "row": 1}
P = jax.sharding.PartitionSpec


@dataclass(frozen=True)
class Chips:
    """Devices of JAX, real ones or those of a described machine."""

    devices: tuple[Any, ...]
    interpret: bool  # they are not TPUs: kernels are interpreted

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def mesh(self) -> Any:
        return jax.sharding.Mesh(np.array(self.devices), (AXIS,))

    def sharding(self, spec: Any) -> Any:
        if self.count == 1:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.sharding.NamedSharding(self.mesh, spec)

    @property
    def whole(self) -> Any:
        """A copy on each chip."""
        return self.sharding(P())

    def weight(self, name: str, shape: tuple[int, ...], shard: str) -> Any:
        """The sharding of a weight. What does not divide is whole on each chip."""
        along = _CUT.get(shard, 0 if name == "embed.weight" else None)
        if along is None or along >= len(shape) or shape[along] % self.count:
            return self.whole
        return self.sharding(P(*([None] * along), AXIS))

    def stacked(self, sharding: Any) -> Any:
        """The same for many of one kind, along a new first dimension."""
        return sharding if self.count == 1 else self.sharding(P(None, *sharding.spec))

    def packed(self, sharding: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """The sharding of packed weights, with their layout where the compiler would change it.

        PERF: in a loop, a tpu7x multiplies bfloat16 in tiles of 16 rows, and copies all weights before each step if they lie in tiles of 8.
        """
        if not self._chooses_tiles or len(shape) < 3 or dtype != jnp.bfloat16:
            return sharding
        return Format(Layout(tuple(range(len(shape))), ((16, 128), (2, 1))), sharding)

    @property
    def _chooses_tiles(self) -> bool:
        return self.devices[0].device_kind == "TPU7x"

    def home(self, weight: Any) -> Any:
        """Where a weight lies, for a program that is given it."""
        return weight.format if self._chooses_tiles else weight.sharding

    def state(self, name: str) -> Any:
        """The sharding of what programs keep."""
        return self.sharding(P(None, None, AXIS)) if name == "kv" else self.whole


_active: Chips | None = None


def use(chips: Chips) -> None:
    """These are the worker's chips from now on: a process has one worker."""
    global _active
    _active = chips


def active() -> Chips:
    """Raises RuntimeError before a device was activated."""
    if _active is None:
        raise RuntimeError("no tpu device was activated in this process")
    return _active
