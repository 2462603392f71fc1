"""The kit's cases on a device of host tensors: every op that the registry lists, and the attention, in the interpreter, against float64."""

from __future__ import annotations

import pytest
from oarlock.conformance import ops_level
from oarlock_triton_kernels import registry

OPS = sorted({impl.op for impl in registry.OPS})


@pytest.mark.parametrize("op", OPS)
def test_an_op_equals_its_reference(subject, passed, op):
    assert {"triton"} == {served_by for name, served_by, _ in subject.ops("float32").table if name == op}
    assert len(passed(list(ops_level.cases()), rf"^{op}\[(?!coverage)")) > 3
