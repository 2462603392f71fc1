"""What a fault costs: the request that it can be laid to, the requests of one step, or the engine, said at once to everybody.

Faults are put in by patching the worker once; what follows runs on the product as it is.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import Tiny
from equivalence import DEVICES, GREEDY, Engine, check_all, prompts_of
from oarlock import LLM
from oarlock.errors import EngineDead, OarlockError
from oarlock.executor import multiproc
from oarlock.messages import EngineOutput
from oarlock.runtime.model_runner import ModelRunner
from oarlock.runtime.worker import Worker
from oarlock.sampling_params import SamplingParams

LENGTHS = (40, 17, 5, 64)


@pytest.fixture
def tiny(checkpoint) -> Tiny:
    return checkpoint("llama")


@pytest.fixture
def make(tiny) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(device: str = "cpu", **options: Any) -> Engine:
        made.append(Engine(tiny.path, device, **{"max_model_len": 256, **options}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def finish(engine: Engine) -> tuple[dict[str, list[int]], dict[str, EngineOutput]]:
    """Run until idle: tokens and the terminal output by request, of which each has one."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, EngineOutput] = {}
    while engine.client.has_unfinished():
        for output in engine.client.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in ends
                ends[output.request_id] = output
    return tokens, ends


def raise_once(monkeypatch: pytest.MonkeyPatch, at_step: int, error: Exception, where: str = "execute") -> None:
    """The worker's method raises at its `at_step`-th call, after it has done its work, and never again."""
    calls, method = [], getattr(Worker, where)

    def faulty(self: Worker, *args: Any) -> Any:
        calls.append(1)
        result = method(self, *args)
        if len(calls) == at_step:
            raise error
        return result

    monkeypatch.setattr(Worker, where, faulty)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["execute", "read"])
@pytest.mark.parametrize("device", DEVICES)
def test_step_that_raises_fails_only_its_own_requests(make, tiny, monkeypatch, device, where, depth):
    """Two seats: two requests run in the step, two wait. Those that waited are answered as if nothing had been."""
    engine = make(device, max_num_seqs=2, max_in_flight=depth)
    raise_once(monkeypatch, 6, RuntimeError("a kernel failed"), where)
    prompts = prompts_of(tiny, LENGTHS)
    names = [engine.submit(prompt, GREEDY) for prompt in prompts]
    tokens, ends = finish(engine)
    for name in names[:2]:
        error = ends[name].error
        assert ends[name].finish_reason == "error" and error is not None and error.kind == "step"
        assert "RuntimeError: a kernel failed" in error.message
        assert 0 < len(tokens[name]) < 64
    assert [ends[name].finish_reason for name in names[2:]] == ["length", "length"]
    check_all(tiny, prompts[2:], [tokens[name] for name in names[2:]], f"after a failed step on {device}")
    engine.check_idle()
    check_all(tiny, prompts[:2], engine.greedy(prompts[:2], fresh=False), f"again after a failed step on {device}")


