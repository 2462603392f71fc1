"""The compile seam: `Compiler`, with the vendor's behind it, or a strict stand-in on the host.

Owns: the protocol and both compilers.
Reads: `trace`, `vendor`.
Never: knows what a program computes; keeps an artifact (`cache` does).

Programs are flat here: a tuple of tensors in, a tuple out. `aliases` maps the number of an input to that of the output which
replaces it; such an output is the input itself, written in place.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oarlock_neuron import vendor
from oarlock_neuron.trace import FlatFn, Traced, restore, trace


class Compiled:
    """A compiled program: refuses shapes it was not compiled for."""

    def __init__(self, run: FlatFn, example: Sequence[Any], tag: str, artifact: bytes) -> None:
        self._run, self._tag, self.artifact = run, tag, artifact
        self._expected = signature(example)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        got = signature(inputs)
        if got != self._expected:
            where = next((at for at, (a, b) in enumerate(zip(self._expected, got, strict=False)) if a != b), min(len(got), len(self._expected)))
            want, have = (s[where] if where < len(s) else "nothing" for s in (self._expected, got))
            raise RuntimeError(f"program {self._tag} was compiled for input {where} {want} and called with {have}")
        return self._run(*inputs)


def signature(values: Sequence[Any]) -> list[Any]:
    """What is fixed at compilation: shapes and dtypes of tensors, everything else by value."""
    return [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]


class Compiler(abc.ABC):
    """One for each worker. `compiles` counts what was compiled, not what was loaded."""

    def __init__(self) -> None:
        self.compiles = 0

    @abc.abstractmethod
    def version(self) -> str:
        """Everything that an artifact depends on beside the program."""

    @abc.abstractmethod
    def compile(self, fn: FlatFn | Traced, example_inputs: Sequence[Any], *, aliases: Mapping[int, int], tag: str) -> Compiled:
        """Compile for the shapes of the example, whose aliased inputs may be overwritten. A `Traced` program was checked already.

        Raises:
            Unsuitable: the program cannot be compiled for static shapes.
        """

    @abc.abstractmethod
    def load(self, artifact: bytes, fn: Traced, example_inputs: Sequence[Any], *, aliases: Mapping[int, int], tag: str) -> Compiled:
        """What `compile` gave, from its `artifact`; `fn` is the same program.

        Raises:
            Exception: the artifact cannot be used.
        """


def _traced(fn: FlatFn | Traced, example: Sequence[Any], aliases: Mapping[int, int], tag: str) -> Traced:
    return fn if isinstance(fn, Traced) else trace(fn, example, aliases, tag)


class StrictCompiler(Compiler):
    """Stands in for the vendor's compiler on the host: the same checks, then the exported program, operator by operator.

    There is no machine code to keep: an artifact is the program's text, so that one under a wrong key is noticed.
    """

    def version(self) -> str:
        return f"strict, torch {torch.__version__}"

    def compile(self, fn: FlatFn | Traced, example_inputs: Sequence[Any], *, aliases: Mapping[int, int], tag: str) -> Compiled:
        traced = _traced(fn, example_inputs, aliases, tag)
        self.compiles += 1
        return Compiled(traced.run, example_inputs, tag, traced.text.encode())

    def load(self, artifact: bytes, fn: Traced, example_inputs: Sequence[Any], *, aliases: Mapping[int, int], tag: str) -> Compiled:
        if artifact != fn.text.encode():
            raise ValueError(f"it is the artifact of another program than {tag}")
        return Compiled(fn.run, example_inputs, tag, artifact)


class NeuronCompiler(Compiler):
    """The vendor's. What it is given was checked, so a refusal of its own is about an operator."""

    def version(self) -> str:
        return vendor.versions()

    def compile(self, fn: FlatFn | Traced, example_inputs: Sequence[Any], *, aliases: Mapping[int, int], tag: str) -> Compiled:
        traced = _traced(fn, example_inputs, aliases, tag)
        compiled, artifact = vendor.compile_program(traced.program.module(check_guards=False), tuple(example_inputs))
        self.compiles += 1
        return Compiled(restore(compiled, aliases), example_inputs, tag, artifact)

    def load(self, artifact: bytes, fn: Traced, example_inputs: Sequence[Any], *, aliases: Mapping[int, int], tag: str) -> Compiled:
        compiled = vendor.load_program(fn.program.module(check_guards=False), artifact)
        return Compiled(restore(compiled, aliases), example_inputs, tag, artifact)
