"""Level 4: what a graph runner owes to those who call its programs, shown with a program of a few numbers.

Owns: the case of the graph runner by itself.
Reads: `subject`.
Never: loads a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from oarlock.conformance.cases import Case, CheckFailed
from oarlock.conformance.subject import DTYPES, Subject

LEVEL = 4
CALLS = 3


def cases() -> Iterator[Case]:
    yield Case("runner[graph_runner]", LEVEL, graph_runner)


def graph_runner(subject: Subject) -> None:
    """Calls of one program compute each from its own arguments, leave what is not written state, and do not touch each other's results."""
    dtype, in_place = DTYPES[subject.dtypes[0]], subject.device.capabilities.kv_update == "in_place"

    def program(weights: Any, written: dict[str, Any], read: dict[str, Any], packed: torch.Tensor, inputs: dict[str, Any]) -> tuple[Any, Any]:
        state = written["state"].add_(packed) if in_place else written["state"] + packed
        return {"state": state}, {"sum": weights["w"] * inputs["x"] + read["r"], "ids": inputs["ids"] + state}

    def numbers(start: int) -> torch.Tensor:
        return torch.arange(start, start + 4)

    weights, read = ({name: subject.upload(numbers(n).to(dtype))} for name, n in (("w", 2), ("r", 7)))
    state = subject.upload(numbers(0).int())
    example = state if in_place else subject.upload(numbers(0).int())  # donation may eat it; what is written in place stays where it is

    def arguments(n: int, state: torch.Tensor) -> tuple[Any, ...]:
        inputs = {"x": subject.upload(numbers(n).to(dtype)), "ids": subject.upload(numbers(10 * n).int())}
        return weights, {"state": state}, read, subject.upload(numbers(100 * n).int()), inputs

    with subject.session():
        run = subject.graph.compile(program, arguments(9, example), "conformance-graph")
    results = []
    for n in range(1, CALLS + 1):
        before, args = subject.download(state).clone(), arguments(n, state)
        with subject.session():
            new, out = run(*args)
            subject.graph.retire(args[1], new)
        state = new["state"]
        after = before + numbers(100 * n).int()
        want = {"sum": (numbers(2) * numbers(n) + numbers(7)).to(dtype), "ids": numbers(10 * n).int() + after}
        results.append((out, want))
        _same(subject, {"state": after, **want}, {"state": state, **out}, f"call {n} does not compute from its own arguments")
        kept = {"weights": args[0]["w"], "read state": args[2]["r"], "packed": args[3], **args[4]}
        sent = {"weights": numbers(2).to(dtype), "read state": numbers(7).to(dtype), "packed": numbers(100 * n).int()}
        sent |= {"x": numbers(n).to(dtype), "ids": numbers(10 * n).int()}
        _same(subject, sent, kept, "a call changed an argument that is not written state, and that later programs read too")
    for out, want in results:
        _same(subject, want, out, "results of a call changed when the program ran again; they must be copied out of a graph's buffers")


def _same(subject: Subject, want: dict[str, torch.Tensor], got: dict[str, torch.Tensor], what: str) -> None:
    for name, right in want.items():
        have = subject.download(got[name])
        if have.dtype != right.dtype or not torch.equal(have, right):
            raise CheckFailed(f"graph_runner: {what}: {name} is {have.tolist()} instead of {right.tolist()}")
