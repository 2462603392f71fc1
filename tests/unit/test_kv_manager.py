"""Blocks, tables, the prefix index and the host tier, from small integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_checking_worker import FULL, HYBRID
from oarlock.errors import ConfigError
from oarlock.kv.block_hash import extend_hashes, root_hash
from oarlock.kv.block_pool import BlockPool
from oarlock.kv.manager import KVCacheManager, PrefixHit
from oarlock.kv_spec import KVGroup


def grow(manager: KVCacheManager, branch: int, tokens: list[int], salt: str | None = None) -> list[bytes]:
    """Compute all tokens of a new branch and register its blocks."""
    hashes: list[bytes] = []
    manager.hash_blocks(hashes, tokens, len(tokens), salt, None)
    manager.start(branch, manager.lookup(hashes, len(tokens) - 1))
    assert manager.prepare(branch, 0, len(tokens), 0)
    manager.register(branch, hashes, len(tokens))
    return hashes


def test_null_block_is_never_handed_out_and_the_rest_is() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(4)) == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        pool.allocate()


def test_reusable_blocks_are_evicted_longest_released_first_and_after_blank_ones() -> None:
    pool = BlockPool(5)
    a, b, c = (pool.allocate() for _ in range(3))
    for block, name in ((a, b"a"), (b, b"b")):
        pool.register(block, (0, name))
    for block in (b, a, c):
        pool.release(block)
    assert pool.find((0, b"a")) == a and pool.num_reusable == 2
    blanks = {pool.allocate(), pool.allocate()}
    assert blanks.isdisjoint({a, b})
    assert pool.allocate() == b and pool.find((0, b"b")) is None
    assert pool.find((0, b"a")) == a


def test_equal_blocks_after_different_beginnings_have_different_hashes() -> None:
    chains = []
    for tokens in ([1, 2, 3, 4], [9, 9, 3, 4]):
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash(None, None), tokens, 2, 2)
        chains.append(hashes)
    assert chains[0][1] != chains[1][1]
    assert root_hash("a", None) != root_hash(None, "a") != root_hash(None, None)


def test_prefix_hit_stops_before_the_last_token_and_at_the_first_unknown_block() -> None:
    manager = KVCacheManager(FULL, 20, 4, True)
    hashes = grow(manager, 0, list(range(12)))
    assert manager.lookup(hashes, 11).num_tokens == 8
    assert manager.lookup(hashes, 12).num_tokens == 12
    other: list[bytes] = []
    manager.hash_blocks(other, [*range(8), 99, 98, 97, 96], 12, None, None)
    assert manager.lookup(other, 12).num_tokens == 8


def test_salt_keeps_requests_apart() -> None:
    manager = KVCacheManager(FULL, 20, 4, True)
    grow(manager, 0, list(range(8)))
    salted: list[bytes] = []
    manager.hash_blocks(salted, list(range(8)), 8, "tenant", None)
    assert manager.lookup(salted, 8).num_tokens == 0


def test_window_group_needs_only_the_blocks_that_the_window_sees() -> None:
    groups = (KVGroup(0, "full", None, (0,)), KVGroup(1, "window", 5, (1,)))
    manager = KVCacheManager(groups, 30, 4, True)
    hashes = grow(manager, 0, list(range(16)))
    assert manager.trim(0, 16)  # token 16 sees 12 .. 16: blocks 0 to 2 of the window group go
    assert manager.block_ids(0)[1][:3] == (0, 0, 0)
    manager.free(0)
    hit = manager.lookup(hashes, 16)
    assert hit.num_tokens == 16 and hit.blocks[1][:3] == (0, 0, 0) and 0 not in hit.blocks[0]
    # At 12 tokens the window sees 8 .. 12, whose block is still cached. Evict it: the longest hit is 16 all the same.
    manager.check_invariants()


def test_hit_falls_back_to_the_longest_length_whose_window_is_cached() -> None:
    groups = (KVGroup(0, "window", 4, (0,)),)
    manager = KVCacheManager(groups, 6, 4, True)  # five blocks
    tokens = list(range(16))
    hashes = grow(manager, 0, tokens)
    manager.free(0)  # last block first: block 3 of the sequence is the oldest
    manager.start(1, PrefixHit())
    assert manager.prepare(1, 0, 8, 0)  # takes the blank block and evicts block 3
    assert manager.lookup(hashes, 16).num_tokens == 12


def test_refused_allocation_changes_nothing() -> None:
    manager = KVCacheManager(FULL, 4, 4, True)
    manager.start(0, PrefixHit())
    assert manager.prepare(0, 0, 8, 0)
    manager.start(1, PrefixHit())
    assert not manager.prepare(1, 0, 8, 0)
    assert manager.num_free == 1 and manager.block_ids(1) == ((),)
    manager.check_invariants()


def test_fork_shares_and_the_first_writer_copies() -> None:
    manager = KVCacheManager(FULL, 10, 4, True)
    manager.start(0, PrefixHit())
    assert manager.prepare(0, 0, 6, 0)
    first, second = manager.block_ids(0)[0]
    manager.fork(0, 1, 6)
    assert manager.num_used == 2
    assert manager.prepare(1, 6, 7, 6)
    assert manager.block_ids(1)[0][0] == first
    copy = manager.block_ids(1)[0][1]
    assert manager.take_moves() == ((), ((second, copy),), ())
    assert manager.prepare(0, 6, 7, 6)  # alone on it now: no copy
    assert manager.take_moves() == ((), (), ())
    assert manager.take_changes(0) == ((), ())


def test_worker_is_told_only_what_changed() -> None:
    groups = (KVGroup(0, "full", None, (0,)), KVGroup(1, "window", 4, (1,)))
    manager = KVCacheManager(groups, 20, 4, False)
    manager.start(0, PrefixHit())
    manager.prepare(0, 0, 7, 0)
    ids = manager.block_ids(0)
    assert [len(t) for t in ids] == [2, 2]
    manager.prepare(0, 7, 9, 7)  # token 7 sees 4 .. 7: block 0 of the window group has passed
    new, replaced = manager.take_changes(0)
    assert [len(t) for t in new] == [1, 1] and replaced == ((1, 0, 0),)
    assert manager.take_changes(0) == ((), ())


def test_beams_on_the_host_stay_shared_and_come_back_shared() -> None:
    manager = KVCacheManager(FULL, 10, 4, False, num_host_blocks=3)
    manager.start(0, PrefixHit())
    manager.prepare(0, 0, 6, 0)
    manager.fork(0, 1, 6)
    manager.prepare(1, 6, 7, 6)
    manager.take_moves()
    assert manager.swap_out([0, 1])
    assert manager.num_used == 0 and manager.num_used_host == 3
    assert len(manager.take_moves()[0]) == 3
    assert manager.swap_in([0, 1], reserve=0)
    assert manager.num_used == 3 and manager.block_ids(0)[0][0] == manager.block_ids(1)[0][0]
    assert manager.num_used_host == 3, "host blocks are read by this step's swap_in and may not be written by its swap_out"
    assert len(manager.take_moves()[2]) == 3
    assert manager.num_used_host == 0
    manager.check_invariants()


def test_swap_out_needs_room_for_all_and_an_aborted_one_leaves_no_copy_behind() -> None:
    manager = KVCacheManager(FULL, 10, 4, False, num_host_blocks=2)
    for branch in (0, 1):
        manager.start(branch, PrefixHit())
        manager.prepare(branch, 0, 8, 0)
    assert not manager.swap_out([0, 1])
    assert manager.swap_out([0])
    manager.free(0)
    assert manager.take_moves() == ((), (), ()) and manager.num_used_host == 0


def test_reset_forgets_only_what_nobody_holds() -> None:
    manager = KVCacheManager(FULL, 20, 4, True)
    held = grow(manager, 0, list(range(8)))
    gone = grow(manager, 1, list(range(50, 58)))
    manager.free(1)
    manager.reset_prefix_cache()
    assert manager.lookup(held, 8).num_tokens == 8 and manager.lookup(gone, 8).num_tokens == 0


@pytest.mark.parametrize("kind", ["latent", "state"])
def test_kinds_that_are_not_built_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        KVCacheManager((KVGroup(0, kind, None, (0,)),), 8, 4, True)


def test_block_that_still_waits_for_its_content_from_the_host_is_not_sent_back() -> None:
    """swap_out is made before swap_in, so the device block's content is not there yet."""
    manager = KVCacheManager(FULL, 10, 4, False, num_host_blocks=8)
    manager.start(0, PrefixHit())
    manager.prepare(0, 0, 8, 0)
    assert manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_in([0], reserve=0)
    assert not manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_out([0])