def test_prefix_cache_holds_nothing_of_a_failed_step(make, tiny, monkeypatch):
    """The step fails before it computes anything: what its blocks were to hold must not be found by the next request."""
    engine = make(block_size=8, max_num_batched_tokens=32)
    execute, calls = Worker.execute, []

    def never_computed(self: Worker, out: Any) -> Any:
        calls.append(out)
        if len(calls) == 2:
            raise RuntimeError("nothing ran")
        return execute(self, out)

    monkeypatch.setattr(Worker, "execute", never_computed)
    (prompt,) = prompts_of(tiny, (129,))
    engine.submit(prompt, GREEDY)
    _, ends = finish(engine)
    assert [output.error.kind for output in ends.values()] == ["step"]
    assert engine.stats.num_cached_blocks == 4  # of the first chunk, which was computed
    check_all(tiny, [prompt], engine.greedy([prompt], fresh=False), "after a step that never ran")
    assert engine.events["prefix_hits"] == 32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_row_that_is_not_finite_fails_only_its_own_request(make, tiny, monkeypatch, device, value):
    engine = make(device)
    sample, bad_prompt = ModelRunner._sample, prompts_of(tiny, LENGTHS)[1]

    def poisoned(self: ModelRunner, pending: Any, key: Any, hidden: torch.Tensor) -> None:
        """Spoil the hidden state of one request after its tenth token."""
        places = self.batch.places(pending.out.rows, key)
        for row, place in zip(pending.out.rows, places, strict=True):
            owner = self.batch.rows[row.branch_id]
            if row.start == owner.num_prompt + 9 and list(owner.new.token_ids[: owner.num_prompt]) == bad_prompt:
                rows = torch.arange(hidden.shape[0], dtype=torch.int32)[:, None] == int(place)
                hidden = torch.where(self.device.to_device(rows), value, hidden)
        sample(self, pending, key, hidden)

    monkeypatch.setattr(ModelRunner, "_sample", poisoned)
    prompts = prompts_of(tiny, LENGTHS)
    names = [engine.submit(prompt, GREEDY) for prompt in prompts]
    tokens, ends = finish(engine)
    error = ends[names[1]].error
    assert error is not None and error.kind == "request" and "NaN" in error.message
    assert len(tokens[names[1]]) == 10
    others = [n for n in range(4) if n != 1]
    check_all(tiny, [prompts[n] for n in others], [tokens[names[n]] for n in others], f"beside a row of {value} on {device}")
    engine.check_idle()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_prefix_cache_forgets_what_made_a_request_fail(checkpoint, monkeypatch, family):
    """NaN in the KV of a first chunk shows only when the last one is sampled; by then whole blocks of it can be found."""
    tiny = checkpoint(family)
    engine = Engine(tiny.path, "cpu", block_size=8, max_num_batched_tokens=32, max_model_len=256)
    execute, calls = ModelRunner.execute, []

    def poison_first_chunk(self: ModelRunner, out: Any) -> Any:
        pending = execute(self, out)
        calls.append(out)
        if len(calls) == 1:
            for cache in self.state["kv"]:
                for tensor in cache:
                    tensor[1:].fill_(float("nan"))
        return pending

    monkeypatch.setattr(ModelRunner, "execute", poison_first_chunk)
    try:
        (prompt,) = prompts_of(tiny, (40,))
        failed = engine.submit(prompt, GREEDY)
        _, ends = finish(engine)
        assert ends[failed].error is not None and ends[failed].error.kind == "request"
        check_all(tiny, [prompt], engine.greedy([prompt], fresh=False), "after the same prompt failed")
        assert not engine.events["prefix_hits"]
        engine.check_idle()
    finally:
        engine.close()


def test_nan_in_one_branch_ends_its_request_whole(make, tiny, monkeypatch):
    engine = make()
    sample = ModelRunner._sample

    def poisoned(self: ModelRunner, pending: Any, key: Any, hidden: torch.Tensor) -> None:
        for at, row in enumerate(pending.out.rows):
            if self.batch.rows[row.branch_id].new.index == 1:
                hidden = hidden.clone()
                hidden[at] = float("nan")
        sample(self, pending, key, hidden)

    monkeypatch.setattr(ModelRunner, "_sample", poisoned)
    prompts = prompts_of(tiny, (17, 40))
    engine.submit(prompts[0], SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, detokenize=False))
    other = engine.submit(prompts[1], GREEDY)
    tokens, reasons = {}, []
    while engine.client.has_unfinished():
        for output in engine.client.step().outputs:
            if output.request_id == other:
                tokens.setdefault(other, []).extend(output.new_token_ids)
            elif output.finish_reason is not None:
                reasons.append((output.index, output.finish_reason))
    assert sorted(reasons) == [(0, "error"), (1, "error"), (2, "error")]
    check_all(tiny, prompts[1:], [tokens[other]], "beside a request of which one branch failed")
    engine.check_idle()


