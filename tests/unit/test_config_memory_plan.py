"""The memory plan: worked examples, bounds, errors, and the host's memory under cgroup limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oarlock.config.sections import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from oarlock.errors import ConfigError
from oarlock.kv.manager import KVCacheManager
from oarlock.kv_spec import KVGroup
from oarlock.memory_plan import MemoryNeeds, activation_bytes, available_host_bytes, plan_memory, plan_worker, total_host_bytes
from toy_frontend import SUMMARY

MIB, GIB = 1 << 20, 1 << 30
# 1 GiB of weights, 100 MiB of activations; a block of 16 tokens is 1 MiB.
ACCELERATOR = MemoryNeeds(
    weights_bytes=GIB,
    activation_bytes=100 * MIB,
    program_bytes=0,
    bytes_per_block=MIB,
    block_size=16,
    available_bytes=9 * GIB,
    total_bytes=10 * GIB,
    host_is_device=False,
)
HOST = replace(ACCELERATOR, host_is_device=True)


def plan(needs: MemoryNeeds, **settings: Any) -> Any:
    return plan_memory(needs, **{"max_num_seqs": 256, "max_model_len": 2048, **settings})


def test_an_accelerator_gets_its_share_of_the_whole_less_what_is_used() -> None:
    made = plan(ACCELERATOR)
    assert made.num_blocks == (9 * GIB - GIB - GIB - 100 * MIB) // MIB  # 90 % of 10, others use 1, weights 1, activations
    assert "0.9 of 10.00 GiB" in made.limit
    assert plan(ACCELERATOR, utilization=0.5).num_blocks == (5 * GIB - GIB - GIB - 100 * MIB) // MIB


def test_activations_hold_a_history_of_every_sequence_for_penalties() -> None:
    """[sequences + 1, context + 1] of int32, beside what grows with neither."""
    short, long = (activation_bytes(replace(SUMMARY, max_model_len=length), 64, 7, 2) for length in (99, 1099))
    assert long - short == 8 * 1000 * 4


def test_a_host_gets_what_the_sequences_need_and_at_most_two_fifths_of_what_is_left() -> None:
    small = plan(HOST, max_num_seqs=4, max_model_len=160)
    assert small.num_blocks == 4 * 10 + 1 and "4 sequences of 160" in small.limit
    large = plan(HOST)
    assert large.num_blocks == int((9 * GIB - GIB - 100 * MIB) * 0.4) // MIB and "40%" in large.limit


def test_an_absolute_size_wins_over_a_share() -> None:
    made = plan(HOST, kv_cache_bytes=300 * MIB, utilization=0.01)
    assert made.num_blocks == 300 and "--kv-cache-memory 300.0 MiB" in made.limit


def test_an_override_counts_usable_blocks_even_fewer_than_one_request_needs() -> None:
    made = plan(HOST, num_blocks_override=7)
    assert made.num_blocks == 8 and made.max_model_len == 2048 and "--num-blocks-override 7" in made.limit


@pytest.mark.parametrize("settings", [{"kv_cache_bytes": 8 * GIB}, {"num_blocks_override": 9000}])
def test_more_than_there_is_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"takes .* leave 7\.\d\d GiB of 9\.00 GiB; ask for less"):
        plan(HOST, **settings)


def test_too_small_says_needed_available_and_the_largest_length_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(HOST, kv_cache_bytes=11 * MIB)
    for word in ("--max-model-len 2048", "needs 129.0 MiB", "available are 11.0 MiB", "--max-model-len 160 is the largest that fits"):
        assert word in str(caught.value)
    assert plan(HOST, kv_cache_bytes=11 * MIB, max_model_len=160).num_blocks == 11


def test_nothing_fits_says_so() -> None:
    with pytest.raises(ConfigError, match="not even one block of 1.0 MiB"):
        plan(replace(HOST, weights_bytes=20 * GIB))


def test_a_length_left_to_the_memory_follows_it() -> None:
    made = plan(HOST, kv_cache_bytes=11 * MIB, fit_model_len=True)
    assert (made.max_model_len, made.num_blocks) == (160, 11)
    assert plan(HOST, fit_model_len=True).max_model_len == 2048


def test_window_groups_hold_only_their_window_and_chunk() -> None:
    full, window = KVGroup(0, "full", None, (0,)), KVGroup(1, "window", 32, (1,))
    needs = replace(HOST, groups=(full, window))
    # 2048 tokens: 128 blocks in the full group; 31 + 16 tokens, wherever they begin, in 4 of the window group.
    assert plan(needs, kv_cache_bytes=133 * MIB, chunk_tokens=16).num_blocks == 133
    with pytest.raises(ConfigError, match="needs 133.0 MiB"):
        plan(needs, kv_cache_bytes=132 * MIB, chunk_tokens=16)


WINDOWED = (KVGroup(0, "full", None, (0,)), KVGroup(1, "window", 500, (1,)), KVGroup(2, "window", 7, (2,)))


def test_chunks_under_way_count_once_for_all_sequences() -> None:
    """64 windows of 500 tokens beside steps of 2048: a chunk for each sequence would be 128 blocks for each."""
    needs = replace(HOST, groups=WINDOWED[1:2], available_bytes=900 * GIB)
    each = plan(needs, max_num_seqs=64, max_model_len=8192, chunk_tokens=2048).num_blocks
    once = plan(needs, max_num_seqs=64, max_model_len=8192, chunk_tokens=2048, step_tokens=2048).num_blocks
    assert (each, once) == (64 * 161 + 1, 64 * 34 + 128 + 1)
    assert plan(needs, max_num_seqs=1, max_model_len=8192, chunk_tokens=2048, step_tokens=2048).num_blocks == 161 + 1


@given(
    length=st.integers(1, 3000), size=st.sampled_from([1, 4, 16]), chunks=st.lists(st.integers(1, 400), min_size=1, max_size=40), slack=st.integers(0, 50)
)
def test_what_sequences_need_is_what_the_manager_keeps(length: int, size: int, chunks: list[int], slack: int) -> None:
    """However the tokens under way are spread over the sequences; and one sequence alone to the block."""
    manager = KVCacheManager(WINDOWED, 9, size, enable_prefix_caching=False)
    needs = replace(HOST, groups=WINDOWED, block_size=size, bytes_per_block=1, weights_bytes=0, activation_bytes=0)
    settings = {"max_model_len": length, "chunk_tokens": max(chunks), "step_tokens": sum(chunks) + slack}
    assert plan(needs, max_num_seqs=1, **{**settings, "step_tokens": None}).num_blocks - 1 == manager.blocks_at_once(length, max(chunks))
    wanted = plan(needs, max_num_seqs=len(chunks), **settings).num_blocks - 1
    assert wanted >= sum(manager.blocks_at_once(length, chunk) for chunk in chunks)


def test_one_plan_for_whoever_asks() -> None:
    """The configuration's fields, one rank's part of a host's memory, and the activations."""
    config = EngineConfig(
        ModelConfig("m"), cache=CacheConfig(swap_space_bytes=3 * MIB), scheduler=SchedulerConfig(max_num_seqs=4), parallel=ParallelConfig(tensor_parallel_size=2)
    )
    made = plan_worker(replace(HOST, activation_bytes=0), config, SUMMARY, item_bytes=4, default_swap_bytes=0)
    sizes = {what: size for what, size, _ in made.rows}
    assert sizes["available"] == HOST.available_bytes // 2
    assert sizes["activations"] == activation_bytes(SUMMARY, 2048, 4, 4)
    assert made.num_host_blocks == 3 and f"4 sequences of {SUMMARY.max_model_len}" in made.limit
    assert plan_worker(HOST, replace(config, cache=CacheConfig()), SUMMARY, item_bytes=4, default_swap_bytes=5 * MIB).num_host_blocks == 5


