"""The references against definitions written out in loops, and their declared test inputs against the references."""

import inspect
import math
import subprocess
import sys

import oarlock.runtime.reference  # noqa: F401  registers core's ops
import pytest
import torch
from oarlock.backend_api.runtime import bind_ops, registry

OPS = bind_ops([], "float32")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=rng(seed))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def case_name(case: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items())


OF_LEVEL_OPS = sorted(name for name, op in registry().items() if op.tested_in == "ops")
EVERY_CASE = [(name, case) for name in OF_LEVEL_OPS for case in registry()[name].cases]


def test_only_coarse_ops_are_left_to_the_runner_level():
    assert {op.name for op in registry().values() if op.tested_in != "ops"} == {"decoder_layer", "decoder_stack"}
    assert {op.tested_in for op in registry().values()} == {"ops", "runner"}


@pytest.mark.parametrize("name", OF_LEVEL_OPS)
def test_every_op_can_be_tested(name):
    op = registry()[name]
    assert op.generate is not None, f"op {name} has no input generator"
    assert op.tolerance and set(op.tolerance) <= set(DTYPES), f"op {name} has no tolerance"
    assert op.cost is not None, f"op {name} has no cost"
    assert op.reference.__doc__, f"op {name} has no definition"
    sizes = [{v for k, v in case.items() if k in ("tokens", "rows")} for case in op.cases]
    assert {0} in sizes and {1} in sizes, f"op {name} has no case of size zero or one"
    assert any(size and max(size) >= 3 and max(v for v in case.values() if isinstance(v, int)) >= 128 for size, case in zip(sizes, op.cases, strict=True))


def upcast(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def tensors_of(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize(("name", "case"), EVERY_CASE, ids=lambda v: v if isinstance(v, str) else case_name(v))
def test_reference_agrees_with_itself_in_float64(name, case):
    op = registry()[name]
    for dtype, limit in op.tolerance.items():
        args, kwargs = op.generate(case, DTYPES[dtype], rng(1))
        again, _ = op.generate(case, DTYPES[dtype], rng(1))
        for one, other in zip(args, again, strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), "a generator must repeat itself"
        inspect.signature(op.reference).bind(*args, **kwargs)
        got = tensors_of(op.reference(*args, **kwargs))
        want = tensors_of(op.reference(*(upcast(a) for a in args), **kwargs))
        for one, other in zip(got, want, strict=True):
            if not one.is_floating_point():
                assert torch.equal(one, other)
                continue
            one, other = one.double(), other.double()
            finite = other.isfinite()
            assert torch.equal(one.isfinite(), finite) and torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num())
            error, size = (one - other)[finite].pow(2).sum(), other[finite].pow(2).sum()
            assert error <= limit * max(size, 1e-30), f"{dtype}: {float(error / size):.3g} > {limit}"
        operations, moved = op.cost(*args, **kwargs)
        assert operations >= 0 and moved >= 0


def test_rms_norm_is_float32_inside_and_rounds_once():
    x, weight = randn(3, 8).bfloat16(), randn(8, seed=1).bfloat16()
    rows = [[float(v) for v in row] for row in x]
    want = [[v / math.sqrt(sum(u * u for u in row) / 8 + 1e-5) * float(w) for v, w in zip(row, weight, strict=True)] for row in rows]
    assert torch.equal(OPS.rms_norm(x, weight, 1e-5), torch.tensor(want).bfloat16())


def test_fused_add_norms_the_rounded_sum():
    x, residual, weight = randn(3, 64).bfloat16(), randn(3, 64, seed=1).bfloat16(), randn(64, seed=2).bfloat16()
    normed, total = OPS.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OPS.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_complex_product_on_the_first_dimensions(interleaved):
    x, positions = randn(4, 2, 10), ints(0, 3, 7, 1)
    angles = torch.arange(8)[:, None] * torch.tensor([1.0, 0.3, 0.01])
    table = torch.stack((angles.cos(), angles.sin()), 1)
    got = OPS.rotary(x, positions, table, interleaved=interleaved)
    want = x.clone()
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for i in range(3):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
                z = complex(x[token, head, a], x[token, head, b]) * complex(*table[position, :, i].tolist())
                want[token, head, a], want[token, head, b] = z.real, z.imag
    torch.testing.assert_close(got, want)
    assert torch.equal(got[..., 6:], x[..., 6:])


def test_gates_come_first():
    x = randn(2, 6)
    torch.testing.assert_close(OPS.silu_and_mul(x), x[:, :3] * torch.sigmoid(x[:, :3]) * x[:, 3:])
    cdf = 0.5 * (1 + torch.erf(x[:, :3] / math.sqrt(2)))
    torch.testing.assert_close(OPS.gelu_and_mul(x, "none"), x[:, :3] * cdf * x[:, 3:])
    inner = math.sqrt(2 / math.pi) * (x[:, :3] + 0.044715 * x[:, :3] ** 3)
    torch.testing.assert_close(OPS.gelu_and_mul(x, "tanh"), 0.5 * x[:, :3] * (1 + torch.tanh(inner)) * x[:, 3:])


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match="swoosh.*relu"):
        OPS.activation(randn(1, 2), "swoosh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_topk_takes_the_lowest_id_among_equals(dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]], dtype=dtype)
    weights, ids = OPS.moe_topk(logits, 2, False)
    assert ids.tolist() == [[1, 2]] and ids.dtype == torch.int32 and weights.dtype == torch.float32
    torch.testing.assert_close(weights, logits.float().softmax(-1)[:, 1:3])
    assert OPS.moe_topk(logits, 2, True)[0].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 2), (7, 4, 2), (33, 8, 3), (5, 16, 1), (12, 3, 3), (0, 4, 2)])
