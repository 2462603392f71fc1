"""The engine's and the worker's end of the multiproc executor, over real sockets, with workers that compute nothing."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from oarlock.errors import WorkerDied, WorkerError
from oarlock.executor import frames, multiproc
from oarlock.executor.codec import decode, encode
from oarlock.executor.multiproc import MultiprocExecutor
from oarlock.executor.worker_process import WorkerLoop
from oarlock.messages import ModelRunnerOutput, NewRequest, SchedulerOutput
from oarlock.sampling_params import SamplingParams

MORE_THAN_A_SOCKET_HOLDS = 200_000  # token ids, of 4 bytes


class Worker:
    """Step n gives token n; `failing` steps raise when they are read."""

    def __init__(self, *failing: int, answer: int = 1) -> None:
        self.failing, self.answer = failing, answer
        self.has_read = threading.Event()
        self.canaries = 0

    def prepare(self) -> None:
        """There is nothing to choose."""

    def load(self) -> None:
        """There is nothing to load."""

    def execute(self, out: SchedulerOutput) -> int:
        return out.step_id

    def read(self, step_id: int) -> ModelRunnerOutput:
        self.has_read.set()
        if step_id in self.failing:
            raise RuntimeError(f"step {step_id} failed")
        return ModelRunnerOutput(step_id, {0: (step_id,) * self.answer})

    def canary(self) -> None:
        self.canaries += 1

    def close(self) -> None:
        """Nothing is held."""


class Rank(Worker):
    """One of two that meet once in each step and in each check. Steps in `before` and `after` fail on this rank, then or later than that."""

    def __init__(self, meeting: threading.Barrier, before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.meeting, self.before, self.after = meeting, before, after
        self.met: list[int | str] = []  # whom it believes to have met, in order

    def execute(self, out: SchedulerOutput) -> int:
        if out.step_id in self.before:
            raise RuntimeError(f"step {out.step_id} failed at once")
        self.meeting.wait()
        self.met.append(out.step_id)
        if out.step_id in self.after:
            raise RuntimeError(f"step {out.step_id} failed late")
        return out.step_id

    def canary(self) -> None:
        self.meeting.wait()
        self.met.append("check")


def serve(end: socket.socket, worker: Worker, rank: int, size: int) -> None:
    with end:  # closed also when the loop fails: then the executor sees that a rank is gone
        WorkerLoop(end, worker, rank, size).run()


@pytest.fixture
def make() -> Iterator[Callable[..., MultiprocExecutor]]:
    """An executor whose ranks are threads of this process."""
    made: list[MultiprocExecutor] = []
    threads: list[threading.Thread] = []

    def start(*workers: Worker) -> MultiprocExecutor:
        config: Any = None
        executor = MultiprocExecutor(config, config, "toy", "toy:Toy")
        for rank, worker in enumerate(workers):
            ours, theirs = socket.socketpair()
            executor._ends.append(ours)
            threads.append(threading.Thread(target=serve, args=(theirs, worker, rank, len(workers))))
            threads[-1].start()
        made.append(executor)
        return executor

    yield start
    for executor in made:
        executor.shutdown()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def step(step_id: int, *new: NewRequest) -> SchedulerOutput:
    return SchedulerOutput(step_id, (), new)


def test_answers_belong_to_the_steps_that_were_launched(make):
    executor = make(Worker(), Worker())
    first, second = executor.execute(step(1)), executor.execute(step(2))
    assert [first.result().token_ids, second.result().token_ids] == [{0: (1,)}, {0: (2,)}]


def test_canary_after_a_failed_step_does_not_take_the_answer_of_the_step_behind_it(make):
    workers = Worker(1), Worker(1)
    executor = make(*workers)
    first, second = executor.execute(step(1)), executor.execute(step(2))
    with pytest.raises(WorkerError, match="step 1 failed"):
        first.result()
    executor.canary()
    assert second.result().token_ids == {0: (2,)}
    assert executor.execute(step(3)).result().step_id == 3
    assert [w.canaries for w in workers] == [1, 1]


@pytest.fixture
def pair(make, monkeypatch) -> Iterator[Callable[..., tuple[MultiprocExecutor, Rank, Rank]]]:
    """Two ranks; `faults` are the second one's, or of both."""
    monkeypatch.setattr(multiproc, "STRAGGLER_S", 0.2)
    monkeypatch.setattr(multiproc, "CANARY_S", 0.3)
    meeting = threading.Barrier(2)

    def start(*, both: bool = False, **faults: tuple[int, ...]) -> tuple[MultiprocExecutor, Rank, Rank]:
        ranks = Rank(meeting, **faults if both else {}), Rank(meeting, **faults)
        return make(*ranks), *ranks

    yield start
    meeting.abort()  # whoever still waits goes on to the end


def test_rank_that_fails_alone_after_all_have_met_costs_one_step(pair):
    executor, *ranks = pair(after=(1,))
    with pytest.raises(WorkerError, match="step 1 failed late"):
        executor.execute(step(1)).result()
    executor.canary()
    assert executor.execute(step(2)).result().step_id == 2
    assert [r.met for r in ranks] == [[1, "check", 2]] * 2


