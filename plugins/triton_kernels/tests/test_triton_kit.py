"""The kit's cases on a device of host tensors: every op that the registry lists, and the attention, in the interpreter, against float64."""

from __future__ import annotations

import pytest
from oarlock.conformance import attention_level, ops_level
from oarlock_triton_kernels import registry

OPS = sorted({impl.op for impl in registry.OPS})
ELSEWHERE = {  # what no case of the kit leads to -> the file that compares it with float64
    "qkv_kernel": "test_triton_qkv.py", "attend_join_kernel": "test_triton_attention.py", "attend_prefix_kernel": "test_triton_attention.py",
    "linear_tiles_kernel": "test_triton_tiles.py",
}  # fmt: skip


def kernels_of(served: str) -> set[str]:
    """The kernels whose chapters say that they serve it."""
    return {chapter.kernel.partition(":")[2] for chapter in registry.CHAPTERS if served in chapter.serves}


def test_every_chapter_serves_something():
    assert {served for chapter in registry.CHAPTERS for served in chapter.serves} == {"attention", *OPS} - {"embedding"}


@pytest.mark.parametrize("op", OPS)
def test_an_op_equals_its_reference(subject, passed, launched, op):
    assert {"triton"} == {served_by for name, served_by, _ in subject.ops("float32").table if name == op}
    assert len(passed(list(ops_level.cases()), rf"^{op}\[(?!coverage)")) > 3
    assert set(launched) == kernels_of(op) - set(ELSEWHERE)


def test_attention_equals_dense_attention(subject, passed, launched):
    capabilities = subject.device.capabilities
    ids = passed(list(attention_level.cases(capabilities.dtypes, capabilities.block_sizes)))
    assert set(subject.attention_served.values()) == {"triton"}
    for part in (*capabilities.dtypes, "mixed", "window=24", "softcap=0.5", "dim=256", "dim=80", "heads=9/3", "kv=fp8_e4m3", "block=8"):
        assert any(part in case for case in ids), part
    assert set(launched) == kernels_of("attention") - set(ELSEWHERE)