def test_request_that_fails_leaves_the_others_of_an_offline_call(tiny, monkeypatch):
    """The same through LLM.generate: its result says so, the others are whole; when all fail, the error is raised."""
    with LLM(str(tiny.path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2) as llm:
        raise_once(monkeypatch, 6, RuntimeError("a kernel failed"))
        prompts = prompts_of(tiny, LENGTHS)
        found = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
        assert [r.outputs[0].finish_reason for r in found] == ["error", "error", "length", "length"]
        assert all(r.error is not None and "a kernel failed" in r.error.message for r in found[:2])
        check_all(tiny, prompts[2:], [list(r.outputs[0].token_ids) for r in found[2:]], "after a failed step, offline")
        raise_once(monkeypatch, 1, RuntimeError("again"))
        with pytest.raises(OarlockError, match="again"):
            llm.generate(prompt_token_ids=prompts[:1], sampling_params=GREEDY, use_tqdm=False)
        (found,) = llm.generate(prompt_token_ids=prompts[:1], sampling_params=GREEDY, use_tqdm=False)
        check_all(tiny, prompts[:1], [list(found.outputs[0].token_ids)], "after an offline call that failed whole")


@pytest.mark.parametrize("device", DEVICES)
def test_canary_that_fails_ends_the_engine_for_all(make, tiny, monkeypatch, device):
    """Weights that were lost make a step fail and the check after it, too: no request may go on with such a device."""
    engine = make(device)
    died: list[str] = []
    engine.client.on_dead = died.append
    for prompt in prompts_of(tiny, LENGTHS):
        engine.submit(prompt, GREEDY)
    for _ in range(5):
        engine.client.step()
    runner = engine.worker.runner
    execute = ModelRunner.execute

    def loses_weights(self: ModelRunner, out: Any) -> Any:
        self.weights["final_norm"]["weight"].fill_(float("nan"))
        execute(self, out)
        raise RuntimeError("the device lost its memory")

    monkeypatch.setattr(ModelRunner, "execute", loses_weights)
    with pytest.raises(EngineDead, match="did not pass the check"):
        engine.client.step()
    assert runner is not None and len(died) == 1 and "the device lost its memory" in died[0] and "not finite" in died[0]
    assert not engine.client.is_alive() and not engine.client.has_unfinished()
    with pytest.raises(EngineDead):
        engine.submit([1, 2, 3], GREEDY)
    with pytest.raises(EngineDead):
        engine.client.step()


def test_memory_is_free_after_the_end_even_while_the_error_is_kept(make, monkeypatch):
    """A traceback refers to the frames of the failed step, and those to the worker."""
    from oarlock_sim.tensor import MEMORY

    before = MEMORY.used_bytes
    engine = make("sim-eager")
    assert MEMORY.used_bytes - before > 1 << 30  # a device's memory is taken for the cache
    error = RuntimeError("kept")
    raise_once(monkeypatch, 1, error)
    engine.submit([5, 6, 7], GREEDY)
    engine.client.step()
    engine.close()
    assert error.__traceback__ is not None
    assert MEMORY.used_bytes - before < 1 << 20


def test_offline_engine_that_died_says_so_in_every_call(tiny, monkeypatch):
    llm = LLM(str(tiny.path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=256)

    def lost(self: Worker, *args: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(Worker, "execute", lost)
    monkeypatch.setattr(Worker, "canary", lost)
    prompts = prompts_of(tiny, LENGTHS)
    for _ in range(2):
        with pytest.raises(EngineDead, match="lost"):
            llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
    llm.close()


# ---------------------------------------------------------------- several ranks
FAULTY_WORKER = """
import sys
from oarlock.executor import worker_process
from oarlock.runtime.worker import Worker
execute, calls = Worker.execute, []
def faulty(self, out):
    calls.append(out)
    failing = len(calls) == 6 and self.rank in {ranks}
    if failing and {early}:
        raise RuntimeError("a kernel failed")
    pending = execute(self, out)
    if failing:
        raise RuntimeError("a kernel failed")
    return pending
Worker.execute = faulty
sys.exit(worker_process.main())
"""


@pytest.fixture
def make_faulty(make, monkeypatch) -> Callable[..., Engine]:
    """Two ranks in processes of their own, some of which raise in their sixth step, before they compute it or after."""
    popen = subprocess.Popen

    def start(ranks: set[int], *, early: bool, **options: Any) -> Engine:
        code = FAULTY_WORKER.format(ranks=ranks, early=early)
        monkeypatch.setattr(multiproc.subprocess, "Popen", lambda command, **more: popen([command[0], "-c", code, *command[3:]], **more))
        monkeypatch.setattr(multiproc, "STRAGGLER_S", 1.0)
        return make(tensor_parallel_size=2, max_num_seqs=2, **options)

    return start


@pytest.mark.parametrize(("ranks", "early", "depth"), [({1}, False, 1), ({0, 1}, True, 2)])
def test_ranks_agree_after_a_step_that_some_of_them_failed(make_faulty, tiny, ranks, early, depth):
    """Whoever waited is answered rightly, and so is the same prompt again: every rank holds the same state."""
    engine = make_faulty(ranks, early=early, max_in_flight=depth)
    prompts = prompts_of(tiny, LENGTHS)
    names = [engine.submit(prompt, GREEDY) for prompt in prompts]
    tokens, ends = finish(engine)
    assert [ends[name].finish_reason for name in names] == ["error", "error", "length", "length"]
    assert all("a kernel failed" in ends[name].error.message for name in names[:2])
    check_all(tiny, prompts[2:], [tokens[name] for name in names[2:]], "after a step that failed on some ranks")
    engine.check_idle()
    check_all(tiny, prompts[:2], engine.greedy(prompts[:2], fresh=False), "again after a step that failed on some ranks")


def test_rank_that_others_wait_for_ends_the_engine(make_faulty, tiny):
    """It left the others in a collective, and the step behind must not take its place there: nobody can bring them back."""
    engine = make_faulty({1}, early=True, max_in_flight=2)
    for prompt in prompts_of(tiny, LENGTHS):
        engine.submit(prompt, GREEDY)
    with pytest.raises(EngineDead, match=r"rank 1 failed and rank 0 did not come back"):
        finish(engine)
    assert not engine.client.is_alive()
