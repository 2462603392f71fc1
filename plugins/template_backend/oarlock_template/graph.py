"""Programs traced once for each shape, in the place of a vendor's compiler.

Owns: the traced graphs.
Reads: `oarlock.backend_api.runtime`.
Never: accepts a shape that was not compiled; knows what a program computes.
"""

from __future__ import annotations

from typing import Any

import torch
from oarlock.backend_api.runtime import GraphRunner, PureProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


class TracingRunner(GraphRunner):
    """Records a program's operations, and replays the record: Python of the model no longer runs."""

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        shapes = _shapes(example)
        traced = make_fx(fn, tracing_mode="fake")(*example)  # by shapes alone: nothing is computed, no state is written

        def run(*args: Any) -> Any:
            if _shapes(args) != shapes:
                raise RuntimeError(f"program {tag} was compiled for other shapes or dtypes than it is called with")
            return traced(*args)

        return run

    def refuses_unwarmed(self) -> bool:
        return True


def _shapes(args: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
