"""sim-eager: what it lets through, what it refuses and what it counts."""

from __future__ import annotations

import gc
import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
from oarlock_sim.counters import COUNT, reset


def test_verify_computes(sim):
    from oarlock_sim.eager import SimEagerDevice

    SimEagerDevice().verify()
    assert COUNT["d2h"] == 1


@pytest.mark.parametrize(
    "mix",
    [
        lambda d, h: d + h,
        lambda d, h: h.to(torch.bfloat16) * d,
        lambda d, h: d[torch.tensor([0, 1])],
        lambda d, h: torch.nn.functional.linear(h, d),
        lambda d, h: d.index_put_((torch.tensor([0]),), h[:1]),
        lambda d, h: torch.cat([d, h]),
        lambda d, h: torch.where(h > 0, d, d),
    ],
    ids=["add", "mul", "index", "linear", "index_put_", "cat", "where"],
)
def test_mixing_device_and_host_is_an_error(sim, mix):
    with pytest.raises(RuntimeError, match=r"on sim:0 and on the host"):
        mix(torch.ones(4, 4, device=sim), torch.ones(4, 4))


def test_a_host_scalar_may_be_used_as_on_other_devices(sim):
    assert (torch.ones(2, device=sim) * torch.tensor(3.0)).cpu().tolist() == [3.0, 3.0]


def test_numpy_and_tolist_are_refused(sim):
    tensor = torch.ones(2, device=sim)
    with pytest.raises(RuntimeError):
        tensor.numpy()
    with pytest.raises(RuntimeError):
        tensor.tolist()


def test_copies_are_counted_by_direction(sim):
    tensor = torch.ones(3, dtype=torch.int32).to(sim)
    assert (COUNT["h2d"], COUNT["d2h"], COUNT["h2d_int64"]) == (1, 0, 0)
    torch.empty(3, dtype=torch.int32).copy_(tensor)
    tensor.to("cpu")
    assert (COUNT["h2d"], COUNT["d2h"]) == (1, 2)
    tensor.copy_(torch.zeros(3, dtype=torch.int32))
    torch.tensor([1, 2], device=sim)
    assert (COUNT["h2d"], COUNT["h2d_int64"]) == (3, 1)
    tensor.copy_(tensor.clone())
    tensor.to(torch.float32)
    assert (COUNT["h2d"], COUNT["d2h"], COUNT["sync"]) == (3, 2, 0)


@pytest.mark.parametrize(
    ("wait", "syncs"),
    [
        (lambda t: t.sum().item(), 1),
        (lambda t: bool(t[0] > 0), 1),
        (lambda t: t.nonzero(), 1),
        (lambda t: t[t > 0], 1),
        (lambda t: t.index_put_((t > 0,), torch.zeros((), device=t.device)), 1),
        (lambda t: torch.masked_select(t, t > 0), 1),
        (lambda t: torch.equal(t, t), 1),
        (lambda t: torch.where(t > 0, t, -t), 0),
        (lambda t: t[torch.arange(2, dtype=torch.int32, device=t.device)], 0),
        (lambda t: t.argmax(), 0),
    ],
    ids=["item", "bool", "nonzero", "mask", "mask_put", "masked_select", "equal", "where", "gather", "argmax"],
)
def test_waits_for_the_device_are_counted(sim, wait, syncs):
    tensor = torch.tensor([1.0, -1.0, 2.0], device=sim)
    reset()
    wait(tensor)
    assert COUNT["sync"] == syncs


def test_host_work_inside_the_context_is_not_counted(sim):
    (torch.ones(4) + 1).sum().item()
    assert not COUNT


