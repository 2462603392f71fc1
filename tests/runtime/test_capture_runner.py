"""Capture and replay over a stand-in that records operations as a device does: it runs nothing while it records."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import CaptureRunner, Device
from oarlock.conformance.stand_in_graphs import StandInGraph


class HostDevice(Device):
    """CPU tensors."""

    torch_device = torch.device("cpu")
    capabilities = Capabilities(execution="capture")

    def activate(self) -> None:
        """Nothing to make current."""


class Runner(CaptureRunner):
    """Over stand-in graphs."""

    def new_graph(self) -> Any:
        return StandInGraph()

    def new_pool(self) -> Any:
        return object()

    def recording(self, graph: Any, pool: Any) -> contextlib.AbstractContextManager[Any]:
        self._pools = [*getattr(self, "_pools", []), pool]
        return graph.recording()


@pytest.fixture
def runner() -> CaptureRunner:
    return Runner(HostDevice())


def program(weights: Any, written: Any, read: Any, packed: torch.Tensor, inputs: Any) -> Any:
    """Not idempotent on purpose: what runs twice shows."""
    new = inputs["x"] * weights["w"]
    written["kv"][0].index_put_((packed,), written["kv"][0][packed] + new)
    return {"kv": written["kv"]}, {"hidden": new, "first": new[:1]}


def example(x: float = 1.0) -> tuple[Any, ...]:
    return {"w": torch.full((2,), 3.0)}, {"kv": [torch.zeros(4, 2)]}, {}, torch.tensor([1, 2], dtype=torch.int32), {"x": torch.full((2, 2), x)}


def test_each_call_runs_the_program_once_on_that_calls_inputs(runner):
    run = runner.compile(program, example(), "forward-1")
    weights, written, read, packed, inputs = example()
    for call in range(1, 4):
        state, out = run(weights, written, read, packed, {"x": torch.full((2, 2), float(call))})
        assert state["kv"][0] is written["kv"][0] and torch.equal(out["hidden"], torch.full((2, 2), 3.0 * call))
    assert written["kv"][0].tolist() == [[0, 0], [18, 18], [18, 18], [0, 0]]  # 3 * (1 + 2 + 3)
    run(weights, written, read, torch.tensor([0, 3], dtype=torch.int32), inputs)
    assert written["kv"][0][:, 0].tolist() == [3, 18, 18, 3]
    assert runner._captures == 1


def test_results_outlive_the_next_replay(runner):
    run, args = runner.compile(program, example(), "forward-1"), example()
    first = run(*args)[1]
    run(*args[:4], {"x": torch.full((2, 2), 9.0)})
    assert torch.equal(first["hidden"], torch.full((2, 2), 3.0)) and torch.equal(first["first"], torch.full((1, 2), 3.0))


def test_other_state_or_weights_are_recorded_anew(runner):
    run = runner.compile(program, example(), "forward-1")
    for x in (1.0, 2.0):
        args = example(x)
        assert torch.equal(run(*args)[1]["hidden"], torch.full((2, 2), 3.0 * x))
        assert args[1]["kv"][0][1, 0] == 3.0 * x
    assert runner._captures == 2


def test_other_shapes_are_refused(runner):
    run, args = runner.compile(program, example(), "forward-1"), example()
    run(*args)
    with pytest.raises(RuntimeError, match=r"program forward-1 was captured for \[2, 2\].*called with \[3, 2\]"):
        run(*args[:4], {"x": torch.ones(3, 2)})


def test_a_program_that_waits_for_the_device_is_an_error_that_names_the_way_out(runner):
    run = runner.compile(lambda w, written, r, p, i: ({}, {"n": i["x"] * float(i["x"].sum())}), example(), "head-1")
    with pytest.raises(RuntimeError, match="program head-1 cannot be captured: .*--enforce-eager"):
        run(*example())


def test_new_state_is_an_error(runner):
    run = runner.compile(lambda w, written, r, p, i: ({"kv": [written["kv"][0] + 1]}, {}), example(), "block_copy-1")
    with pytest.raises(RuntimeError, match="block_copy-1 returns new state"):
        run(*example())


def test_all_graphs_share_one_pool(runner):
    for tag in ("forward-1", "forward-2"):
        runner.compile(program, example(), tag)(*example())
    first, second = runner._pools
    assert first is second


def test_an_output_of_two_names_is_copied_once(runner):
    def twice(w: Any, written: Any, r: Any, p: Any, i: dict[str, Any]) -> Any:
        y = i["x"] + 1
        return {}, {"hidden": y, "all": y}

    out = runner.compile(twice, example(), "forward-1")(*example())[1]
    assert out["hidden"] is out["all"]


def test_memory_that_runs_out_stays_that_error(runner, monkeypatch):
    def launch(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    run = runner.compile(program, example(), "forward-1")
    run._fn = launch
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run(*example())