def test_swap_space_becomes_host_blocks_and_every_part_is_a_row() -> None:
    made = plan(HOST, swap_bytes=10 * MIB + 5)
    assert made.num_host_blocks == 10
    sizes = {what: size for what, size, _ in made.rows}
    assert sizes["weights"] == GIB and sizes["KV cache"] == made.num_blocks * MIB and sizes["host KV tier"] == 10 * MIB
    assert "weights" in made.table() and made.limit in made.table()


@given(
    weights=st.integers(0, 12 * GIB),
    block=st.integers(1, 64 * MIB),
    size=st.sampled_from([1, 8, 16, 32]),
    length=st.integers(1, 1 << 17),
    host=st.booleans(),
    kv=st.none() | st.integers(1, 12 * GIB),
    utilization=st.none() | st.floats(0.01, 1),
)
def test_a_plan_never_exceeds_the_memory_and_a_named_length_really_fits(
    weights: int, block: int, size: int, length: int, host: bool, kv: int | None, utilization: float | None
) -> None:
    needs = replace(HOST, weights_bytes=weights, bytes_per_block=block, block_size=size, host_is_device=host)
    settings = {"kv_cache_bytes": kv, "utilization": utilization}
    try:
        made = plan(needs, max_model_len=length, **settings)
    except ConfigError as error:
        named = str(error).rpartition("--max-model-len ")[2].split()[0]
        if "largest that fits" in str(error):
            assert plan(needs, max_model_len=int(named), **settings).max_model_len == int(named)
            with pytest.raises(ConfigError):
                plan(needs, max_model_len=int(named) + 1, **settings)
        return
    assert needs.weights_bytes + needs.activation_bytes + made.num_blocks * block <= needs.available_bytes
    assert (made.num_blocks - 1) * size >= length


def host(root: Path, files: dict[str, str]) -> Path:
    base = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n"}
    for name, text in {**base, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_host_without_limits_is_its_memory(tmp_path: Path) -> None:
    root = host(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1\n"})
    assert (total_host_bytes(root), available_host_bytes(root)) == (16 * GIB, 12 * GIB)
    assert total_host_bytes(host(tmp_path / "none", {})) == 16 * GIB


def test_a_cgroup_limit_counts_less_what_is_used_and_cannot_be_reclaimed(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b/"
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        group + "memory.max": f"{4 * GIB}\n",
        group + "memory.current": f"{3 * GIB}\n",
        group + "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
    }
    root = host(tmp_path, files)
    assert (total_host_bytes(root), available_host_bytes(root)) == (4 * GIB, 3 * GIB)


def test_the_smallest_limit_above_this_process_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": "0\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "0\n",
    }
    assert available_host_bytes(host(tmp_path, files)) == 2 * GIB


def test_the_older_cgroup_files_count_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/x/"
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
        group + "memory.limit_in_bytes": f"{GIB}\n",
        group + "memory.usage_in_bytes": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
    }
    assert available_host_bytes(host(tmp_path, files)) == GIB // 2
