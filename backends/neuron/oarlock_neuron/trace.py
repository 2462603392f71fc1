"""A program as a graph of static shapes, or the reason why it cannot be one.

Owns: what a compiled device can take: no size that depends on data, no read by the host, known operators, 32-bit inputs,
    in-place writes to the declared inputs only.
Reads: torch.export.
Never: compiles; knows a device.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx import Node

FlatFn = Callable[..., tuple[Any, ...]]
TOO_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex64, torch.complex128)
MAX_CONSTANT_BYTES = 1 << 20  # weights are arguments; what a program closes over is compiled into it
# Operators outside torch's table of the core set and its decompositions: shifts, forms of view and copy, and checks.
MORE_OPS = frozenset(
    f"aten::{name}"
    for name in ("__lshift__", "__rshift__", "_assert_tensor_metadata", "bitwise_left_shift", "bitwise_right_shift", "chunk", "contiguous",
                 "flatten", "matmul", "reshape", "sort", "to", "view")
)  # fmt: skip


class Unsuitable(ValueError):
    """The program cannot be compiled for static shapes; the text names program, operator and reason."""


@dataclass(frozen=True)
class Traced:
    """A checked program. Called as the function was: flat inputs, flat outputs."""

    run: FlatFn  # writes aliased outputs into their inputs; returns all outputs, the aliased ones as those inputs
    program: Any  # torch.export.ExportedProgram; returns the outputs that are not aliased
    text: str  # operators, shapes, dtypes and constants: equal texts compute the same


def check_inputs(example: Sequence[Any], tag: str) -> None:
    """Raises Unsuitable for a dtype that the device would narrow."""
    for at, value in enumerate(example):
        if isinstance(value, torch.Tensor) and value.dtype in TOO_WIDE:
            raise Unsuitable(f"program {tag}: input {at} {list(value.shape)} is {value.dtype}; a Neuron core computes in 32 bits, pass torch.int32 or torch.float32")


def write_back(fn: FlatFn, aliases: Mapping[int, int], tag: str, unchanged: set[int] | None = None) -> FlatFn:
    """`fn` with output `aliases[i]` written into input i, returning only the other outputs.

    `unchanged` collects the inputs that `fn` returned as they were.

    Raises:
        Unsuitable: an aliased output differs from its input in shape or dtype.
    """
    kept = set(aliases.values())

    def program(*inputs: Any) -> tuple[Any, ...]:
        outputs = fn(*inputs)
        for i, o in aliases.items():
            new, old = outputs[o], inputs[i]
            if new is old:
                if unchanged is not None:
                    unchanged.add(i)
                continue
            if new.shape != old.shape or new.dtype != old.dtype:
                raise Unsuitable(f"program {tag}: output {o} {list(new.shape)} {new.dtype} cannot replace input {i} {list(old.shape)} {old.dtype}")
            old.copy_(new)
        return tuple(value for o, value in enumerate(outputs) if o not in kept)

    return program


def trace(fn: FlatFn, example: Sequence[Any], aliases: Mapping[int, int], tag: str) -> Traced:
    """Export and check.

    Raises:
        Unsuitable: see the module.
    """
    check_inputs(example, tag)
    unchanged: set[int] = set()
    program = _export(write_back(fn, aliases, tag, unchanged), tuple(example), tag)
    _check_shapes(program, tag)
    _check_ops(program, tag)
    _check_constants(program, tag)
    _check_aliases(program, len(example), set(aliases) - unchanged, tag)
    return Traced(restore(_module(program), aliases), program, _text(program))


def restore(module: FlatFn, aliases: Mapping[int, int]) -> FlatFn:
    """Put the aliased inputs back among the outputs of a program made by `write_back`."""
    ordered = sorted((o, i) for i, o in aliases.items())

    def run(*inputs: Any) -> tuple[Any, ...]:
        outputs = list(module(*inputs))
        for o, i in ordered:
            outputs.insert(o, inputs[i])
        return tuple(outputs)

    return run


class _Holder(torch.nn.Module):
    def __init__(self, fn: FlatFn) -> None:
        super().__init__()
        self._fn = fn

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return self._fn(*inputs)


def _export(fn: FlatFn, example: tuple[Any, ...], tag: str) -> Any:
    try:
        return torch.export.export(_Holder(fn), example, strict=False)
    except Unsuitable:
        raise
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Unsuitable(f"program {tag} cannot be exported with static shapes: {first}") from error


def _module(program: Any) -> FlatFn:
    made: FlatFn = program.module(check_guards=False)  # shapes are checked by the caller, with words of its own
    return made


def _calls(program: Any) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def _check_shapes(program: Any, tag: str) -> None:
    """No symbol anywhere: torch.export takes boolean indexing and .item() and gives them sizes known only at run time."""
    for node in _calls(program):
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                raise Unsuitable(f"program {tag}: {node.target} has a result that depends on data ({node.format_node()})")


def _check_ops(program: Any, tag: str) -> None:
    for node in _calls(program):
        op = node.target
        if not isinstance(op, torch._ops.OpOverload):
            continue  # operator.getitem
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Unsuitable(f"program {tag}: {op} draws from the device's generator; programs are given their random bits")
        if not is_allowed(op):
            raise Unsuitable(f"program {tag}: {op} is not among the operators that a compiled program may use")


@functools.cache
def is_allowed(op: torch._ops.OpOverload) -> bool:
    """Of the core operator set, or broken down into it by torch's table, or one of MORE_OPS; an in-place form counts as its plain one."""
    if op.namespace not in ("aten", "prims"):
        return False
    name = op._schema.name.rstrip("_") if op._schema.is_mutable else op._schema.name
    if torch.Tag.core in op.tags or name in MORE_OPS or op in _decomposed():
        return True
    plain = getattr(torch.ops.aten, name.partition("::")[2], None)
    overload = getattr(plain, op._overloadname, None) if plain is not None else None
    if overload is not None and overload is not op:
        return is_allowed(overload)
    return False


