"""What a configuration asks of a device: refused, or said to hold already."""

from __future__ import annotations

from typing import Any

import pytest
from oarlock.backend_api import Capabilities, Claims
from oarlock.config.device_rules import check_claims, check_device, notes_for
from oarlock.config.resolve import resolve
from oarlock.errors import UnsupportedByBackend

HOST = Capabilities(dtypes=("float32", "bfloat16"), host_is_device=True, default_swap_bytes=0)
GRAPHS = Capabilities(dtypes=("bfloat16",), execution="capture", block_sizes=(16,))


def config(**values: Any) -> Any:
    return resolve({"model": "m", **values}, host_bytes=1 << 40).engine


@pytest.mark.parametrize(
    ("capabilities", "values", "words"),
    [
        (GRAPHS, {"block_size": 8}, ["--block-size 8", "takes 16"]),
        (GRAPHS, {"dtype": "half"}, ["--dtype float16", "bfloat16"]),
        (GRAPHS, {"threads": 2}, ["--threads 2"]),
        (HOST, {"preemption_mode": "swap"}, ["--preemption-mode swap", "--swap-space"]),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_what_it_can(capabilities: Capabilities, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedByBackend) as caught:
        check_device(capabilities, config(**values), "the device")
    assert all(word in str(caught.value) for word in words)


CLAIMS = Claims(dtypes=("bfloat16",), block_sizes=(16,), memory_bytes=2 << 30)


@pytest.mark.parametrize(
    ("claims", "values", "words"),
    [
        (CLAIMS, {"block_size": 8}, ["--block-size 8: fast takes 16"]),
        (CLAIMS, {"dtype": "half"}, ["--dtype float16: fast computes in bfloat16"]),
        (CLAIMS, {"threads": 2}, ["--threads 2"]),
        (CLAIMS, {"kv_cache_memory": "3GiB"}, ["--kv-cache-memory 3.00 GiB: fast has 2.00 GiB in all"]),
        (Claims(num_devices=2), {"tensor_parallel_size": 3}, ["--tensor-parallel-size 3: devices of fast here: 2"]),
        (Claims(default_swap_bytes=0), {"preemption_mode": "swap"}, ["--preemption-mode swap", "--swap-space"]),
    ],
)
def test_what_a_probe_excludes_is_refused_before_a_process_starts(claims: Claims, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedByBackend) as caught:
        check_claims(claims, config(**values), "fast")
    assert all(word in str(caught.value) for word in words)


def test_what_a_probe_does_not_claim_is_left_to_the_device() -> None:
    for values in ({"block_size": 8}, {"dtype": "half"}, {"kv_cache_memory": "3GiB"}, {"preemption_mode": "swap"}, {"enforce_eager": True}):
        check_claims(Claims(), config(**values), "fast")
        check_claims(None, config(**values), "fast")
    check_claims(Claims(num_devices=2), config(tensor_parallel_size=2), "fast")
    check_claims(CLAIMS, config(block_size=16, dtype="bfloat16", kv_cache_memory="1GiB"), "fast")


def test_what_a_device_can_do_passes() -> None:
    check_device(HOST, config(block_size=8, dtype="float", threads=2, preemption_mode="swap", swap_space=1), "the device")
    check_device(GRAPHS, config(block_size=16, preemption_mode="swap"), "the device")


@pytest.mark.parametrize(
    ("capabilities", "values", "flags"),
    [
        (HOST, {}, []),
        (HOST, {"enforce_eager": True}, ["--enforce-eager"]),
        (GRAPHS, {"enforce_eager": True}, []),
        (HOST, {"max_seq_len_to_capture": 64}, ["--max-seq-len-to-capture"]),
        (GRAPHS, {"max_seq_len_to_capture": 64}, []),
        (GRAPHS, {"max_seq_len_to_capture": 64, "enforce_eager": True}, ["--max-seq-len-to-capture"]),
        (HOST, {"disable_custom_all_reduce": True}, ["--disable-custom-all-reduce"]),
        (HOST, {"max_parallel_loading_workers": 1}, ["--max-parallel-loading-workers"]),
        (HOST, {"max_parallel_loading_workers": 1, "tensor_parallel_size": 2}, []),
    ],
)
def test_what_already_holds_is_said_once(capabilities: Capabilities, values: dict[str, Any], flags: list[str]) -> None:
    assert [note.split()[0].rstrip(":") for note in notes_for(capabilities, config(**values))] == flags


def test_an_all_reduce_that_exists_is_really_turned_off() -> None:
    asked = config(disable_custom_all_reduce=True, tensor_parallel_size=2)
    assert notes_for(HOST, asked, custom_all_reduce=True) == []
