"""A plan that was measured: what steps take is what was planned for them, and graphs are reckoned from two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oarlock_sim
import pytest
from oarlock import LLM, SamplingParams
from oarlock.config.resolve import from_kwargs
from oarlock.errors import OutOfDeviceMemory
from oarlock.messages import WorkerReady
from oarlock.model_summary import load_summary
from oarlock.runtime import measured
from oarlock.runtime.warmup import sample_everything, step
from oarlock.runtime.worker import Worker
from oarlock.shapes import BucketTable, ShapePolicy, StepKey

SIZES = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "max_model_len": 120, "sim_memory": 0.0625, "swap_space": "0"}


def worker_of(tiny: Any, **options: Any) -> Worker:
    config = from_kwargs(str(tiny.path), device="sim-eager", dtype="float32", skip_tokenizer_init=True, **{**SIZES, **options}).engine
    factory = next(d.factory for d in oarlock_sim.devices() if d.name == "sim-eager")
    made = Worker(config, load_summary(config.model), "sim-eager", factory)
    made.prepare()
    return made


def rows(ready: WorkerReady) -> dict[str, tuple[int, str]]:
    return {what: (size, note) for what, size, note in ready.memory_plan}


@pytest.fixture
def account(monkeypatch):
    """The simulated device's memory, and its size as it was."""
    probe = oarlock_sim.probe(needs_hook=True)
    if probe.status != "available":
        pytest.skip(f"sim-eager: {probe.reason}")
    from oarlock_sim.tensor import MEMORY

    monkeypatch.setattr(MEMORY, "total_bytes", MEMORY.total_bytes)  # an active device sets it
    return MEMORY


def test_the_largest_steps_take_what_was_planned_to_two_percent(checkpoint, account):
    worker = worker_of(checkpoint("llama"))
    try:
        reckoned = rows(worker.load())
        ready = worker.measure()
        plan = rows(ready)
        assert plan["activations"][1].endswith("measured") and plan["activations"][0] != reckoned["activations"][0]
        worker.start(ready.num_blocks, ready.num_host_blocks, ready.max_model_len)
        before = account.peak_bytes = account.used_bytes
        runner = worker.runner
        with worker.device.context():
            for key in measured.largest_steps(6, 96, 120, worker.block_size):
                step(runner, key)
            sample_everything(runner, 6)
        took = account.peak_bytes - before
        assert 0.98 * took <= plan["activations"][0] <= 1.02 * took
        whole = sum(plan[what][0] for what in ("weights", "activations", "programs", "KV cache"))
        assert 0.98 * account.peak_bytes <= whole <= 1.02 * account.peak_bytes
        assert whole <= 0.9 * account.total_bytes  # --device-memory-utilization
    finally:
        worker.close()


def test_a_count_of_blocks_that_was_given_needs_no_measuring(checkpoint, account):
    worker = worker_of(checkpoint("llama"), num_blocks_override=20)
    try:
        ready = worker.load()
        assert worker.measure() is ready and ready.num_blocks == 21
    finally:
        worker.close()


def test_a_largest_step_that_does_not_fit_is_an_error_that_says_so(checkpoint, account):
    worker = worker_of(checkpoint("llama"), kv_cache_memory="1MiB")
    try:
        worker.load()
        account.total_bytes = account.used_bytes + (200 << 10)  # somebody took the rest
        with pytest.raises(OutOfDeviceMemory, match="no room for the largest step: .*--max-num-batched-tokens"):
            worker.measure()
    finally:
        worker.close()


def test_ranks_measure_together_also_where_they_load_one_after_another(checkpoint, account):
    tiny = checkpoint("llama")
    prompt = tiny.prompts(1)[0]
    with LLM(
        str(tiny.path), device="sim-eager", dtype="float32", skip_tokenizer_init=True, tensor_parallel_size=2, max_parallel_loading_workers=1, **SIZES
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        (found,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    tiny.check(prompt, list(found.outputs[0].token_ids), "sim-eager, two ranks")


# ---------------------------------------------------------------- the sums
@pytest.mark.parametrize("sizes", [(4, 64, 100), (4, 64, 24), (1, 1, 8), (300, 256, 50), (2, 512, 30)])
def test_the_largest_steps_fit_the_limits_and_fill_one_of_them(sizes):
    seqs, tokens, longest = sizes
    keys = list(measured.largest_steps(seqs, tokens, longest, 16))
    for key in keys:
        assert 1 <= key.tokens <= tokens and 1 <= key.rows <= seqs and key.max_q <= longest and key.blocks == -(-longest // 16)
    assert max(key.tokens for key in keys) == min(tokens, seqs * longest) and max(key.rows for key in keys) == min(seqs, tokens)


class Scripted:
    """A profiler whose device is asked in the order of `measure`."""

    def __init__(self, taken: list[int], peaks: list[int]) -> None:
        self._taken, self._peaks = iter(taken), iter(peaks)
        self.device = SimpleNamespace(synchronise=lambda: None)
        self.released = 0

    def taken(self) -> int:
        return next(self._taken)

    def peak(self) -> int:
        return next(self._peaks)

    def restart(self) -> None: ...

    def release(self) -> None:
        self.released += 1


def runner_of(table: BucketTable) -> Any:
    limits = SimpleNamespace(max_num_seqs=4, max_model_len=64)
    return SimpleNamespace(limits=limits, model=SimpleNamespace(block_size=16), policy=ShapePolicy(table), state={"kv": 1}, compiled={"f": 1})


def test_graphs_are_reckoned_from_the_two_largest(monkeypatch):
    ran: list[StepKey] = []
    monkeypatch.setattr(measured, "step", lambda runner, key: ran.append(key))
    monkeypatch.setattr(measured, "sample_everything", lambda runner, rows: None)
    runner = runner_of(BucketTable(decode_rows=(1, 2, 4), blocks=(1, 4)))
    # taken: before; after the steps; after the first graph; after the second; when all is dropped again
    profiler = Scripted([1000, 1100, 1500, 1520, 1030], peaks=[70, 370])
    found = measured.measure(profiler, lambda: runner, 32)
    assert found == measured.Measured(activations=300, programs=400 + 20 + 4 * 20, libraries=30)
    assert ran[2:] == [StepKey(4, 4, 4, 1, 4), StepKey(4, 4, 1, 1, 4)] and profiler.released == 5
    assert runner.state == runner.compiled == {}


def test_memory_that_others_give_back_meanwhile_counts_for_nothing(monkeypatch):
    monkeypatch.setattr(measured, "step", lambda runner, key: None)
    monkeypatch.setattr(measured, "sample_everything", lambda runner, rows: None)
    table = BucketTable(decode_rows=(4,), blocks=(4,))
    assert measured.measure(Scripted([1000, 900, 880, 700], [70, 60]), lambda: runner_of(table), 32) == measured.Measured(0, 0, 0)
    assert measured.measure(Scripted([0, 0, 0], [5, 9]), lambda: runner_of(BucketTable()), 32) == measured.Measured(4, 0, 0)