@functools.cache
def _decomposed() -> frozenset[Any]:
    """Those of torch's table; not its linear algebra, which ends in factorisations outside the core set."""
    return frozenset(op for op in core_aten_decompositions() if not str(op).startswith("aten.linalg_"))


def _check_constants(program: Any, tag: str) -> None:
    size = sum(value.untyped_storage().nbytes() for value in program.constants.values() if isinstance(value, torch.Tensor))
    if size > MAX_CONSTANT_BYTES:
        raise Unsuitable(f"program {tag} closes over {size} bytes of tensors; weights are arguments ({MAX_CONSTANT_BYTES} bytes at most)")


def _check_aliases(program: Any, count: int, declared: set[int], tag: str) -> None:
    """What the exported graph writes to must be what was declared; no other output may be a view of it."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"][-count:] if count else []
    number = {node: at for at, node in enumerate(inputs)}
    written, bases = _writes(program)
    found = {number[node] for node in written if node in number}
    if found != declared:
        raise Unsuitable(f"program {tag} writes to its inputs {sorted(found)} and declares {sorted(declared)}; state must be returned, and nothing else written")
    output = next(node for node in program.graph.nodes if node.op == "output")
    for at, node in enumerate(output.args[0]):
        base = bases.get(node)
        if base in number and number[base] in declared and base is not node:
            raise Unsuitable(f"program {tag}: output {at} is a view of input {number[base]}, which the program overwrites")


def _writes(program: Any) -> tuple[set[Node], dict[Node, Node]]:
    """(placeholders that are written to, node -> placeholder that it is a view of)."""
    bases: dict[Node, Node] = {}
    written: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            bases[node] = node
        if node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            if node.args and node.args[0] in bases:
                bases[node] = bases[node.args[0]]
            continue
        schema = node.target._schema
        shares = any(result.alias_info is not None for result in schema.returns)
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not isinstance(value, Node) or value not in bases:
                continue
            if argument.alias_info.is_write:
                written.add(bases[value])
            if shares:
                bases[node] = bases[value]
    return written, bases


def _text(program: Any) -> str:
    lines = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        what = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {what}")
    for name, value in sorted(program.constants.items()):
        if isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            lines.append(f"constant {name} {list(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()}")
    return "\n".join(lines)