def test_branch_freed_before_its_content_came_from_the_host_leaves_no_move_behind() -> None:
    manager = KVCacheManager(FULL, 4, 4, False, num_host_blocks=8)
    for branch in (0, 1):
        manager.start(branch, PrefixHit())
    manager.prepare(0, 0, 4, 0)
    assert manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_in([0], reserve=0)
    manager.free(0)
    assert manager.num_used_host == 0
    manager.prepare(1, 0, 4, 0)
    manager.fork(1, 2, 4)
    assert manager.prepare(2, 3, 4, 3)  # a copy, perhaps into the block that was to be filled
    assert manager.take_moves()[2] == ()
    manager.check_invariants()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_block_operations_keeps_the_counts(data: st.DataObject) -> None:
    manager = KVCacheManager(data.draw(st.sampled_from([FULL, HYBRID])), 40, 4, True, num_host_blocks=15)
    lengths: dict[int, int] = {}
    hashes: dict[int, list[bytes]] = {}
    for branch in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["start", "grow", "fork", "free", "out", "in", "moves", "reset"]))
        on_device = [b for b in lengths if not manager.is_on_host(b)]
        if action == "start":
            hashes[branch], lengths[branch] = [], 0
            manager.hash_blocks(hashes[branch], [7] * 64, 64, None, None)
            hit = manager.lookup(hashes[branch], data.draw(st.integers(0, 20)))
            if manager.attach(branch, hit, hit.num_tokens + 1, 1, 0):
                lengths[branch] = hit.num_tokens
            else:
                del lengths[branch]
        elif action == "grow" and on_device:
            b = data.draw(st.sampled_from(on_device))
            end = min(lengths[b] + data.draw(st.integers(1, 9)), 64)
            if lengths[b] < end and manager.prepare(b, lengths[b], end, lengths[b]):
                lengths[b] = end
                manager.register(b, hashes[b], end)
        elif action == "fork" and on_device:
            b = data.draw(st.sampled_from(on_device))
            manager.fork(b, branch, lengths[b])
            lengths[branch], hashes[branch] = lengths[b], hashes[b]
        elif action == "free" and lengths:
            b = data.draw(st.sampled_from(sorted(lengths)))
            manager.free(b)
            del lengths[b]
        elif action == "out" and on_device:
            manager.swap_out([data.draw(st.sampled_from(on_device))])
        elif action == "in" and len(on_device) < len(lengths):
            manager.swap_in([data.draw(st.sampled_from([b for b in lengths if b not in on_device]))], 0)
        elif action == "moves":
            manager.take_moves()
        elif action == "reset":
            manager.reset_prefix_cache()
        manager.check_invariants()
    for b in lengths:
        manager.free(b)
    manager.take_moves()
    manager.check_invariants()
    assert manager.num_used == 0 and manager.num_used_host == 0
