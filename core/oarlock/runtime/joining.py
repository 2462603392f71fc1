"""Tensors side by side, also where they are only shapes.

Owns: nothing.
Reads: torch.
Never: computes a meta tensor with torch: its functions for those are Python that imports torch's compiler first, a second at every start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[a, ...], [b, ...] -> [a + b, ...]. Raises RuntimeError where the rest of the shapes differs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if not first.is_meta:
        return torch.cat(list(parts))
    _require_alike([part.shape[1:] for part in parts])
    return first.new_empty((sum(part.shape[0] for part in parts), *first.shape[1:]))


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[a, ...] n times -> [n, a, ...]. Raises RuntimeError where shapes differ."""
    if not parts[0].is_meta:
        return torch.stack(list(parts))
    _require_alike([part.shape for part in parts])
    return parts[0].new_empty((len(parts), *parts[0].shape))


def _require_alike(shapes: Sequence[torch.Size]) -> None:
    if len(set(shapes)) > 1:
        raise RuntimeError(f"shapes differ: {', '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}")