def test_moe_experts_is_a_sum_over_chosen_experts(tokens, experts, k):
    x, w13, w2 = randn(tokens, 8), randn(experts, 12, 8, seed=1) / 3, randn(experts, 8, 6, seed=2) / 3
    weights, ids = OPS.moe_topk(randn(tokens, experts, seed=3), k, True)
    valid = torch.rand(tokens, generator=rng(4)) > 0.3
    x[~valid] = math.nan
    want = torch.zeros(tokens, 8)
    for t in range(tokens):
        for weight, expert in zip(weights[t], ids[t], strict=True):
            if valid[t]:
                want[t] += weight * (w2[expert] @ OPS.silu_and_mul((w13[expert] @ x[t])[None])[0])
    torch.testing.assert_close(OPS.moe_experts(x, w13, w2, weights, ids, valid), want)


def test_moe_rows_do_not_depend_on_padding():
    x, w13, w2 = randn(6, 8), randn(4, 12, 8, seed=1), randn(4, 8, 6, seed=2)
    weights, ids = OPS.moe_topk(randn(6, 4, seed=3), 2, True)
    alone = OPS.moe_experts(x[:3], w13, w2, weights[:3], ids[:3], torch.ones(3, dtype=torch.bool))
    padded = OPS.moe_experts(x, w13, w2, weights, ids, torch.arange(6) < 3)
    torch.testing.assert_close(padded[:3], alone)
    assert padded[3:].count_nonzero() == 0


def penalised(row, prompt, output, presence, frequency, repetition):
    row = list(row)
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= presence + frequency * output.count(token)
    return row