def test_in_place_writes_through_views_reach_the_whole(sim):
    cache = torch.zeros(3, 2, 4, device=sim)
    flat = cache.view(-1, 4)
    slots = torch.tensor([1, 5], dtype=torch.int32, device=sim)
    flat.index_put_((slots,), torch.ones(2, 4, device=sim))
    cache.view(3, -1)[1].copy_(torch.full((8,), 2.0, device=sim))
    cache.index_copy_(0, torch.tensor([0], device=sim), torch.full((1, 2, 4), 3.0, device=sim))
    cache[2, 0, 1:3] = 4.0
    want = torch.zeros(3, 2, 4)
    want[2, 1], want[1], want[0], want[2, 0, 1:3] = 1.0, 2.0, 3.0, 4.0
    assert torch.equal(cache.cpu(), want)
    assert flat.index_put_((slots,), torch.ones(2, 4, device=sim)) is flat


def test_changing_a_shape_in_place_is_refused(sim):
    with pytest.raises(RuntimeError, match="shape in place"):
        torch.ones(3, device=sim).unsqueeze_(0)


def test_bfloat16_agrees_with_the_host(sim):
    x, w = torch.randn(5, 16, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    got = torch.nn.functional.linear(x.to(sim), w.to(sim))
    assert got.dtype == torch.bfloat16 and got.device == sim
    assert torch.equal(got.cpu(), torch.nn.functional.linear(x, w))


def test_a_module_moves_to_the_device(sim):
    layer = torch.nn.Linear(3, 4)
    want = layer(torch.ones(2, 3))
    assert torch.allclose(layer.to(sim)(torch.ones(2, 3, device=sim)).cpu(), want)


def test_memory_is_counted_once_for_all_views_and_freed_with_the_last(sim):
    from oarlock_sim.tensor import MEMORY

    gc.collect()
    before = MEMORY.used_bytes
    tensor = torch.zeros(1024, device=sim)
    view = tensor.view(32, 32)[3:]
    assert MEMORY.used_bytes - before == 4096
    del tensor
    gc.collect()
    assert MEMORY.used_bytes - before == 4096
    del view
    gc.collect()
    assert MEMORY.used_bytes == before


def test_more_than_the_simulated_memory_is_out_of_memory(sim):
    from oarlock_sim.eager import SimEagerDevice

    small = SimEagerDevice(options={"sim_memory": 2**-10})
    small.activate()
    try:
        free, total = small.memory_info()
        assert total == 1 << 20 and free <= total
        with pytest.raises(torch.OutOfMemoryError, match="2097152 bytes wanted"):
            torch.zeros(1 << 19, device=sim)
    finally:
        SimEagerDevice().activate()


def test_entering_the_context_twice_counts_once(sim):
    from oarlock_sim.eager import SimEagerDevice

    with SimEagerDevice().context():
        torch.ones(2).to(sim)
    assert COUNT["h2d"] == 1


def test_leaving_the_context_restores_the_thread():
    """Outside, torch.tensor works as ever and no dispatch mode is left."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None
    assert torch._C._only_lift_cpu_tensors() is False


def _collectives(rank: int, port: int) -> None:
    """One of two ranks: every collective gives what both of them expect."""
    from oarlock.backend_api.runtime import DistributedCommunicator
    from oarlock_sim.eager import SimEagerDevice

    device = SimEagerDevice(rank)
    device.activate()
    with torch.no_grad(), device.context():
        communicator = DistributedCommunicator(rank, 2, "gloo", f"tcp://127.0.0.1:{port}")
        try:
            mine = torch.full((1, 2), float(rank + 1), device=device.torch_device)
            assert communicator.all_reduce(mine.clone()).cpu().tolist() == [[3.0, 3.0]]
            assert communicator.all_gather(mine).cpu().tolist() == [[1.0, 1.0, 2.0, 2.0]]
            assert communicator.broadcast(mine.clone()).cpu().tolist() == [[1.0, 1.0]]
        finally:
            communicator.close()
    # A thread of the group that outlives close() may abort the process when the interpreter ends.
    names = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "gloo" in name]


def test_gloo_collectives_reach_the_device_tensors(sim):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=_collectives, args=(1, port))
    other.start()
    try:
        _collectives(0, port)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
