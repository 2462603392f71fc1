"""Levels 0 and 1 of the kit: each check fails what it is for, and passes a good device."""

from __future__ import annotations

import dataclasses
import sys
import weakref

import pytest
import torch
from conformance_subjects import CAPABILITIES, HostDevice, make_subject
from oarlock.backend_api import AttentionSpec, Claims, DeviceSpec, OpImpl, ProbeResult
from oarlock.conformance import contract_level, device_level
from oarlock.conformance.cases import CheckFailed, run_case
from oarlock.device_choice import Selection
from oarlock.runtime.reference import layers

OFFLINE = [c for c in contract_level.cases() if "light_module" not in c.id]  # which needs an installed entry point


def with_capabilities(**changes):
    return make_subject(HostDevice(options={"capabilities": dataclasses.replace(CAPABILITIES, **changes)}))


@pytest.mark.parametrize("case", OFFLINE, ids=lambda c: c.id)
def test_a_good_package_keeps_the_contract(case):
    result = run_case(case, make_subject(), None)
    assert result.status == "pass", result.detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtypes": ()}, "dtypes"),
        ({"dtypes": ("float8",)}, "float8"),
        ({"fast_dtypes": ("float16",)}, "fast_dtypes"),
        ({"batch_invariant": ("float16",)}, "batch_invariant"),
        ({"block_sizes": (16, 0)}, "block_sizes"),
        ({"kv_dtypes": ("fp8",)}, "auto"),
        ({"kv_update": "sometimes"}, "in_place"),
        ({"execution": "fast"}, "compiled"),
        ({"pinned_memory": 1}, "pinned_memory"),
    ],
)
def test_impossible_capabilities_are_named(changes, words):
    with pytest.raises(CheckFailed, match=words):
        contract_level.capabilities(with_capabilities(**changes))


def test_capabilities_beyond_the_claims_are_named():
    with pytest.raises(CheckFailed, match=r"float16.*upper bounds"):
        contract_level.claims(with_capabilities(dtypes=("float16",)))
    with pytest.raises(CheckFailed, match="host_is_device"):
        contract_level.claims(with_capabilities(host_is_device=True))


class FewBuckets(HostDevice):
    def buckets(self, max_num_seqs, max_num_batched_tokens, max_blocks):
        full = {name: (max_num_seqs,) for name in ("decode_rows", "chunk_rows", "chunk_tokens", "chunk_lens")}
        return {**full, "blocks": (4,), "out_rows": (2 * max_num_seqs,)}


def test_buckets_must_exist_and_hold_the_largest_step():
    with pytest.raises(CheckFailed, match="gives none"):
        contract_level.buckets(with_capabilities(dynamic_shapes=False))
    with pytest.raises(CheckFailed, match="4 blocks"):
        contract_level.buckets(make_subject(FewBuckets()))


