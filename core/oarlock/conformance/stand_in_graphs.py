"""A stand-in for a device's graphs, over host tensors: records operations and replays them, refuses what cannot be recorded.

Owns: `StandInGraph`.
Reads: torch.
Never: pretends to be a device to anything but tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class StandInGraph:
    """Records operations with the tensors they read and wrote; `replay` runs them on the same tensors."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While a device records, nothing runs: whatever is written to tensors from outside is undone afterwards."""
        mode = _Recorder(self._steps)
        with mode:
            yield
        for tensor, content in reversed(mode.overwritten):
            tensor.copy_(content)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, kept in self._steps:
                result = func(*args, **kwargs)
                if _writes(func):
                    continue
                for old, new in zip(pytree.tree_leaves(kept), pytree.tree_leaves(result), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self._steps = steps
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} waits for the device, which cannot be recorded")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.overwritten.append((value, value.clone()))
        result = func(*args, **kwargs)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view:
            self._steps.append((func, args, kwargs, result))
        return result


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
