"""What the package says about options, configuration and models, and its counted collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oarlock_sim
import pytest
import torch
from oarlock.backend_api import ConfigChange
from oarlock_sim import counters, report
from oarlock_sim.collectives import CountingCommunicator

EAGER, STATIC = oarlock_sim.devices()


def config(typed: tuple[str, ...] = (), max_num_seqs: int = 256, ranks: int = 1, memory: float = 2.0, dtype: str = "auto", report: bool = False) -> Any:
    return SimpleNamespace(
        typed=typed,
        scheduler=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel=SimpleNamespace(tensor_parallel_size=ranks),
        device=SimpleNamespace(options={"sim_memory": memory, "sim_report": report}),
        model=SimpleNamespace(dtype=dtype),
    )


def model(vocab_size: int = 1000, num_layers: int = 2) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, num_layers=num_layers, hidden_size=64, intermediate_size=128, head_dim=16, num_heads=4, num_kv_heads=2)


def test_sim_static_keeps_the_batch_small_unless_its_size_was_typed():
    path = "scheduler.max_num_seqs"
    (change,) = oarlock_sim.adjust_config(config(), STATIC)
    assert (change.path, change.value) == (path, oarlock_sim.FEW_SEQS) and isinstance(change, ConfigChange)
    assert oarlock_sim.adjust_config(config(typed=(path,)), STATIC) == []
    assert oarlock_sim.adjust_config(config(max_num_seqs=4), STATIC) == []
    assert oarlock_sim.adjust_config(config(), EAGER) == []


def test_the_lower_bound_of_weights():
    # 1000 x 64 embedding; each layer 64 x 16 x 2 x (4 + 2) attention and 2 x 64 x 128 feed-forward; two bytes at least.
    assert oarlock_sim.least_weight_bytes(model(), "auto") == 2 * (64_000 + 2 * (12_288 + 16_384))
    assert oarlock_sim.least_weight_bytes(model(), "float32") == 4 * (64_000 + 2 * (12_288 + 16_384))


def test_a_model_that_cannot_fit_is_a_problem_with_its_remedy():
    assert oarlock_sim.check_model(model(), config(), EAGER) == []
    (problem,) = oarlock_sim.check_model(model(vocab_size=50_000_000), config(), EAGER)
    assert problem.severity == "error" and "at least 6 GiB" in problem.text and "--sim-memory is 2" in problem.text
    assert problem.remedy == "give --sim-memory 8.9 or more"
    assert oarlock_sim.check_model(model(vocab_size=50_000_000), config(memory=9), EAGER) == []


def test_the_claims_say_how_many_devices_there_are():
    for device in (EAGER, STATIC):
        assert device.probe().claims.num_devices == oarlock_sim.NUM_DEVICES


def test_collectives_are_cores_and_counted(tmp_path):
    counters.reset()
    comm = CountingCommunicator(0, 1, f"file://{tmp_path}/rendezvous")
    try:
        tensor = torch.tensor([1.0, 2.0])
        assert torch.equal(comm.all_reduce(tensor.clone()), tensor)
        assert torch.equal(comm.all_gather(tensor), tensor)
        assert torch.equal(comm.broadcast(tensor), tensor)
    finally:
        comm.close()
    assert counters.snapshot() == {"all_reduce": 1, "all_gather": 1, "broadcast": 1}


def test_the_report_is_made_only_when_asked_for_and_counts_from_then():
    assert report.make(config()) is None
    counters.reset()
    counters.COUNT["d2h"] = 5
    made = report.make(config(report=True))
    assert made is not None
    made.observe([object(), object()])
    assert "in another process" in made.text(counters.snapshot())
    counters.COUNT["d2h"] += 3
    text = made.text(counters.snapshot())
    assert text.splitlines()[0] == "sim: 2 steps" and text.splitlines()[2].split() == ["d2h", "3", "1.50"]


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_options_are_of_the_packages_namespace(kind):
    assert [o.namespace for o in oarlock_sim.options() if o.type == kind] == ["sim"]
