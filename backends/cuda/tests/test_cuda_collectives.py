"""Which all-reduce takes which way, and that every way gives the same sum: two processes over gloo. NCCL and the kernels were never run."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import _symmetric_memory

from oarlock_cuda import plugin, vendor
from oarlock_cuda.device import CudaDevice


def test_two_ranks_add_up_the_same_by_every_way(tmp_path):
    script = str(Path(__file__).with_name("two_ranks.py"))
    ranks = [subprocess.Popen([sys.executable, script, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        answers = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for found in answers:
        assert {name: way for name, (way, _) in found.items()} == {
            "a decode": ["one"], "a decode in bfloat16": ["one"], "many rows": ["two"], "a prompt": [], "half precision": [], "an odd size": [], "nothing": [],
            "a view": ["one"], "at an odd address": ["one"], "the rest": [],
        }  # fmt: skip
        assert all(right for _, right in found.values()), found


def supports(ranks: int) -> tuple[bool, str]:
    (spec,) = plugin.communicator(None)
    found = spec.supports(device=CudaDevice(0, {"ranks": ranks}))
    return found.ok, "; ".join(found.reasons)


def test_it_serves_where_every_gpu_reads_every_other(stub):
    stub.count = 4
    assert supports(2) == supports(4) == (True, "")
    assert supports(3) == (False, "it serves 2, 4, 8 ranks, not 3")
    assert supports(8) == (False, "torch.cuda finds 4 GPUs")
    stub.apart = {(2, 0)}
    assert supports(4) == (False, "GPU 2 cannot read the memory of GPU 0") and supports(2)[0]


def test_torch_declares_the_calls_of_symmetric_memory(stub, monkeypatch):
    """The ops are declared in every build of torch; only their kernels need a GPU."""
    schemas = {name: getattr(torch.ops.symm_mem, name).default._schema for name in ("one_shot_all_reduce_copy", "two_shot_all_reduce_out")}
    assert [a.name for a in schemas["one_shot_all_reduce_copy"].arguments] == ["symm_buffer", "local_input", "reduce_op", "group_name"]
    assert [a.name for a in schemas["two_shot_all_reduce_out"].arguments] == ["input", "reduce_op", "group_name", "output"]
    monkeypatch.setattr(vendor, "_group", lambda: "0")
    calls = []
    monkeypatch.setattr(_symmetric_memory, "empty", lambda *size, **kwargs: calls.append((size, kwargs)) or torch.empty(*size, **kwargs))
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *args: calls.append(args))
    buffer = vendor.symmetric_buffer(64, torch.device("cpu"))
    assert calls == [((64,), {"dtype": torch.uint8, "device": torch.device("cpu")}), (buffer, "0")]
    inspect.signature(torch.cuda.can_device_access_peer).bind(0, 1)
    with torch.device("meta"):  # the ops' own shape functions
        shared = torch.empty(4, 8)
        assert vendor.one_shot(shared, torch.empty(4, 8)).shape == (4, 8)
        with pytest.raises(NotImplementedError):
            vendor.two_shots(shared)
