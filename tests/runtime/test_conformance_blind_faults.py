"""The kit finds, and names, mistakes that were written down before its cases were read (`blind_faults`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pluggy
import pytest
from blind_faults import COMPILED, FAULTS, Fault, Package, Parts
from oarlock.backend_api import PROJECT, ConformanceProfile, Hooks
from oarlock.backend_api.runtime.ops import resolve
from oarlock.conformance import kit
from oarlock.conformance.cases import Result, run_case
from oarlock.conformance.subject import Subject
from oarlock.device_choice import Selection
from oarlock.plugins import collect
from oarlock.runtime import worker
from oarlock.runtime.choice import choose_graph_runner

# No mistakes after all, by what the guide says.
WITHDRAWN = {"ClaimsADtypeThatItLacks": "claims are upper bounds: to claim more than the device has breaks nothing"}
ELSEWHERE = {"BucketsOfTheMoment": 0}  # found at another level than was expected
# Which cases of a level are run: each fault ends in a few seconds. Of ops: float32, all sizes.
CASES = {
    "sums_in_bfloat16": r"^linear\[bfloat16",
    "top_p_before_top_k": r"^sample\[float32,rows=(5|6|16)",
    "tail_reads_the_next_row": r"^greedy\[float32,rows=\d,vocab=\d\d?,",
    "sign_bit_taken_for_unset": r"^apply_mask\[float32,rows=\d,vocab=256",
    "rank_counts_equals": r"^logprobs\[float32,rows=\d,vocab=\d+,k=7",
    "ValuesNotMasked": r"float32,prefill",
    "WindowByBlock": r"float32,window",
    "SoftcapBeforeScale": r"float32,layers",
    "ChunkBeginsAtABlock": r"float32,(chunk|mixed)",
    "HeadsInterleaved": r"float32,prefill",
    "FullLastBlockHidden": r"float32,decode",
    "FirstLayersParameters": r"float32,layers",
    "MaximumBeginsAtZero": r"float32,extremes",
    "PaddedRowsDivideByZero": r"float32,padding",
    "ViewsWrittenAsContiguous": r"float32,writes",
    "DeclaresFunctionalWrites": r"float32,writes",
    "SupportsLongerHeadsThanItReads": r"float32,.*dim=256",
    "KeepsTheExamplesInputs": r"graph_runner",
    "ReusesOutputs": r"graph_runner",
    "DonatesDeviceInputs": r"graph_runner",
    "DeclaresBatchInvariance": r"batch_invariant",
    "BucketsOfTheMoment": r"buckets",
}


def opened(parts: Parts, name: str) -> Subject:
    """A subject whose device and implementations are `parts`, as `Subject.open` makes it of an installed package."""
    package = Package(parts)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(package, name=name)
    (spec,) = package.devices()
    if parts.options:
        globals()[name] = _with_options(parts)
        spec = dataclasses.replace(spec, factory=f"{__name__}:{name}")
    device = resolve(spec.factory)(0, {})
    device.activate()
    graph = choose_graph_runner(collect(manager, "graph_runner", device=device), device)
    return Subject(spec, Selection(spec, spec.probe(), "under-test"), manager, device, ConformanceProfile(device=spec.name), graph)


def _with_options(parts: Parts) -> type:
    class WithOptions(parts.device):  # type: ignore[misc,name-defined]
        def __init__(self, index=0, options=None):
            super().__init__(index, {**(options or {}), **parts.options})

    return WithOptions


def level_of(fault: Fault) -> int:
    return ELSEWHERE.get(fault.name, fault.level)


def results_of(subject: Subject, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """The fault's cases of its level."""
    monkeypatch.setattr(worker, "worker_plugins", lambda name: subject.plugins)
    pattern = CASES.get(fault.name, rf"^{fault.named}\[float32" if fault.level == 2 else ".")
    cases = [case for case in kit.select(kit.Choice((level_of(fault),)), subject) if re.search(pattern, case.id)]
    assert cases, f"no case matches {pattern}"
    return [run_case(case, subject, None) for case in cases]


@pytest.fixture(scope="module")
def unfaulted() -> Iterator[dict[bool, Subject]]:
    """The backends without a fault: as it is, and compiled."""
    found = {bool(parts.options): opened(parts, f"unfaulted{bool(parts.options):d}") for parts in (Parts(), COMPILED)}
    yield found
    for subject in found.values():
        subject.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_named_and_without_it_the_backend_passes(fault, unfaulted, monkeypatch):
    subject = opened(fault.apply(fault.base), "faulted")
    try:
        bad = [r for r in results_of(subject, fault, monkeypatch) if r.is_bad]
    finally:
        subject.close()
    if fault.name in WITHDRAWN:
        assert not bad
        return
    assert bad, f"{fault.name} is not found"
    assert any(fault.named in f"{r.op} {r.id} {r.detail}" for r in bad), [(r.id, r.detail) for r in bad]
    right = results_of(unfaulted[bool(fault.base.options)], fault, monkeypatch)
    assert not [(r.id, r.detail) for r in right if r.is_bad]
    assert any(r.status == "pass" for r in right) or fault.name == "DeclaresBatchInvariance"  # which without the fault declares nothing


def test_faults_are_of_every_kind():
    kinds = [fault.kind for fault in FAULTS if fault.name not in WITHDRAWN]
    assert len(kinds) >= 14 and all(kinds.count(kind) >= 2 for kind in ("op", "attention", "device", "runner", "capability", "quantised"))


def test_the_guide_tells_of_every_fault():
    text = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)`: [^|]+ \| `(\w+)` \| (\d) \| (found|missed)", text, re.MULTILINE)
    assert sorted(row[:3] for row in told) == sorted((fault.name, fault.named, str(fault.level)) for fault in FAULTS)
