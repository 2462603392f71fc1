"""`CaptureRunner`: records a program once and replays it, so that a step costs one launch. For devices whose torch has graphs.

Owns: static inputs, the graphs and their memory pool.
Reads: `graph`, `device`.
Never: names a vendor's call (a subclass says the three that it takes); knows what a program computes.

    compile    runs the program once as it is: libraries choose their kernels, which must not happen while recording
    1st call   records it over the weights and the state of that call, which it updates in place, and over copies of the inputs
    each call  copies the inputs in, replays, and hands out copies of the outputs, for the next replay overwrites them

A graph holds addresses. Weights and state of a worker stay where they are; if others are passed, the program is recorded anew.
Nothing here waits for the device: inputs of a call are tensors of the device, each in memory of its own, and are copied in the order
of what was launched. So a step may be launched while the one before it runs, and no buffer need be kept twice.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import operator
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from oarlock.backend_api.runtime.device import Device
from oarlock.backend_api.runtime.graph import GraphRunner, PureProgram

log = logging.getLogger("oarlock.graphs")


class CaptureRunner(GraphRunner):
    """One pool of memory for all graphs of a worker: they run one after another."""

    _extension_base: ClassVar[bool] = True

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._pool: Any = None
        self._captures = 0

    @abc.abstractmethod
    def new_graph(self) -> Any:
        """An empty graph, with `replay()`."""

    @abc.abstractmethod
    def new_pool(self) -> Any:
        """A handle of memory that graphs share."""

    @abc.abstractmethod
    def recording(self, graph: Any, pool: Any) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside is recorded, not run; what it allocates comes from the pool."""

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        """Runs `fn` on the example, whose state it may change, and records it when it is first called."""
        fn(*example)
        self.device.synchronise()
        return _Captured(fn, tag, self._capture)

    def refuses_unwarmed(self) -> bool:
        return True

    def _capture(self, launch: Callable[[], Any], tag: str) -> tuple[Any, Any]:
        """(graph, what `launch` returned: tensors that each replay fills).

        Raises:
            RuntimeError: the program does something that cannot be recorded.
        """
        if self._pool is None:
            self._pool = self.new_pool()
        graph, known = self.new_graph(), sys.exception()
        try:
            with self.recording(graph, self._pool):
                outputs = launch()
        except Exception as error:
            first = _first(error, known)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise RuntimeError(f"program {tag} cannot be captured: {first}. --enforce-eager runs programs as they are") from error
        self._captures += 1
        log.debug("captured %s, %d in all", tag, self._captures)
        return graph, outputs


class _Captured:
    """One program."""

    def __init__(self, fn: PureProgram, tag: str, capture: Callable[[Callable[[], Any], str], tuple[Any, Any]]) -> None:
        self._fn, self._tag, self._capture = fn, tag, capture
        self._graph: Any = None
        self._state: tuple[Any, ...] = ()  # weights and state of the last call, as objects: equal ones need no second look
        self._weights: Any = None  # the tree that was recorded
        self._addresses: tuple[int, ...] = ()  # of the state that was recorded
        self._inputs: list[torch.Tensor] = []

    def __call__(self, weights: Any, written: dict[str, Any], read: dict[str, Any], packed: torch.Tensor, device_inputs: dict[str, Any]) -> Any:
        inputs, spec = pytree.tree_flatten((packed, device_inputs))
        state = (weights, *written.values(), *read.values())
        is_known = len(state) == len(self._state) and all(map(operator.is_, state, self._state))
        if not is_known and (weights is not self._weights or _addresses((written, read)) != self._addresses):
            self._record((weights, written, read), inputs, spec)
        else:
            for static, given in zip(self._inputs, inputs, strict=True):
                if static.shape != given.shape or static.dtype != given.dtype:
                    raise RuntimeError(
                        f"program {self._tag} was captured for {list(static.shape)} {static.dtype} and called with {list(given.shape)} {given.dtype}"
                    )
                static.copy_(given)
        self._state = state
        self._graph.replay()
        new, outputs = self._results
        copies: dict[int, torch.Tensor] = {}  # an output may have several names
        return new, pytree.tree_map_only(torch.Tensor, lambda t: copies[id(t)] if id(t) in copies else copies.setdefault(id(t), t.clone()), outputs)

    def _record(self, state: tuple[Any, Any, Any], inputs: list[torch.Tensor], spec: Any) -> None:
        self._graph = self._weights = None  # frees the memory of the old one first
        self._inputs = [given.clone() for given in inputs]
        static = pytree.tree_unflatten(self._inputs, spec)
        self._graph, self._results = self._capture(lambda: self._fn(*state, *static), self._tag)
        if not set(_addresses(self._results[0])) <= set(_addresses(state[1])):
            raise RuntimeError(f"program {self._tag} returns new state; a captured program must update its state in place")
        self._weights, self._addresses = state[0], _addresses(state[1:])


def _first(error: BaseException, known: BaseException | None) -> BaseException:
    """What went wrong first, `known` aside: a recording that is broken off fails once more when it is ended, and says nothing of why."""
    while error.__context__ is not None and error.__context__ is not known:
        error = error.__context__
    return error


def _addresses(tree: Any) -> tuple[int, ...]:
    return tuple(leaf.data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
