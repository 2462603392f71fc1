"""`--record` and `--replay`: a model's op calls become cases that find a wrong op, and hold none of the model's numbers."""

from __future__ import annotations

import json

import pytest
import torch
from conformance_subjects import make_subject
from oarlock.backend_api import OpImpl
from oarlock.cli import conformance as command
from oarlock.conformance import replay
from oarlock.conformance.cases import run_case
from oarlock.conformance.record import Calls, describe
from oarlock.conformance.tiny_models import TinyModel
from oarlock.errors import ConfigError
from oarlock.runtime.reference import layers


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    TinyModel("moe", folder / "moe")
    file = folder / "calls.json"
    assert command.main(["--device", "sim-static", "--record", str(folder / "moe"), "--out", str(file)]) == 0
    return file


def test_every_op_of_the_model_is_written_without_data(recorded):
    data = json.loads(recorded.read_text())
    ops = {call["op"] for call in data["calls"]}
    assert {"embedding", "rms_norm", "linear", "rotary", "moe_topk", "moe_experts", "sample", "logprobs", "apply_penalties", "paged_attention"} <= ops
    assert (data["model"], data["dtype"]) == ("moe", "float32")
    layers_of = next(call["count"] for call in data["calls"] if call["op"] == "moe_experts")
    assert layers_of >= 2, "each layer's call counts"
    rows = [call["rows"] for call in data["calls"] if call["op"] == "paged_attention"]
    assert [[19, 19], [3, 3]] in rows and [[22, 1], [7, 1], [41, 1]] in rows  # (context, new tokens) of each row of a region
    assert len(recorded.read_text()) < 200_000 < 8 * 3 * 48 * 64 * 8, "far smaller than the experts of one layer"


def test_a_replayed_call_finds_the_wrong_op_alone(recorded):
    globals()["_wrong"] = lambda x, weight, eps: layers.rms_norm(x, weight, 10 * eps)
    subject = make_subject(kernels=[OpImpl("rms_norm", "mine", f"{__name__}:_wrong", priority=1)])
    results = [run_case(case, subject, None) for case in replay.cases(str(recorded))]
    assert len({r.id for r in results}) == len(results) > 50
    assert {r.op for r in results if r.is_bad} == {"rms_norm"}
    assert {r.op for r in results if r.status == "pass"} >= {"paged_attention", "moe_experts", "sample"}


def test_the_command_replays_on_another_device(recorded, capsys):
    assert command.main(["--device", "cpu", "--replay", str(recorded), "--ops", "moe_topk,paged_attention"]) == 0
    out = capsys.readouterr().out
    assert "2 ops" in out and "3 attention" in out and "every chosen case passed (levels replay)" in out


def written(value):
    calls = Calls()
    calls.add(args=describe(value, lambda t: t))
    return calls.written()[0]["args"]


def test_calls_that_differ_in_ranges_alone_are_one_call_with_the_wider_range():
    calls = Calls()
    for number in (1.0, -3.0, 2.0):
        calls.add(op="x", args=[describe(torch.full((2, 2), number), lambda t: t)])
    calls.add(op="x", args=[describe(torch.ones(2, 3), lambda t: t)])
    assert [(c["count"], c["args"][0]["range"]) for c in calls.written()] == [(3, [-3.0, 2.0]), (1, [1.0, 1.0])]


def test_drawn_arguments_keep_shape_dtype_range_and_small_vectors():
    random = torch.Generator().manual_seed(1)
    weights = {"codes": torch.randint(-8, 8, (5, 70), dtype=torch.int8), "scales": torch.rand(5, 1) + 1}
    given = (torch.tensor([3, 1, 2]), torch.randn(40, 3).bfloat16(), torch.rand(9) < 0.5, weights, None, "silu", 1e-5)
    for value, again in zip(given, replay.drawn(written(given), random), strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        assert (again.shape, again.dtype) == (value.shape, value.dtype)
        if value.dtype == torch.int64:
            assert torch.equal(again, value)
        elif value.dtype != torch.bool:
            assert value.min() <= again.min() and again.max() <= value.max() and not torch.equal(again, value)
    again = replay.drawn(written(weights), random)
    assert again["codes"].dtype == torch.int8 and float(again["scales"].min()) >= 1
    with pytest.raises(TypeError, match="set"):
        describe({1}, lambda t: t)


def test_files_that_cannot_be_replayed_are_refused_in_words(tmp_path):
    file = tmp_path / "x.json"
    for text, words in (("{", "no file that --record wrote"), ('{"kind": "perf", "format": 1}', "kind 'perf'"), ('{"kind": "calls", "format": 1, "dtype": "float32", "calls": [{"op": "softmax2"}]}', "softmax2 is no op")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            list(replay.cases(str(file)))
    with pytest.raises(ConfigError, match="--record needs --out"):
        command.main(["--device", "sim-static", "--record", "m"])
    with pytest.raises(ConfigError, match="-k would have no effect"):
        command.main(["--device", "sim-static", "--record", "m", "--out", "x", "-k", "y"])
