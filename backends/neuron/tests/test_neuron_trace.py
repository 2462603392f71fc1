"""What the strict compiler takes, and what it refuses with which words."""

from __future__ import annotations

import pytest
import torch

from oarlock_neuron.compiler import StrictCompiler
from oarlock_neuron.trace import MAX_CONSTANT_BYTES, Unsuitable, is_allowed, trace

X, I = torch.arange(6.0).view(2, 3), torch.tensor([1, 0], dtype=torch.int32)
LARGE = torch.ones(MAX_CONSTANT_BYTES // 4 + 1)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, i: (x[x > 1],), "depends on data"),
        (lambda x, i: (x * x.sum().item(),), "depends on data"),
        (lambda x, i: (x.nonzero(),), "depends on data"),
        (lambda x, i: (x if x.sum() > 0 else i,), "cannot be exported with static shapes"),
        (lambda x, i: (x + torch.rand(3),), "draws from the device's generator"),
        (lambda x, i: (torch.linalg.svd(x)[0],), "linalg_svd.default is not among the operators"),
        (lambda x, i: (torch.cummax(x, 0)[0],), "cummax.default is not among the operators"),
        (lambda x, i: (x + LARGE.sum(),), "closes over"),
        (lambda x, i: (x.add_(1),), r"writes to its inputs \[0\] and declares \[\]"),
        (lambda x, i: (x.view(-1)[2:].zero_() + 1,), r"writes to its inputs \[0\] and declares \[\]"),
    ],
    ids=["boolean-index", "item", "nonzero", "branch", "random", "linear-algebra", "operator", "constant", "in-place", "in-place-view"],
)
def test_refused(fn, words):
    with pytest.raises(Unsuitable, match=words):
        trace(fn, (X.clone(), I), {}, "head-1")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_64_bit_inputs_are_refused(dtype):
    with pytest.raises(Unsuitable, match=f"program head-1: input 0 .* is {dtype}"):
        trace(lambda x: (x + 1,), (torch.ones(2, dtype=dtype),), {}, "head-1")


def test_a_replaced_input_is_written_where_it_was():
    state, program = X.clone(), StrictCompiler().compile(lambda s, i: (s.index_put((i,), s[i] + 1), s.sum()), (X.clone(), I), aliases={0: 0}, tag="p-1")
    new, total = program(state, I)
    assert new is state and torch.equal(state, X + 1) and total == X.sum()


def test_state_that_is_returned_as_it_was_needs_no_write():
    traced = trace(lambda a, b: (a, b + 1, a * 2), (X.clone(), X.clone()), {0: 0, 1: 1}, "p-1")
    assert "copy_" in traced.text and traced.text.count("aten.copy_") == 1


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda s: (s[:1],), "cannot replace input 0"),
        (lambda s: (s.bfloat16(),), "cannot replace input 0"),
        (lambda s: (s + 1, s[0]), "output 0 is a view of input 0, which the program overwrites"),
    ],
    ids=["shape", "dtype", "view"],
)
def test_aliases_that_cannot_be(fn, words):
    with pytest.raises(Unsuitable, match=words):
        trace(fn, (X.clone(),), {0: 0}, "p-1")


def test_unseen_shapes_are_refused():
    program = StrictCompiler().compile(lambda x: (x + 1,), (X,), aliases={}, tag="head-1")
    assert torch.equal(program(X)[0], X + 1)
    for wrong in (X[:1], X.bfloat16()):
        with pytest.raises(RuntimeError, match="program head-1 was compiled for input 0"):
            program(wrong)
    with pytest.raises(RuntimeError, match="called with nothing|for input 1 nothing"):
        program(X, X)


def test_compiles_are_counted_and_an_artifact_belongs_to_its_program():
    compiler = StrictCompiler()
    one, other = (trace(lambda x, n=n: (x + n,), (X,), {}, "p-1") for n in (1, 2))
    made = compiler.compile(one, (X,), aliases={}, tag="p-1")
    assert compiler.compiles == 1
    assert torch.equal(compiler.load(made.artifact, one, (X,), aliases={}, tag="p-1")(X)[0], X + 1)
    with pytest.raises(ValueError, match="artifact of another program"):
        compiler.load(made.artifact, other, (X,), aliases={}, tag="p-1")
    assert compiler.compiles == 1


def test_the_text_tells_programs_apart():
    constant = torch.tensor([1.0, 2.0, 3.0])
    functions = [lambda x: (x + 1,), lambda x: (x + 1.0000001,), lambda x: (x * 1,), lambda x: (x + constant,), lambda x: (x + 2 * constant[0],)]
    texts = [trace(fn, (X,), {}, "p-1").text for fn in functions]
    texts += [trace(functions[0], (example,), {}, "p-1").text for example in (X.bfloat16(), X[:1])]
    assert len(set(texts)) == len(texts)
    before = trace(lambda x: (x + constant,), (X,), {}, "p-1").text
    constant[1] = 5
    assert trace(lambda x: (x + constant,), (X,), {}, "p-1").text != before


@pytest.mark.parametrize(
    ("op", "allowed"),
    [
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.aten.add_.Tensor, True),
        (torch.ops.aten.linear.default, True),
        (torch.ops.aten.softmax.int, True),
        (torch.ops.aten.bitwise_left_shift.Tensor_Scalar, True),
        (torch.ops.aten._linalg_svd.default, False),
        (torch.ops.aten._scaled_mm.default, False),
    ],
)
def test_operators(op, allowed):
    assert is_allowed(op) is allowed
