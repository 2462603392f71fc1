"""Programs, traced once and frozen: what the chip runs is the record, never the Python that made it.

Owns: the records.
Reads: `oarlock.backend_api.runtime`.
Never: runs a program with other shapes, dtypes or trees than it was traced for.
"""

from __future__ import annotations

from typing import Any

import torch
from oarlock.backend_api.runtime import GraphRunner, PureProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


class Programs(GraphRunner):
    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        expected = signature(example)
        frozen = make_fx(fn, tracing_mode="fake")(*example)

        def run(*args: Any) -> Any:
            found = signature(args)
            if found != expected:
                raise RuntimeError(f"the Quern Q1 has no such program: {tag} was traced for other arguments: {difference(expected, found)}")
            return frozen(*args)

        return run

    def refuses_unwarmed(self) -> bool:
        return True


def signature(args: tuple[Any, ...]) -> tuple[pytree.TreeSpec, list[Any]]:
    """The tree, in which a list is no tuple, and of each leaf its shape and dtype, or the value of one that is no tensor."""
    leaves, tree = pytree.tree_flatten(args)
    return tree, [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def difference(expected: tuple[pytree.TreeSpec, list[Any]], found: tuple[pytree.TreeSpec, list[Any]]) -> str:
    if expected[0] != found[0]:
        return "they lie in other dicts, lists and tuples"
    paths = (pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(pytree.tree_unflatten(range(len(found[1])), found[0])))
    changed = [f"{path} was {was}, is {now}" for path, was, now in zip(paths, expected[1], found[1], strict=True) if was != now]
    return "; ".join(changed[:3])