def test_penalties_written_out():
    logits, length = randn(4, 12), 9
    prompt_len, total_len = [2, 0, 4, 3], [7, 5, 4, 9]
    history = torch.randint(0, 12, (4, length), generator=rng(1), dtype=torch.int32)
    known = [history[r, : total_len[r]].tolist() for r in range(4)]
    for r in range(4):
        history[r, total_len[r] :] = ints(-5, 2**31 - 1, 3, 3, 3, 3, 3, 3, 3)[: length - total_len[r]]
    knobs = [(0.7, 0.3, 1.3), (-1.0, 0.0, 1.0), (1.5, 1.5, 0.8), (0.0, -0.4, 1.1)]
    got = OPS.apply_penalties(logits, history, ints(*prompt_len), ints(*total_len), *torch.tensor(knobs).T)
    want = [penalised(logits[r].tolist(), known[r][: prompt_len[r]], known[r][prompt_len[r] :], *knobs[r]) for r in range(4)]
    torch.testing.assert_close(got, torch.tensor(want))


def test_neutral_penalties_and_other_rows_change_no_bit():
    logits, history = randn(3, 10), torch.randint(0, 10, (3, 8), generator=rng(1), dtype=torch.int32)
    logits[0, :3] = torch.tensor([0.0, -0.0, -math.inf])
    knob = torch.tensor([0.0, 1.0, 0.0])
    got = OPS.apply_penalties(logits, history, ints(2, 2, 2), ints(8, 8, 8), knob, knob, 1 + knob)
    assert torch.equal(got[0::2].view(torch.int32), logits[0::2].view(torch.int32))
    assert not torch.equal(got[1], logits[1])


def test_bias_adds_up_bans_and_pads():
    logits = randn(2, 5)
    got = OPS.apply_bias(logits, torch.tensor([[1, 1, 0], [4, 0, 0]], dtype=torch.int32), torch.tensor([[0.5, 2.0, 0.0], [-math.inf, 0.0, 0.0]]))
    want = logits.clone()
    want[0, 1] += 2.5
    want[1, 4] = -math.inf
    torch.testing.assert_close(got, want)


def test_mask_reads_bit_v_of_its_word():
    logits, allowed = randn(2, 70), [{0, 31, 32, 63, 64}, {5, 69}]
    words = [[sum(1 << (v - 32 * w) for v in row if v // 32 == w) for w in range(3)] for row in allowed]
    bitmask = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    got = OPS.apply_mask(logits, bitmask)
    for r in range(2):
        assert {v for v in range(70) if got[r, v] > -math.inf} == allowed[r]
        assert all(got[r, v] == logits[r, v] for v in allowed[r])


@pytest.mark.parametrize("k", [0, 1, 4, 40])
def test_logprobs_and_ranks_written_out(k):
    logits, targets = (randn(3, 40) * 2).round(), ints(0, 7, 39)  # rounded: many equals
    target, rank, ids, top = OPS.logprobs(logits, targets, k)
    for r in range(3):
        row = logits[r].double()
        scores = (row - row.logsumexp(0)).tolist()
        chosen = int(targets[r])
        assert float(target[r]) == pytest.approx(scores[chosen], abs=1e-5)
        assert int(rank[r]) == 1 + sum(v > logits[r, chosen] for v in logits[r])
        order = sorted(range(40), key=lambda v: (-float(logits[r, v]), v))[:k]
        assert ids[r].tolist() == order
        assert top[r].tolist() == pytest.approx([scores[v] for v in order], abs=1e-5)
    assert (target.dtype, rank.dtype, ids.dtype, top.dtype) == (torch.float32, torch.int32, torch.int32, torch.float32)


def test_logprobs_lists_no_token_twice_when_most_are_banned():
    logits = torch.full((1, 6), -math.inf)
    logits[0, 4] = 1.0
    ids = OPS.logprobs(logits, ints(4), 3)[2]
    assert ids.tolist() == [[4, 0, 1]]


def test_importing_the_references_registers_every_op():
    """`oarlock doctor` binds a device's ops without a model: whatever registers one later would be an unknown op there."""
    code = (
        "import oarlock.runtime.reference\n"
        "from oarlock.backend_api.runtime import registry\n"
        "early = set(registry())\n"
        "import oarlock.runtime.worker, oarlock.runtime.models\n"
        "print(sorted(set(registry()) - early))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
