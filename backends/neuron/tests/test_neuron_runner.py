"""The graph runner: pure programs through the compile seam, and the cache on disk."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from oarlock_neuron.cache import SUFFIX, Cache
from oarlock_neuron.compiler import StrictCompiler
from oarlock_neuron.device import NeuronDevice
from oarlock_neuron.runner import NeuronRunner


class CountingCompiler(StrictCompiler):
    """Another version of the strict compiler."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def version(self) -> str:
        return self._name


def example(rows: int = 2):
    state = {"kv": [(torch.zeros(3, 4), torch.zeros(3, 4))], "last": torch.zeros(5, dtype=torch.int32)}
    return {"w": torch.full((4,), 2.0)}, state, {"read": torch.ones(3)}, torch.arange(rows, dtype=torch.int32), {"x": torch.ones(rows, 4)}


def program(bias: float = 0.0):
    def fn(weights, written, read, packed, inputs):
        (keys, values) = written["kv"][0]
        new = inputs["x"] * weights["w"] + read["read"].sum() + bias
        return {"kv": [(keys.index_put((packed,), new), values)]}, {"hidden": new, "more": [new.sum(), packed + 1]}

    return fn


def make(folder, compiler=None, **options) -> NeuronRunner:
    return NeuronRunner(NeuronDevice(options={"neuron_cache_dir": str(folder), **options}), compiler)


def test_a_program_runs_as_it_would_and_updates_its_state_in_place(simulated, tmp_path):
    run, args = make(tmp_path).compile(program(), example(), "forward-1"), example()
    want_state, want = program()(*example())
    state, outputs = run(*args)
    assert list(state) == ["kv"] and state["kv"][0][0] is args[1]["kv"][0][0]
    assert torch.equal(state["kv"][0][0], want_state["kv"][0][0]) and torch.equal(outputs["hidden"], want["hidden"])
    assert [t.tolist() for t in outputs["more"]] == [t.tolist() for t in want["more"]]


def test_other_shapes_and_other_trees_are_refused(simulated, tmp_path):
    run = make(tmp_path).compile(program(), example(), "forward-1")
    with pytest.raises(RuntimeError, match="program forward-1 was compiled for input"):
        run(*example(rows=3))
    args = example()
    with pytest.raises(RuntimeError, match=r"compiled for other arguments .*\[4\]\['y'\].* is new, .*\[4\]\['x'\].* is missing"):
        run(*args[:4], {"y": args[4]["x"]})
    state = {**args[1], "kv": tuple(args[1]["kv"])}
    with pytest.raises(RuntimeError, match="a list stands where a tuple was"):
        run(args[0], state, *args[2:])


def test_a_program_keeps_none_of_its_example(simulated, tmp_path):
    args = example()
    kept = [weakref.ref(tensor) for tensor in (args[3], args[4]["x"])]
    run = make(tmp_path).compile(program(), args, "forward-1")
    del args
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert run(*example())[1]["hidden"].shape == (2, 4)


def test_state_that_was_not_given_is_refused(simulated, tmp_path):
    with pytest.raises(ValueError, match="state \\['history'\\] that it was not given"):
        make(tmp_path).compile(lambda w, written, read, packed, inputs: ({"history": packed}, {}), example(), "sample-1")


def test_a_later_runner_loads_what_was_compiled_and_nothing_else(simulated, tmp_path):
    def counts(compiler=None, bias: float = 0.0, rows: int = 2, name: str = "forward-1") -> tuple[int, int]:
        runner = make(tmp_path, compiler)
        run = runner.compile(program(bias), example(rows), name)
        assert torch.equal(run(*example(rows))[1]["hidden"], torch.full((rows, 4), 5.0 + bias))
        return runner.compiler.compiles, runner.loads

    assert counts() == (1, 0)
    assert counts() == counts(name="forward-2") == (0, 1)  # the same program under another number
    assert counts(bias=1.0) == counts(rows=3) == counts(CountingCompiler("newer"), name="forward-1") == (1, 0)
    assert counts(bias=1.0) == counts(rows=3) == counts(CountingCompiler("newer")) == (0, 1)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 4


def test_a_changed_source_compiles_anew(simulated, tmp_path, monkeypatch):
    make(tmp_path).compile(program(), example(), "forward-1")
    monkeypatch.setattr("oarlock_neuron.runner.source_hash", lambda folder: "another")
    runner = make(tmp_path)
    runner.compile(program(), example(), "forward-1")
    assert (runner.compiler.compiles, runner.loads) == (1, 0)


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:40] + b"x" + c[41:]], ids=["short", "empty", "changed"])
def test_a_damaged_file_is_noticed_and_replaced(simulated, tmp_path, damage, caplog):
    make(tmp_path).compile(program(), example(), "forward-1")
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        runner = make(tmp_path)
        runner.compile(program(), example(), "forward-1")
    assert runner.compiler.compiles == 1 and "is damaged" in caplog.text and file.read_bytes() == whole


def test_a_file_that_the_compiler_cannot_use_is_compiled_again(simulated, tmp_path, caplog):
    make(tmp_path).compile(program(), example(), "forward-1")
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    Cache(tmp_path).write(file.name.removesuffix(SUFFIX), b"of another program")
    runner = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        runner.compile(program(), example(), "forward-1")
    assert (runner.compiler.compiles, runner.loads) == (1, 0) and "cannot be used" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_warning(simulated, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        run = make(tmp_path / "file" / "cache").compile(program(), example(), "forward-1")
    assert run(*example())[1]["hidden"].shape == (2, 4) and "could not be kept" in caplog.text


def test_the_folder_is_the_users_alone_and_named(simulated):
    runner = NeuronRunner(NeuronDevice())
    runner.compile(program(), example(), "forward-1")
    assert runner.kept_in() == str(simulated) and simulated.stat().st_mode & 0o777 == 0o700
    assert runner.refuses_unwarmed()


@pytest.mark.parametrize(("seqs", "tokens", "blocks"), [(1, 1, 1), (2, 16, 3), (16, 2048, 86), (256, 40, 4)])
def test_buckets_hold_the_largest_step_and_are_few(simulated, seqs, tokens, blocks):
    found = NeuronDevice().buckets(seqs, tokens, blocks)
    assert found["decode_rows"][-1] >= seqs and found["blocks"][-1] >= blocks
    assert found["out_rows"][-1] == found["decode_rows"][-1] + found["chunk_rows"][-1]
    assert found["chunk_tokens"][-1] == found["chunk_lens"][-1] == min(tokens, 512)
    assert len(found["decode_rows"]) * len(found["blocks"]) * (1 + len(found["chunk_tokens"])) <= 6
