"""The op registry: what an op means, how it is tested, and which implementation serves it.

Owns: `Op`, the registry, and the choice of implementations (`bind_ops`).
Reads: `backend_api.specs`.
Never: holds an implementation (references live in `oarlock.runtime.reference`); never chooses by device name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from oarlock.backend_api.specs import OpImpl, Support


@dataclass(frozen=True, slots=True)
class Op:
    """One op's definition. The reference *is* the meaning."""

    name: str
    reference: Callable[..., Any]
    version: int = 1
    mutates: tuple[str, ...] = ()  # argument names an implementation may write in place
    generate: Callable[..., Any] | None = None  # generate(case, dtype, generator) -> (args, kwargs); see conformance
    cases: tuple[dict[str, Any], ...] = ()  # shapes: aligned, odd, one, zero, large
    tolerance: dict[str, float] = field(default_factory=dict)  # dtype name -> NMSE limit against float64
    cost: Callable[..., tuple[int, int]] | None = None  # cost(*args) -> (FLOP, bytes)
    tested_in: str = "ops"  # the conformance level that covers it: "ops" (needs generate, cases, tolerance, cost) or "runner" (coarse ops)


_REGISTRY: dict[str, Op] = {}


def register_op(op: Op) -> Op:
    """Add an op. Raises ValueError for a name that is taken."""
    if op.name in _REGISTRY:
        raise ValueError(f"op {op.name} is registered twice")
    _REGISTRY[op.name] = op
    return op


def registry() -> dict[str, Op]:
    """All ops by name (a copy)."""
    return dict(_REGISTRY)


def resolve(path: str) -> Any:
    """Import "package.module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Ops:
    """The chosen implementations as attributes: plain callables, bound once when the model is built.

    `table` says for each op what serves it and why others were rejected.
    """

    def __init__(self) -> None:
        self.table: list[tuple[str, str, str]] = []
        self.prepare: dict[str, Callable[..., Any]] = {}  # op -> pack a weight once at load


def _imported(impl: OpImpl, field: str, path: str) -> Any:
    try:
        return resolve(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"op {impl.op}: the {field} of {impl.name}'s implementation, {path!r}, cannot be imported: {type(error).__name__}: {error}") from error


def bind_ops(impls: Iterable[OpImpl], dtype: str) -> Ops:
    """Choose an implementation for every op of the registry; the reference serves what nobody else does.

    Raises:
        ValueError: two supported implementations of equal priority, one for an op that does not exist, or one whose import string names nothing.
    """
    bound = Ops()
    by_op: dict[str, list[OpImpl]] = {}
    for impl in impls:
        if impl.op not in _REGISTRY:
            raise ValueError(f"{impl.name} implements {impl.op}, which is no op; ops are {', '.join(sorted(_REGISTRY))}")
        by_op.setdefault(impl.op, []).append(impl)
    for name, op in sorted(_REGISTRY.items()):
        chosen, rejected = None, []
        for impl in sorted(by_op.get(name, ()), key=lambda i: -i.priority):
            support = impl.supports(dtype=dtype) if impl.version == op.version else Support(False, (f"made for version {impl.version} of the op, not {op.version}",))
            if not support.ok:
                rejected.append(f"{impl.name}: {'; '.join(support.reasons)}")
            elif chosen is None:
                chosen = impl
            elif impl.priority == chosen.priority:
                raise ValueError(f"op {name}: {chosen.name} and {impl.name} have equal priority {impl.priority}; raise one")
        setattr(bound, name, _imported(chosen, "factory", chosen.factory) if chosen else op.reference)
        if chosen is not None and chosen.prepare is not None:
            bound.prepare[name] = _imported(chosen, "prepare", chosen.prepare)
        bound.table.append((name, chosen.name if chosen else "reference", " | ".join(rejected)))
    return bound