def test_step_that_fails_on_every_rank_costs_that_and_the_one_behind_it(pair):
    executor, *ranks = pair(both=True, before=(1,))
    first, second = executor.execute(step(1)), executor.execute(step(2))
    with pytest.raises(WorkerError, match="step 1 failed at once"):
        first.result()
    executor.canary()
    with pytest.raises(WorkerError, match="step 2 was not run"):
        second.result()
    assert executor.execute(step(3)).result().step_id == 3
    assert [r.met for r in ranks] == [["check", 3]] * 2


def test_rank_that_fails_alone_before_all_have_met_ends_the_executor(pair):
    """The other waits for it. The step behind must not come to that meeting in its stead."""
    executor, first, second = pair(before=(1,))
    behind = executor.execute(step(1)), executor.execute(step(2))
    with pytest.raises(WorkerDied, match=r"rank 1 failed and rank 0 did not come back: step 1 failed at once"):
        behind[0].result()
    assert first.met == second.met == []


def test_rank_that_fails_in_the_step_behind_is_noticed_while_the_step_before_is_read(pair):
    """Rank 0 waits in step 2, and would have said what came of step 1 only after it."""
    executor, first, second = pair(before=(2,))
    behind = executor.execute(step(1)), executor.execute(step(2))
    with pytest.raises(WorkerDied, match=r"rank 1 failed and rank 0 did not come back: step 2 failed at once"):
        for pending in behind:
            pending.result()
    assert first.met == second.met == [1]


def test_check_does_not_meet_a_step_that_other_ranks_still_run(pair):
    """Rank 1 fails after the last meeting of step 1, so rank 0 goes on to step 2 and waits there."""
    executor, first, second = pair(after=(1,))
    behind = executor.execute(step(1)), executor.execute(step(2))
    with pytest.raises(WorkerError, match="step 1 failed late"):
        behind[0].result()
    with pytest.raises(WorkerDied, match="rank 1 failed and rank 0 did not come back"):
        executor.canary()
    assert first.met == second.met == [1]


def test_check_that_no_rank_comes_back_from_ends_the_executor(pair):
    executor, _, second = pair(after=(1,))

    def one_meeting_too_many() -> None:
        second.meeting.wait()
        second.meeting.wait()

    second.canary = one_meeting_too_many  # type: ignore[method-assign]
    with pytest.raises(WorkerError):
        executor.execute(step(1)).result()
    with pytest.raises(WorkerDied, match=r"rank 1 did not come back within"):
        executor.canary()


def test_fault_of_the_step_behind_is_kept_for_whoever_asks_for_it(make):
    executor = make(Worker(1, 2))
    first, second = executor.execute(step(1)), executor.execute(step(2))
    with pytest.raises(WorkerError, match="step 1 failed"):
        first.result()
    executor.canary()
    with pytest.raises(WorkerError, match="step 2 failed"):
        second.result()


def test_long_answer_and_long_step_on_their_way_at_once_do_not_wait_for_each_other(make):
    """Neither end reads while it writes more than the socket holds, so the worker must not stop reading for that."""
    worker = Worker(answer=MORE_THAN_A_SOCKET_HOLDS)
    executor = make(worker)
    executor._ends[0].settimeout(5)
    first = executor.execute(step(1))
    assert worker.has_read.wait(5)
    prompt = NewRequest(0, (7,) * MORE_THAN_A_SOCKET_HOLDS, 1, SamplingParams(), 0, 0, ((1,),))
    second = executor.execute(step(2, prompt))
    assert len(first.result().token_ids[0]) == len(second.result().token_ids[0]) == MORE_THAN_A_SOCKET_HOLDS


def test_rank_that_goes_while_nothing_is_asked_of_it_is_noticed(make):
    executor = make(Worker(), Worker())
    executor.check_idle()
    assert not select.select(executor.idle_ends(), [], [], 0)[0]
    executor._children = [SimpleNamespace(wait=lambda _: 0), SimpleNamespace(wait=lambda _: -9)]
    frames.send(executor._ends[1], frames.CLOSE)
    assert select.select(executor.idle_ends(), [], [], 5)[0] == [executor._ends[1].fileno()]
    with pytest.raises(WorkerDied, match=r"rank 1 is gone \(signal 9: .*want of memory.*--max-num-seqs\)"):
        executor.check_idle()


def test_shutdown_does_not_wait_for_a_worker_that_reads_nothing(monkeypatch):
    monkeypatch.setattr(multiproc, "CLOSE_S", 0.1)
    config: Any = None
    executor = MultiprocExecutor(config, config, "toy", "toy:Toy")
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):  # fill it
        while True:
            ours.send(b"x" * 65536)
    ours.setblocking(True)
    executor._ends.append(ours)
    done = threading.Thread(target=executor.shutdown, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    theirs.close()


def test_frames_carry_a_body_of_any_length():
    ours, theirs = socket.socketpair()
    body = encode(tuple(range(100_000)))
    writer = threading.Thread(target=frames.send, args=(ours, frames.EXECUTE, body))
    writer.start()
    kind, got = frames.receive(theirs)
    writer.join()
    assert kind == frames.EXECUTE and decode(got) == tuple(range(100_000))
    ours.close()
    with pytest.raises(EOFError):
        frames.receive(theirs)
    theirs.close()
