"""What a layer keeps between steps, and how layers are gathered into KV cache groups. Integers only.

Owns: `KVSpec`, `KVGroup` and the grouping rule.
Reads: nothing.
Never: sees tensors, block ids or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

KVKind = Literal["full", "window", "latent", "state"]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps for each token (or, for `state`, for each request)."""

    kind: KVKind
    num_kv_heads: int  # after sharding: heads on one rank
    head_dim: int
    window: int | None = None  # tokens, this token included; only for kind "window"

    def values_per_token(self) -> int:
        """Numbers kept for one token, keys and values together, before any padding."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind that share a block table. Layer `layers[i]` uses physical tensor `i` of the pool.

    Groups share one pool: block `b` of tensor `i` belongs to whichever group holds block id `b`.
    """

    group_id: int
    kind: KVKind
    window: int | None
    layers: tuple[int, ...]


def make_groups(specs: tuple[KVSpec, ...]) -> tuple[KVGroup, ...]:
    """Gather layers into groups of equal-sized pages.

    Layers of one kind, window and shape form a class; each class is cut into groups of as many layers as the
    smallest class has, so that one pool of `max(len(group.layers))` tensors serves every group.
    Five window layers to one full layer over 18 layers gives five window groups and one full group of 3 layers each.

    Raises:
        ValueError: layers differ in page size (KV heads times head size), which one pool cannot hold.
    """
    if len({s.values_per_token() for s in specs}) > 1:
        raise ValueError(f"layers keep different amounts per token: {sorted({s.values_per_token() for s in specs})}")
    classes: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        classes.setdefault(replace(spec), []).append(layer)
    if not classes:
        return ()
    size = min(len(layers) for layers in classes.values())
    if size * 4 < max(len(layers) for layers in classes.values()) and size < 2:
        size = max(len(layers) for layers in classes.values())  # one odd layer out: waste a page rather than have many tables
    groups: list[KVGroup] = []
    for spec, layers in classes.items():
        for at in range(0, len(layers), size):
            groups.append(KVGroup(len(groups), spec.kind, spec.window, tuple(layers[at : at + size])))
    return tuple(groups)