def test_private_imports_are_found(tmp_path, monkeypatch):
    package = tmp_path / "wrongly_private"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text("from oarlock.backend_api import Support\nimport oarlock.backend_api.runtime\n")
    (package / "device.py").write_text("def f():\n    from oarlock.runtime import worker\n")
    (package / "tests" / "test_x.py").write_text("import oarlock.conformance\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    subject = make_subject()
    subject.spec = dataclasses.replace(subject.spec, factory="wrongly_private.device:X")
    with pytest.raises(CheckFailed, match=r"device\.py:2 oarlock\.runtime") as found:
        contract_level.public_imports(subject)
    assert "__init__" not in str(found.value) and "test_x" not in str(found.value)
    (package / "device.py").write_text("from oarlock import backend_api\n")
    contract_level.public_imports(subject)


def other_parameters(x, w, eps):
    return layers.rms_norm(x, w, eps)


def test_kernels_of_unknown_ops_and_other_parameters_are_named():
    here = f"{__name__}:other_parameters"
    with pytest.raises(CheckFailed, match="softmax2, which is no op"):
        contract_level.kernel_signatures(make_subject(kernels=[OpImpl("softmax2", "mine", here)]))
    with pytest.raises(CheckFailed, match="must take the parameters of rms_norm"):
        contract_level.kernel_signatures(make_subject(kernels=[OpImpl("rms_norm", "mine", here)]))
    with pytest.raises(CheckFailed, match="two implementations of one name"):
        contract_level.names(make_subject(kernels=[OpImpl("rms_norm", "mine", here)] * 2))


def test_records_of_the_wrong_kind_are_named():
    with pytest.raises(CheckFailed, match="OpImpl instead of AttentionSpec"):
        contract_level.hook_records(make_subject(attention=[OpImpl("rms_norm", "mine", "x:y")]))
    with pytest.raises(CheckFailed, match="no subclass of Attention"):
        contract_level.hook_records(make_subject(attention=[AttentionSpec("mine", f"{HostDevice.__module__}:HostDevice")]))


def test_another_api_version_is_a_contract_problem():
    subject = make_subject()
    subject.spec = dataclasses.replace(subject.spec, api_version=(2, 0))
    with pytest.raises(CheckFailed, match="upgrade oarlock"):
        contract_level.api_version(subject)


def test_the_light_module_is_timed_in_a_fresh_interpreter():
    spec = DeviceSpec("sim-static", lambda: ProbeResult("available", ""), "x:Y", "oarlock-sim")
    subject = make_subject()
    subject.spec = spec
    contract_level.light_module(subject)
    subject.spec = dataclasses.replace(spec, name="nowhere")
    with pytest.raises(CheckFailed, match="no entry point"):
        contract_level.light_module(subject)


@pytest.mark.parametrize(
    ("limit", "words"), [("IMPORT_LIMIT_MS", "importing the light module takes"), ("PROBE_LIMIT_MS", "the probe takes")]
)
def test_slow_light_modules_fail(monkeypatch, limit, words):
    monkeypatch.setattr(contract_level, limit, 0.0)
    subject = make_subject()
    subject.spec = dataclasses.replace(subject.spec, name="sim-static")
    with pytest.raises(CheckFailed, match=words):
        contract_level.light_module(subject)


# ---- level 1


@pytest.mark.parametrize("case", list(device_level.cases()), ids=lambda c: c.id)
def test_a_good_device_passes(case):
    result = run_case(case, make_subject(), None)
    assert result.status in ("pass", "unsupported"), result.detail
    assert (result.status == "unsupported") == (",float16" in case.id or "memory" in case.id or "isolation" in case.id)


class Honest(HostDevice):
    """Apart from the host, with a memory account."""

    _factor = 1.0

    def __init__(self, index=0, options=None):
        super().__init__(index, options)
        self._held = []

    def memory_info(self):
        used = sum(size for reference, size in self._held if reference() is not None)
        return (1 << 40) - int(used * self._factor), 1 << 40

    def to_device(self, host):
        made = host.clone()
        self._held.append((weakref.ref(made), made.numel() * made.element_size()))
        return made


class CountsHalf(Honest):
    _factor = 0.5


class NeverFrees(Honest):
    def to_device(self, host):
        made = super().to_device(host)
        self._held.append((lambda made=made: made, 3 * made.numel() * made.element_size() if made.numel() > 1 << 20 else 0))
        return made


class ImpossibleMemory(Honest):
    def memory_info(self):
        return 2 << 40, 1 << 40


class SharesMemory(Honest):
    def to_device(self, host):
        return host


class IgnoresStrides(HostDevice):
    def to_device(self, host):
        return host.clone() if host.is_contiguous() else host.as_strided(host.shape, host.contiguous().stride()).clone()


class RoundsInts(HostDevice):
    def to_device(self, host):
        return host.half().to(host.dtype) if host.dtype == torch.int64 else host.clone()


class FlushesNegativeZero(HostDevice):
    def to_host(self, tensor):
        return tensor + 0.0 if tensor.is_floating_point() else tensor.clone()


class ShardsOnPlace(HostDevice):
    def place(self, name, tensor, shard):
        return tensor.chunk(2)[0].clone() if shard == "row" else tensor.clone()


class IgnoresTheSeed(HostDevice):
    def seed(self, value):
        """Draws go on."""


class FailsToVerify(HostDevice):
    def verify(self):
        raise RuntimeError("computed 11")


WRONG = [
    (CountsHalf, "memory moves"), (NeverFrees, "memory moves"), (ImpossibleMemory, "device[memory]"), (SharesMemory, "isolation"),
    (IgnoresStrides, "copies"), (RoundsInts, "copies,int64"), (FlushesNegativeZero, "copies,float32"),
    (ShardsOnPlace, "placing"), (IgnoresTheSeed, "seeding"), (FailsToVerify, "verify"),
]  # fmt: skip


def test_an_honest_account_passes():
    results = [run_case(case, make_subject(Honest()), None) for case in device_level.cases()]
    assert not [r for r in results if r.is_bad], [(r.id, r.detail) for r in results if r.is_bad]
    assert {r.id for r in results if r.status == "unsupported"} == {"device[copies,float16]", "device[computes,float16]"}


@pytest.mark.parametrize(("cls", "where"), WRONG, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_a_wrong_device_fails_where_it_is_wrong(cls, where):
    bad = [r for r in (run_case(case, make_subject(cls()), None) for case in device_level.cases()) if r.is_bad]
    assert any(where in r.id for r in bad), [(r.id, r.detail) for r in bad]


def test_selection_of_the_tests_is_a_real_record():
    assert isinstance(make_subject().selection, Selection) and isinstance(make_subject().selection.probe.claims, Claims)
    assert __name__ in sys.modules  # import strings above lead here
