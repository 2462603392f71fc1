"""Groups of layers share the cache's tensors: an attention that serves some of them only, in a layout of its own, serves none."""

from __future__ import annotations

from dataclasses import replace

import oarlock_template
import pytest
from oarlock.backend_api import AttentionSpec, Support
from oarlock.conformance import kit
from oarlock.device_choice import Selection
from oarlock.runtime.choice import rejections
from oarlock_template.paged import TemplateAttention

LOW, HIGH = 5, 10
MADE, WROTE = [], set()


class Seen(TemplateAttention):
    """Tells what was made, and whether it computed."""

    def __init__(self, block_size, dtype, params):
        super().__init__(block_size, dtype, params)
        MADE.append(self)

    def write_kv(self, cache, key, value, slots):
        WROTE.add(self)
        return super().write_kv(cache, key, value, slots)


class OtherLayout(TemplateAttention):
    """Never computes here."""

    def kv_layout(self, num_blocks):
        return ((num_blocks, 2, *super().kv_layout(1)[0][1:]),)


def full_only(*, kind, **_):
    return Support(kind == "full", () if kind == "full" else (f"{kind} attention",))


def runs(monkeypatch, records, model="hybrid"):
    monkeypatch.setattr(oarlock_template, "attention", oarlock_template.hookimpl(lambda device: records))
    MADE.clear()
    WROTE.clear()
    (spec,) = oarlock_template.devices()
    report = kit.run(Selection(replace(spec), spec.probe(), spec.distribution), kit.Choice((4,), pattern=rf"float32,{model},(mixtures|copied)"))
    assert [(r.status, r.detail) for r in report.results] == [("pass", "")] * 2


def spec_of(name, factory, priority, supports=lambda **_: Support(True)):
    return AttentionSpec(name, factory, priority, supports)


@pytest.mark.parametrize("model", ["hybrid", "dense"])
def test_one_that_serves_some_groups_only_leaves_the_model_to_the_reference(monkeypatch, caplog, model):
    caplog.set_level("INFO")
    runs(monkeypatch, [spec_of("seen", f"{__name__}:Seen", HIGH, full_only)], model)
    assert len(MADE) == 1 and bool(WROTE) is (model == "dense")
    said = "paged_attention: served by reference, not by seen: serves some layers of this model only"
    assert (said in caplog.text) is (model == "hybrid")


def test_one_of_lower_priority_that_serves_all_groups_takes_its_place(monkeypatch):
    runs(monkeypatch, [spec_of("half", f"{__name__}:OtherLayout", HIGH, full_only), spec_of("seen", f"{__name__}:Seen", LOW)])
    assert len(WROTE) == 2 and {attention.params.window is None for attention in WROTE} == {True, False}


def test_ops_that_are_rejected_for_one_reason_share_a_line():
    table = [("linear", "reference", "x: no bfloat16"), ("rotary", "x", ""), ("rms_norm", "reference", "x: no bfloat16"), ("sample", "y", "x: too slow")]
    assert rejections(table) == ["linear, rms_norm: served by reference, not by x: no bfloat16", "sample: served by y, not by x: too slow"]
