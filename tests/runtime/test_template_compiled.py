"""The template backend with --template-compile: fixed shapes, and programs that run from a trace."""

from __future__ import annotations

from dataclasses import replace

import oarlock_template
import pytest
import torch
from oarlock.backend_api.runtime import EagerRunner
from oarlock.conformance import kit
from oarlock.device_choice import Selection
from oarlock_template.device import TemplateDevice
from oarlock_template.graph import TracingRunner


class Compiled(TemplateDevice):
    """The option given."""

    def __init__(self, index=0, options=None):
        super().__init__(index, {**(options or {}), "template_compile": True})


def selection() -> Selection:
    (spec,) = oarlock_template.devices()
    return Selection(replace(spec, factory=f"{__name__}:Compiled"), spec.probe(), spec.distribution)


def test_traced_programs_conform():
    report = kit.run(selection(), kit.Choice((4,), pattern=r"float32,dense,(mixtures|swapped|programs)"))
    assert not [(r.id, r.detail) for r in report.results if r.is_bad]
    assert sum(r.status == "pass" for r in report.results) >= 3


def test_a_graph_runner_is_offered_only_for_the_option():
    assert oarlock_template.graph_runner(TemplateDevice()) == []
    (record,) = oarlock_template.graph_runner(Compiled())
    assert record.factory == "oarlock_template.graph:TracingRunner"


def test_a_traced_program_runs_without_its_python_and_refuses_other_shapes():
    ran = []

    def program(weights, written, read, packed, inputs):
        ran.append(1)
        written["state"].add_(packed)
        return written, {"out": weights["w"] @ inputs["x"]}

    def arguments(size):
        return {"w": torch.eye(size)}, {"state": torch.zeros(3, dtype=torch.int32)}, {}, torch.ones(3, dtype=torch.int32), {"x": torch.ones(size, 1)}

    example = arguments(4)
    compiled = TracingRunner(Compiled()).compile(program, example, "p")
    assert len(ran) == 1 and not example[1]["state"].any()  # traced by shapes alone
    given = arguments(4)
    written, outputs = compiled(*given)
    assert len(ran) == 1 and written["state"].tolist() == [1, 1, 1] and outputs["out"].flatten().tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="program p was compiled for other shapes"):
        compiled(*arguments(5))
    assert TracingRunner(Compiled()).refuses_unwarmed() and not EagerRunner(Compiled()).refuses_unwarmed()
