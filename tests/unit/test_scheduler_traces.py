"""Whole runs as text: one line a step. `a0+6*` is branch 0 of request a, 6 tokens from where it stands, `*`: it samples."""

from __future__ import annotations

from kv_checking_worker import FULL, Drive, KVCheckingWorker, request
from oarlock.config.sections import SchedulerConfig
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import EngineRequest
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BucketTable, ShapePolicy


def trace(
    requests: list[EngineRequest],
    num_blocks: int = 50,
    caching: bool = False,
    host: int = 0,
    later: dict[int, EngineRequest] | None = None,
    **config,
) -> str:
    """Run to the end with block_size 4; `later`: request by the number of the step before which it arrives."""
    manager = KVCacheManager(FULL, num_blocks, 4, caching, host)
    scheduler = Scheduler(SchedulerConfig(**config), manager, ShapePolicy(BucketTable()), 100, clock=lambda: 0.0)
    drive = Drive(scheduler, KVCheckingWorker(FULL, num_blocks, 4, host), config.get("max_in_flight", 1))
    for r in requests:
        drive.add(r)
    names, lines = {}, []
    while scheduler.has_unfinished():
        if later and len(drive.steps) in later:
            drive.add(later.pop(len(drive.steps)))
        names |= {i: f"{b.request.request_id}{b.index}" for i, b in scheduler._life.branches.items()}
        if not drive.step():
            continue
        names |= {i: f"{b.request.request_id}{b.index}" for i, b in scheduler._life.branches.items()}
        step = drive.steps[-1]
        parts = [f"{names[r.branch_id]}+{r.num_tokens}{'*' * r.emits}" for r in step.rows]
        moves = {"out": step.swap_out, "copy": step.block_copy, "in": step.swap_in}
        parts += [f"{name}:{len(found)}" for name, found in moves.items() if found]
        lines.append(f"{step.step_id}: {' '.join(parts)}")
    drive.run()
    return "\n".join(lines)


def check(found: str, expected: str) -> None:
    wanted = "\n".join(line.strip() for line in expected.strip().splitlines())
    assert found == wanted, f"\n{found}"


def test_chunks_run_beside_decode_rows_and_within_the_budget() -> None:
    found = trace([request("a", range(3), max_tokens=4), request("b", range(10), max_tokens=2)], max_num_batched_tokens=5, max_num_seqs=4)
    check(
        found,
        """
        0: a0+3* b0+2
        1: a0+1* b0+4
        2: a0+1* b0+4*
        3: a0+1* b0+1*
        """,
    )


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    found = trace(
        [request("a", range(3), max_tokens=3), request("b", range(6), max_tokens=2)],
        max_num_batched_tokens=8,
        max_num_seqs=4,
        enable_chunked_prefill=False,
    )
    check(
        found,
        """
        0: a0+3*
        1: a0+1* b0+6*
        2: a0+1* b0+1*
        """,
    )


def test_second_step_is_planned_before_the_first_returns() -> None:
    found = trace([request("a", range(3), max_tokens=3)], max_in_flight=2)
    check(
        found,
        """
        0: a0+3*
        1: a0+1*
        2: a0+1*
        """,
    )


def test_branches_share_the_prompt_and_each_computes_its_last_token() -> None:
    found = trace([request("a", range(6), n=3, max_tokens=2)])
    check(
        found,
        """
        0: a0+5
        1: a0+1* a1+1* a2+1* copy:2
        2: a0+1* a1+1* a2+1*
        """,
    )


def test_latest_branch_is_recomputed_when_blocks_run_out() -> None:
    found = trace([request("a", range(4), max_tokens=9), request("b", range(4), max_tokens=5)], num_blocks=4)
    check(
        found,
        """
        0: a0+4* b0+4*
        1: a0+1*
        2: a0+1*
        3: a0+1*
        4: a0+1*
        5: a0+1*
        6: a0+1*
        7: a0+1*
        8: a0+1*
        9: b0+5*
        10: b0+1*
        11: b0+1*
        12: b0+1*
        """,
    )


def test_swapped_branch_comes_back_without_recomputing() -> None:
    found = trace(
        [request("a", range(4), max_tokens=6), request("b", range(4), max_tokens=4)], num_blocks=4, host=4, preemption_mode="swap"
    )
    check(
        found,
        """
        0: a0+4* b0+4*
        1: a0+1* out:1
        2: a0+1*
        3: a0+1*
        4: a0+1*
        5: a0+1*
        6: b0+1* in:1
        7: b0+1*
        8: b0+1*
        """,
    )


def test_second_request_starts_behind_the_cached_prefix() -> None:
    found = trace([request("a", range(10), max_tokens=2)], caching=True, later={2: request("b", [*range(9), 77], max_tokens=1)})
    check(
        found,
        """
        0: a0+10*
        1: a0+1*
        """,
    )
    found = trace([request("a", range(10), max_tokens=3)], caching=True, later={1: request("b", [*range(9), 77], max_tokens=1)})
    check(
        found,
        """
        0: a0+10*
        1: a0+1* b0+2*
        2: a0+1*
        """,
    )


def test_urgent_request_overtakes_those_that_wait() -> None:
    found = trace(
        [request("a", range(3), priority=1, max_tokens=2), request("b", range(3), priority=5, max_tokens=1)],
        later={1: request("c", range(3), priority=0, max_tokens=1)},
        policy="priority",
        max_num_seqs=1,
    )
    check(
        found,
        """
        0: a0+3*
        1: a0+1*
        2: c0+3*
        3: b0+3*
        """,
    )


def test_more_branches_than_seats_run_in_waves() -> None:
    found = trace([request("a", range(6), n=3, max_tokens=2)], max_num_seqs=2, caching=True)
    check(
        found,
        """
        0: a0+5
        1: a0+1* a1+1* copy:1
        2: a0+1* a1+1*
        3: a2+2*
        4: a2+1*
        """,
    )


def test_beams_grow_from_one_row() -> None:
    found = trace([request("a", range(6), n=2, max_tokens=3, use_beam_search=True)])
    check(
        found,
        """
        0: a0+6*
        1: a0+1* a0+1* copy:1
        2: a0+1* a0+1*
        """,
    )
