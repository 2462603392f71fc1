"""References must have shapes that depend on shapes alone, and must not read the device from the host."""

import pytest
import torch
from oarlock.backend_api.runtime import AttentionParams, registry
from oarlock.runtime.reference import FunctionalReferenceAttention, ReferenceAttention
from torch.utils._python_dispatch import TorchDispatchMode

DYNAMIC = {"nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "_unique2", "bincount", "is_nonzero", "equal", "repeat_interleave"}


class RefuseDynamicShapes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in DYNAMIC:
            raise AssertionError(f"{name} depends on values")
        if name in ("index", "index_put", "index_put_") and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise AssertionError("boolean indexing depends on values")
        return func(*args, **(kwargs or {}))


def test_the_check_itself_can_fail():
    x = torch.ones(3)
    for broken in (lambda: x[x > 0], lambda: x.sum().item(), lambda: x.nonzero(), lambda: bool(x[0] > 0)):
        with pytest.raises(AssertionError, match="depends on values"), RefuseDynamicShapes():
            broken()


@pytest.mark.parametrize("name", sorted(name for name, op in registry().items() if op.tested_in == "ops"))
def test_op_reference_has_static_shapes(name):
    op = registry()[name]
    for case in op.cases:
        args, kwargs = op.generate(case, torch.float32, torch.Generator().manual_seed(0))
        with RefuseDynamicShapes():
            op.reference(*args, **kwargs)


@pytest.mark.parametrize("cls", [ReferenceAttention, FunctionalReferenceAttention])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("max_q", [1, 4])
def test_attention_has_static_shapes(cls, window, max_q):
    params = AttentionParams(4, 2, 8, 0.3, window, 20.0)
    attention = cls(4, torch.float32, params)
    cache = tuple(torch.zeros(shape) for shape in attention.kv_layout(9))
    tables, seq_lens = torch.arange(1, 9, dtype=torch.int32).view(2, 4), torch.tensor([13, 4], dtype=torch.int32)
    start, new = torch.tensor([0, max_q, 2 * max_q], dtype=torch.int32), torch.zeros(2 * max_q, 2, 8)
    with RefuseDynamicShapes():
        metadata = attention.metadata(tables, seq_lens, start, max_q, 2 * max_q)
        cache = attention.write_kv(cache, new, new, torch.arange(2 * max_q, dtype=torch.int32))
        attention.attend(torch.zeros(2 * max_q, 4, 8), cache, metadata, params)
        attention.copy_blocks(cache, torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
