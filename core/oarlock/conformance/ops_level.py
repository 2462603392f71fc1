"""Level 2: every op of the registry, as core binds it for the device, against the reference in float64 on the host.

Owns: the cases of the level (made from the registry's own generators).
Reads: the op registry, `subject`, `metrics`.
Never: lists an op; an op without generator or limit fails its coverage case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from oarlock.backend_api import Support
from oarlock.backend_api.runtime import Op, PureProgram, registry
from oarlock.conformance.cases import Case, CheckFailed, Measure
from oarlock.conformance.metrics import compare, upcast
from oarlock.conformance.subject import DTYPES, Guarded, Subject

LEVEL = 2
REPEATS = 3  # draws of each case under --full


def cases() -> Iterator[Case]:
    """A coverage case for each op, then one for each op, dtype and size."""
    for name, op in sorted(registry().items()):
        if op.tested_in != "ops":
            continue
        yield Case(f"{name}[coverage]", LEVEL, partial(_covered, op), op=name)
        if op.generate is None:
            continue
        for dtype, limit in op.tolerance.items():
            for shape in op.cases:
                text = ",".join(f"{key}={value}" for key, value in shape.items())
                for repeat in range(REPEATS):
                    case_id = f"{name}[{dtype},{text}]" + (f"#{repeat}" if repeat else "")
                    run = partial(_run, op, shape, dtype, limit, case_id)
                    yield Case(case_id, LEVEL, run, name, dtype, partial(declared, op, dtype), quick=not repeat)


def _covered(op: Op, subject: Subject) -> None:
    if op.generate is None or not op.tolerance or not op.cases or op.cost is None:
        raise CheckFailed(f"op {op.name} has no generator, no cases, no tolerance or no cost")


def declared(op: Op, dtype: str, subject: Subject) -> Support:
    """Ops with one dtype (the sampler's, on float32 logits) are needed on every device; else the device must declare the dtype."""
    if len(op.tolerance) == 1 or dtype in subject.dtypes:
        return Support(True)
    return Support(False, (f"the device declares {', '.join(subject.dtypes)}",))


def _run(op: Op, shape: dict[str, Any], dtype: str, limit: float, case_id: str, subject: Subject) -> Measure:
    assert op.generate is not None
    seed = Case(case_id, LEVEL, lambda _: None).seed
    args, kwargs = op.generate(shape, DTYPES[dtype], torch.Generator().manual_seed(seed))
    return check_call(op, args, kwargs, dtype, limit, case_id, subject)


def check_call(op: Op, args: Sequence[Any], kwargs: dict[str, Any], dtype: str, limit: float, case_id: str, subject: Subject) -> Measure:
    """One call on the device against the reference in float64 on the host. Raises CheckFailed as `compare` does, and for writes beside."""
    reference = _tensors(op.reference(*args, **kwargs))
    oracle = _tensors(op.reference(*pytree.tree_map_only(torch.Tensor, upcast, args), **kwargs))
    got = _on_device(op, args, kwargs, reference, dtype, case_id, subject)
    return compare(got, reference, oracle, subject.limit(op.name, dtype, limit))


def _on_device(
    op: Op, args: Sequence[Any], kwargs: dict[str, Any], results: list[torch.Tensor], dtype: str, case_id: str, subject: Subject
) -> list[torch.Tensor]:
    """Call the bound implementation as part of a pure program. Checks that nothing else was written."""
    ops = subject.ops(dtype if dtype in subject.dtypes else subject.dtypes[0])
    implementation, prepare = getattr(ops, op.name), ops.prepare.get(op.name)
    guards: list[tuple[Guarded, bool]] = []

    def guard(name: str, leaf: torch.Tensor) -> torch.Tensor:
        made = subject.guarded(name, leaf)
        guards.append((made, name in op.mutates))
        return made.tensor

    weights, written, inputs, program = arrange(op, args, kwargs, implementation, prepare, subject, guard)
    fences = subject.fences(results)
    _, out = subject.run(case_id, program, weights=weights, written=written, inputs=inputs)
    got = [subject.download(t) for t in _tensors(out["results"])]
    for fence, sentinel in fences:
        if not torch.equal(subject.download(fence), sentinel):
            raise CheckFailed("memory beside a result was written")
    functional = subject.device.capabilities.kv_update == "functional"
    for made, may_change in guards:
        if not (may_change and functional):  # replaced state is gone on such a device
            made.check(subject, may_change)
    return got


def arrange(
    op: Op, args: Sequence[Any], kwargs: dict[str, Any], implementation: Callable[..., Any], prepare: Callable[..., Any] | None, subject: Subject,
    upload: Callable[[str, torch.Tensor], torch.Tensor],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], PureProgram]:  # fmt: skip
    """One call of an op as a pure program: (weights, written state, inputs, program). Static arguments are closed over."""
    names = list(inspect.signature(op.reference).parameters)
    weights: dict[str, Any] = {}
    written: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for name, value in zip(names, args, strict=False):
        leaves, form = pytree.tree_flatten(value)  # a quantised weight is a dict of tensors
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            continue  # a static argument
        if prepare is not None and name in ("weight", "w13", "w2"):
            with subject.session():
                weights[name] = prepare(pytree.tree_map(lambda leaf: subject.device.place(name, leaf, "none"), value))  # noqa: B023  used at once
            continue
        (written if name in op.mutates else inputs)[name] = pytree.tree_unflatten([upload(name, leaf) for leaf in leaves], form)

    def program(
        weights: Any, written: dict[str, Any], read: Any, packed: Any, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {**weights, **written, **inputs}
        out = implementation(*(given.get(name, value) for name, value in zip(names, args, strict=False)), **kwargs)
        return {name: out for name in written}, {"results": out}

    return weights, written, inputs, program


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
