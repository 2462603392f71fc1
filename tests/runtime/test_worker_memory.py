"""A device that is full says what did not fit and what can be done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from oarlock.errors import OutOfDeviceMemory
from oarlock.runtime.worker import Worker


def test_a_full_device_names_itself_what_did_not_fit_and_the_remedies():
    worker = SimpleNamespace(device=SimpleNamespace(describe=lambda: "a toy of 2 MiB"))
    with pytest.raises(OutOfDeviceMemory) as caught, Worker._naming_memory(worker, "a KV cache of 9 blocks"):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("4096 bytes wanted")
    for words in ("a toy of 2 MiB", "a KV cache of 9 blocks", "4096 bytes wanted", "--device-memory-utilization", "--max-num-seqs"):
        assert words in str(caught.value)


def test_other_faults_of_a_start_stay_what_they_are():
    worker = SimpleNamespace(device=SimpleNamespace(describe=lambda: "a toy"))
    with pytest.raises(ZeroDivisionError), Worker._naming_memory(worker, "the weights"):  # type: ignore[arg-type]
        raise ZeroDivisionError
