"""sim-static: the strict runner refuses what a compiled device could not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oarlock_sim.counters import COUNT, reset
from oarlock_sim.static import SimStaticDevice, StrictRunner


@pytest.fixture
def runner() -> StrictRunner:
    reset()
    return StrictRunner(SimStaticDevice())


def _state() -> dict[str, Any]:
    return {"kv": [(torch.zeros(4, 2, 3), torch.zeros(4, 2, 3))], "last": torch.zeros(5, dtype=torch.int32)}


def _args(tokens: int = 2) -> tuple[Any, ...]:
    return {"w": torch.ones(3)}, _state(), {"table": torch.ones(2)}, torch.zeros(tokens, dtype=torch.int32), {}


def _pure(weights, written, read, packed, inputs):
    keys, values = written["kv"][0]
    return {"kv": [(keys + 1, values)], "last": written["last"] + 1}, {"sum": packed.sum()}


def test_a_call_with_the_compiled_shapes_runs_and_is_counted(runner):
    program = runner.compile(_pure, _args(), "forward/2")
    program(*_args())
    program(*_args())
    assert (COUNT["compiles"], COUNT["runs"]) == (1, 2)
    assert runner.refuses_unwarmed()


@pytest.mark.parametrize(
    "change",
    [
        lambda a: (*a[:3], torch.zeros(3, dtype=torch.int32), {}),
        lambda a: (*a[:3], torch.zeros(2, dtype=torch.int64), {}),
        lambda a: (*a[:4], {"hidden": torch.ones(1)}),
        lambda a: ({"w": torch.ones(3), "bias": torch.ones(3)}, *a[1:]),
        lambda a: ({"weight": torch.ones(3)}, *a[1:]),
    ],
    ids=["shape", "dtype", "extra-input", "extra-weight", "renamed"],
)
def test_a_call_unlike_the_example_is_refused(runner, change):
    program = runner.compile(_pure, _args(), "forward/2")
    with pytest.raises(RuntimeError, match="forward/2 was compiled for"):
        program(*change(_args()))


def test_blocks_are_nan_until_they_are_written(runner):
    args = _args()
    runner.compile(_pure, args, "forward/2")
    keys, values = args[1]["kv"][0]
    assert keys.isnan().all() and values.isnan().all()
    assert not args[1]["last"].any()


def test_compiling_one_key_twice_is_refused(runner):
    runner.compile(_pure, _args(), "forward/2")
    with pytest.raises(ValueError, match="forward/2 is compiled twice"):
        runner.compile(_pure, _args(), "forward/2")


@pytest.mark.parametrize("where", ["weights", "written", "read", "packed"])
def test_writing_to_an_input_is_refused(runner, where):
    def impure(weights, written, read, packed, inputs):
        target = {"weights": weights["w"], "written": written["kv"][0][0], "read": read["table"], "packed": packed}[where]
        target.add_(1)
        return written, {}

    program = runner.compile(impure, _args(), "impure")
    with pytest.raises(RuntimeError, match="wrote to its input .* in place"):
        program(*_args())


def test_replaced_state_is_freed_and_kept_state_is_not(runner):
    old = _state()
    kept = old["kv"][0][1]
    new = {"kv": [(old["kv"][0][0] + 1, kept)], "last": old["last"] + 1}
    runner.retire(old, new)
    assert old["kv"][0][0].untyped_storage().nbytes() == 0
    assert old["last"].untyped_storage().nbytes() == 0
    assert kept.untyped_storage().nbytes() > 0
    assert COUNT["retired"] == 2


def test_a_view_of_kept_state_keeps_its_storage(runner):
    old = {"last": torch.arange(6, dtype=torch.int32)}
    new = {"last": old["last"].view(2, 3)}
    runner.retire(old, new)
    assert new["last"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_the_null_block_is_nan_after_a_run_and_other_state_is_not(runner):
    new = _state()
    runner.retire({}, new)
    for tensor in new["kv"][0]:
        assert tensor[0].isnan().all() and not tensor[1:].isnan().any()
    assert new["last"].tolist() == [0] * 5


@pytest.mark.parametrize(("seqs", "tokens", "blocks"), [(1, 1, 1), (2, 16, 3), (32, 2048, 86), (256, 40, 4)])
def test_buckets_hold_the_largest_step(seqs, tokens, blocks):
    from oarlock.shapes import BucketTable, ShapePolicy

    table = BucketTable(**SimStaticDevice().buckets(seqs, tokens, blocks))
    policy = ShapePolicy(table)
    assert policy.fits(seqs, [], blocks)
    assert policy.fits(seqs, [min(tokens, 32)], blocks)
    assert table.out_rows[-1] >= seqs + table.chunk_rows[-1]
    assert len(list(policy.keys())) <= 16


def test_placed_weights_count_against_the_simulated_memory():
    device = SimStaticDevice(options={"sim_memory": 2**-10})
    weight = device.place("w", torch.zeros(1024), "none")
    assert device.memory_info() == ((1 << 20) - 4096, 1 << 20)
    del weight
    assert device.memory_info() == (1 << 20, 1 << 20)
