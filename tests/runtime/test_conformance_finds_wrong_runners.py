"""Level 4 must fail a runner whose parts are wrong, in the case that is about that part."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conformance_subjects import make_subject, manager_of
from oarlock.backend_api import AttentionSpec, GraphRunnerSpec, OpImpl
from oarlock.backend_api.runtime import GraphRunner
from oarlock.conformance import runner_level
from oarlock.conformance.cases import Result, run_case
from oarlock.runtime import worker
from oarlock.runtime.model_runner import ModelRunner
from oarlock.runtime.reference import ReferenceAttention, layers, sampling, state

CASES = {case.id: case for case in runner_level.cases()}


def results_of(monkeypatch: pytest.MonkeyPatch, *names: str, **answers: list) -> dict[str, Result]:
    """Run "model,check" cases in float32 on a host device whose package gives `answers`."""
    monkeypatch.setattr(worker, "worker_plugins", lambda name: manager_of(**answers))
    subject = make_subject(**answers)
    try:
        return {name: run_case(CASES[f"runner[float32,{name}]"], subject, None) for name in names}
    finally:
        subject.close()


def test_core_on_a_plain_host_device_passes(monkeypatch):
    names = [id_.removeprefix("runner[float32,").removesuffix("]") for id_ in CASES if id_.startswith("runner[float32,")]
    assert len(names) == 46
    results = results_of(monkeypatch, *names)
    unsupported = {"dense,as_eager": "the device runs programs as they are", "dense,two_ranks": "the device declares no collectives"}
    assert {name: r.detail for name, r in results.items() if r.status == "unsupported"} == unsupported
    bad = [(r.id, r.detail, r.trace) for r in results.values() if r.status not in ("pass", "unsupported")]
    assert not bad, bad


def rotary_late(x, positions, table, interleaved=False):
    return layers.rotary(x, positions + (positions > 10).int(), table, interleaved)


def sample_unseeded(logits, temperature, top_p, top_k, min_p, seed, choice, position):
    return sampling.sample(logits, temperature, top_p, top_k, min_p, seed * 0, choice, position)


def sample_by_row(logits, temperature, top_p, top_k, min_p, seed, choice, position):
    return sampling.sample(logits, temperature, top_p, top_k, min_p, seed + torch.arange(len(seed), dtype=torch.int32), choice, position)


def update_forgets(tensor, index, value):
    return state.index_update_in_place(tensor, index, torch.where(torch.arange(len(value)) == 1, tensor[index], value) if value.dim() == 1 else value)


def kernel(op: str, function) -> dict[str, list]:
    return {"kernels": [OpImpl(op=op, name="wrong", factory=f"{__name__}:{function.__name__}", priority=1)]}


def attention(cls: type) -> dict[str, list]:
    return {"attention": [AttentionSpec(name="wrong", factory=f"{__name__}:{cls.__name__}", priority=1)]}


class WindowIsOneWider(ReferenceAttention):
    def __init__(self, block_size, dtype, params):
        super().__init__(block_size, dtype, params if params.window is None else dataclasses.replace(params, window=params.window + 1))


class CopiesNothing(ReferenceAttention):
    def copy_blocks(self, cache, source, destination):
        return tuple(cache)


class DecodeSeesOneLess(ReferenceAttention):
    def metadata(self, block_tables, seq_lens, query_start_loc, max_q, num_tokens):
        return super().metadata(block_tables, (seq_lens - (seq_lens > 4).int()) if max_q == 1 else seq_lens, query_start_loc, max_q, num_tokens)


@pytest.mark.parametrize(
    ("answers", "passes", "fails"),
    [
        (kernel("rotary", rotary_late), (), ("dense,whole", "dense,greedy")),
        (kernel("sample", sample_unseeded), ("dense,greedy",), ("dense,seeded",)),
        (kernel("sample", sample_by_row), ("dense,greedy",), ("dense,seeded",)),
        (kernel("index_update", update_forgets), ("dense,whole", "dense,greedy"), ("dense,overlapped",)),
        (attention(WindowIsOneWider), ("dense,whole",), ("hybrid,whole", "hybrid,decodes")),
        (attention(CopiesNothing), ("dense,greedy", "dense,swapped"), ("dense,copied",)),
        (attention(DecodeSeesOneLess), ("dense,whole",), ("dense,decodes", "dense,mixtures", "dense,greedy")),
    ],
    ids=("rotary", "unseeded", "by row", "last token", "window", "copies", "decode"),
)
def test_a_wrong_part_fails_its_own_cases(monkeypatch, answers, passes, fails):
    results = results_of(monkeypatch, *passes, *fails, **answers)
    assert {name: r.status for name, r in results.items()} == {**dict.fromkeys(passes, "pass"), **dict.fromkeys(fails, "fail")}


class Recording(GraphRunner):
    """Replays a program on the inputs of now."""

    def compile(self, fn, example, tag):
        return lambda *args: fn(*args)


class Stale(GraphRunner):
    """Captured inputs that are not refreshed: every replay of a program sees the first one's packed buffer."""

    def compile(self, fn, example, tag):
        seen = []

        def replay(weights, written, read, packed, inputs):
            seen.append(packed)
            return fn(weights, written, read, seen[0] if tag.startswith("forward") else packed, inputs)

        return replay


@pytest.mark.parametrize(("runner", "status"), [(Recording, "pass"), (Stale, "fail")])
def test_captured_programs_are_compared_with_the_same_run_as_they_are(monkeypatch, runner, status):
    answers = {"graph_runner": [GraphRunnerSpec(name="mine", factory=f"{__name__}:{runner.__name__}", priority=1)]}
    monkeypatch.setattr(worker, "worker_plugins", lambda name: manager_of(**answers))
    subject = make_subject(**answers)
    subject.graph = runner(subject.device)
    try:
        result = run_case(CASES["runner[float32,dense,as_eager]"], subject, None)
    finally:
        subject.close()
    assert result.status == status, result.detail


def test_a_swap_that_loses_blocks_fails(monkeypatch):
    whole = ModelRunner._move_blocks

    def without_swap_in(self, out):
        whole(self, dataclasses.replace(out, swap_in=()))

    monkeypatch.setattr(ModelRunner, "_move_blocks", without_swap_in)
    results = results_of(monkeypatch, "dense,swapped", "dense,copied")
    assert (results["dense,swapped"].status, results["dense,copied"].status) == ("fail", "pass")


def test_programs_compiled_while_serving_fail(monkeypatch):
    monkeypatch.setattr(ModelRunner, "warmup", lambda self: setattr(self, "compiles_after_warmup", 3))
    results = results_of(monkeypatch, "dense,programs")
    assert results["dense,programs"].detail == "3 programs were compiled after warm-up"


def test_a_failed_case_leaves_no_rows_behind(monkeypatch):
    results = results_of(monkeypatch, "dense,seeded", "dense,preempted", "dense,mixtures", **kernel("sample", sample_unseeded))
    assert [r.status for r in results.values()] == ["fail", "pass", "pass"]
