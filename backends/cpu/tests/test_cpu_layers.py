"""Each layer op against core's reference in float64, over odd sizes, both dtypes and every instruction set; and batch invariance."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oarlock.conformance.references import layers as reference

pytestmark = pytest.mark.kernels
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ops():
    from oarlock_cpu import ops

    return ops


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """NMSE against float64: one rounding of bfloat16 is about 3e-6, float32 sums stay below 1e-12."""
    assert got.dtype == dtype and got.shape == want.shape
    assert error_of(got, want) < (1e-5 if dtype == torch.bfloat16 else 1e-12)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).square().sum() / want.square().sum().clamp(min=1e-30))


LINEARS = [(1, 64, 64), (1, 576, 1536), (2, 1536, 96), (5, 100, 33), (7, 31, 1), (13, 577, 65), (97, 48, 130), (200, 33, 40), (1, 1, 1), (0, 16, 16), (9, 512, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size", "out"), LINEARS)
def test_linear(ops, linear_isa, dtype, rows, size, out):
    x, w, b = random(rows, size, dtype=dtype), random(out, size, dtype=dtype, seed=1), random(out, dtype=dtype, seed=2)
    for bias in (None, b):
        want = reference.linear(x.double(), w.double(), None if bias is None else bias.double())
        assert_near(ops.linear(x, w, bias), want, dtype)
        assert_near(ops.linear(x, ops.pack(w), bias), want, dtype)
        for weight in (w, ops.pack(w)):
            got = ops.lm_head(x, weight, bias)
            assert got.dtype == torch.float32
            # The sums are not rounded to the model's dtype; only runs of binary16 products are.
            is_rounded = linear_isa == "avx512_fp16" and dtype == torch.bfloat16 and weight is not w
            assert error_of(got, want) < (2e-6 if is_rounded else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_of_a_slice(ops, dtype):
    wide, w = random(6, 200, dtype=dtype), random(40, 64, dtype=dtype, seed=1)
    for x in (wide[:, 8:72], wide[:, ::3][:, :64]):
        want = reference.linear(x.double(), w.double())
        assert_near(ops.linear(x, w), want, dtype)
        assert_near(ops.linear(x, ops.pack(w)), want, dtype)


def test_linear_refuses_what_does_not_fit(ops):
    x, w = random(2, 32, dtype=torch.float32), random(8, 48, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="expected"):
        ops.linear(x, w)
    with pytest.raises(RuntimeError, match="does not fit a weight of"):
        ops.linear(x, ops.pack(w))
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        ops.linear(x.half(), w[:, :32].half())


def test_padding_of_a_packed_weight_is_not_touched_by_nan_beyond_a_row(ops):
    """x is read to the end of its row and no further, although K is rounded up."""
    wide = torch.full((3, 64), float("nan"))
    wide[:, :33] = random(3, 33, dtype=torch.float32)
    w = random(5, 33, dtype=torch.float32, seed=1)
    for weight in (w, ops.pack(w)):
        assert bool(ops.linear(wide[:, :33], weight).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_the_batch(ops, linear_isa, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w, norm = random(210, 600, dtype=dtype), random(100, 600, dtype=dtype, seed=1), random(600, dtype=dtype, seed=2)
        packed = ops.pack(w)
        calls = [
            lambda x: ops.linear(x, packed),
            lambda x: ops.linear(x, w),
            lambda x: ops.rms_norm(x, norm, 1e-5),
            lambda x: ops.fused_add_rms_norm(x, x.float() * 2, norm, 1e-5)[0],
            lambda x: ops.layer_norm(x, norm, norm, 1e-5),
            ops.silu_and_mul,
            lambda x: ops.gelu_and_mul(x, "none"),
            lambda x: ops.activation(x, "gelu_tanh"),
        ]
        for call in calls:
            whole = call(x)
            for rows in (1, 2, 3, 5, 12, 13, 31, 96, 97, 209):
                assert torch.equal(call(x[:rows].contiguous()), whole[:rows])
                assert torch.equal(call(x[210 - rows :]), whole[210 - rows :])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (5, 1), (4, 77), (2, 3, 80), (0, 16), (300, 128)])
def test_norms(ops, isa, dtype, shape):
    x, residual, size = random(*shape, dtype=dtype), random(*shape, dtype=torch.float32, seed=3), shape[-1]
    for w in (random(size, dtype=dtype, seed=1), random(size, dtype=torch.float32, seed=1)):
        assert_near(ops.rms_norm(x, w, 1e-6), reference.rms_norm(x.double(), w.double(), 1e-6), dtype)
        normed, total = ops.fused_add_rms_norm(x, residual, w, 1e-6)
        assert torch.equal(total, x + residual)
        assert_near(normed, reference.rms_norm(total.double(), w.double(), 1e-6), dtype)
        if size > 1:
            for bias in (None, random(size, dtype=w.dtype, seed=2)):
                want = reference.layer_norm(x.double(), w.double(), None if bias is None else bias.double(), 1e-5)
                assert_near(ops.layer_norm(x, w, bias, 1e-5), want, dtype)


def test_rms_norm_of_heads_inside_a_wider_tensor(ops):
    qkv = random(7, 15, 64, dtype=torch.bfloat16)
    w = random(64, dtype=torch.bfloat16, seed=1)
    for x in (qkv[:, :9], qkv[:, 9:12], qkv[2:3, 12:]):
        assert_near(ops.rms_norm(x, w, 1e-6), reference.rms_norm(x.double(), w.double(), 1e-6), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (80, 20), (128, 64), (96, 96), (36, 6), (8, 2)])
def test_rotary(ops, isa, dtype, interleaved, head_dim, rot):
    qkv, table = random(5, 6, head_dim, dtype=dtype), random(40, 2, rot // 2, dtype=torch.float32, seed=1)
    positions = torch.tensor([0, 39, 7, 7, 21], dtype=torch.int32)
    for x in (qkv, qkv[:, 1:4], qkv[:, :, :].transpose(0, 1).contiguous().transpose(0, 1)):
        got = ops.rotary(x, positions, table, interleaved)
        assert_near(got, reference.rotary(x.double(), positions, table, interleaved), dtype)
        assert torch.equal(got[..., rot:], x[..., rot:])


def test_rotary_refuses_a_position_outside_the_table(ops):
    x, table = random(1, 1, 8, dtype=torch.float32), random(4, 2, 4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="position 4 is outside the table of 4"):
        ops.rotary(x, torch.tensor([4], dtype=torch.int32), table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 17), (40, 1536), (0, 4), (2, 100)])
def test_activations(ops, isa, dtype, rows, size):
    x = random(rows, 2 * size, dtype=dtype) * 4
    assert_near(ops.silu_and_mul(x), reference.silu_and_mul(x.double()), dtype)
    for approximate in ("tanh", "none"):
        assert_near(ops.gelu_and_mul(x, approximate), reference.gelu_and_mul(x.double(), approximate), dtype)
    for kind in ("relu", "gelu", "gelu_tanh", "silu"):
        assert_near(ops.activation(x, kind), reference.activation(x.double(), kind), dtype)


def test_activations_at_their_ends(ops, isa):
    x = torch.tensor([[-1e4, -100.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 100.0, 1e4, float("nan")]])
    for kind in ("relu", "gelu", "gelu_tanh", "silu"):
        got, want = ops.activation(x, kind), reference.activation(x.double(), kind)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)
    with pytest.raises(ValueError, match="known are relu"):
        ops.activation(x, "swish")


def test_every_instruction_set_agrees(ops):
    from oarlock_cpu import native

    x, w, before, results = random(9, 320, dtype=torch.float32), random(70, 320, dtype=torch.float32, seed=1), native.isa(), {}
    for name in ("generic", "avx2", "avx512"):
        if torch.ops.oarlock_cpu.set_isa(name):
            results[name] = ops.linear(x, ops.pack(w))
    torch.ops.oarlock_cpu.set_isa(before)
    for got in results.values():
        torch.testing.assert_close(got, results["generic"], rtol=1e-4, atol=1e-4)
    assert not torch.ops.oarlock_cpu.set_isa("sse9")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "k", "hidden", "size"), [(1, 4, 2, 32, 48), (37, 8, 2, 64, 33), (200, 3, 3, 48, 16), (5, 60, 4, 16, 16), (0, 2, 1, 16, 16)])
def test_experts(ops, linear_isa, dtype, tokens, experts, k, hidden, size):
    from oarlock.conformance.references import moe

    from oarlock_cpu import experts as experts_ops

    x, w13, w2 = random(tokens, hidden, dtype=dtype), random(experts, 2 * size, hidden, dtype=dtype, seed=1), random(experts, hidden, size, dtype=dtype, seed=2)
    w13, w2 = (w13 / hidden**0.5).to(dtype), (w2 / size**0.5).to(dtype)
    weights, ids = moe.moe_topk(random(tokens, experts, dtype=torch.float32, seed=3), k, True)
    valid = torch.arange(tokens) % 5 != 3
    x[~valid] = float("nan")
    packed = [experts_ops.pack(w) for w in (w13, w2)]
    got = experts_ops.moe_experts(x, *packed, weights, ids, valid)
    assert not got[~valid].any()
    if not tokens:
        assert got.shape == x.shape
        return
    want = moe.moe_experts(x.double(), w13.double(), w2.double(), weights, ids, valid)
    error = float((got.double() - want).square().sum() / want.square().sum())
    assert error < (1e-4 if dtype == torch.bfloat16 else 1e-11), error
    for rows in {1, tokens // 2, tokens} - {0}:
        assert torch.equal(experts_ops.moe_experts(x[:rows], *packed, weights[:rows], ids[:rows], valid[:rows]), got[:rows])


@pytest.mark.parametrize("case", [{"group": 16}, {"group": 16, "zeros": 1}, {}, {"group": 16, "order": 1}], ids=str)
@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_of_codes(ops, linear_isa, dtype, scheme, case):
    from oarlock.conformance.references import moe, schemes, weight_of

    from oarlock_cpu import experts as experts_ops

    generator, name = torch.Generator().manual_seed(4), f"moe_experts_{scheme}"
    hidden, size = (64, 48) if case else (33, 17)
    x = random(50, hidden, dtype=dtype)
    w13, w2 = weight_of(scheme, (5, 2 * size, hidden), case, generator), weight_of(scheme, (5, hidden, size), case, generator)
    weights, ids = moe.moe_topk(random(50, 5, dtype=torch.float32, seed=3), 2, True)
    valid = torch.arange(50) % 5 != 3
    packed = [getattr(experts_ops, f"pack_{scheme}")(w) for w in (w13, w2)]
    assert all(isinstance(w, experts_ops.PackedExperts) != ("order" in case) for w in packed)
    got = getattr(experts_ops, name)(x, *packed, weights, ids, valid)
    want = getattr(schemes, name)(x.double(), w13, w2, weights, ids, valid)
    in_bytes = linear_isa in ("avx512_vnni", "avx512_fp16")  # rows, of both products
    assert float((got.double() - want).square().sum() / want.square().sum()) < ((2e-4 if in_bytes else 1e-4) if dtype == torch.bfloat16 else 1e-11)
    assert torch.equal(getattr(experts_ops, name)(x[:7], *packed, weights[:7], ids[:7], valid[:7]), got[:7]) or "order" in case


def test_a_width_that_panels_hide_is_refused(ops):
    for call in (ops.linear, ops.lm_head):
        with pytest.raises(RuntimeError, match=r"x \[num_tokens, 40\] does not fit a weight of \[5, 33\]"):
            call(torch.zeros(2, 40), ops.pack(torch.zeros(5, 33)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_columns_give_zeros(ops, linear_isa, dtype):
    ops.linear(torch.ones(20, 64, dtype=dtype), ops.pack(torch.ones(40, 64, dtype=dtype)))  # leaves numbers in buffers
    for rows in (2, 20):
        assert not ops.linear(torch.zeros(rows, 0, dtype=dtype), ops.pack(torch.zeros(40, 0, dtype=dtype))).any()


@pytest.mark.parametrize(("weight", "x"), [(126, -100), (-60, 126), (-120, 100), (0, -130), (126, -126)])
def test_powers_of_two_at_the_ends_of_bfloat16(ops, linear_isa, weight, x):
    w, rows = torch.full((32, 64), 2.0**weight).bfloat16(), torch.full((3, 64), 2.0**x).bfloat16()
    assert torch.equal(ops.lm_head(rows, ops.pack(w)), torch.full((3, 32), 64 * 2.0 ** (weight + x)))


def test_a_thread_that_cannot_be_started_leaves_the_team_usable():
    script = """
import os, resource, torch
from oarlock_cpu import ops, native
assert not native.problem()
x, p = torch.randn(64, 512).bfloat16(), ops.pack(torch.randn(512, 512).bfloat16())
torch.set_num_threads(1)
ops.linear(x, p)
pages, (soft, hard) = int(open("/proc/self/statm").read().split()[0]) * 4096, resource.getrlimit(resource.RLIMIT_AS)
torch.set_num_threads(4)
resource.setrlimit(resource.RLIMIT_AS, (pages + (2 << 20), hard))
try:
    ops.linear(x, p)
    raise SystemExit("a thread was started")
except RuntimeError:
    pass
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
before = len(os.listdir("/proc/self/task"))
ops.linear(x, p)
assert len(os.listdir("/proc/self/task")) > before
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_experts_refuse_an_unknown_expert(ops):
    from oarlock_cpu import experts

    x, w13, w2 = torch.ones(1, 16), experts.pack(torch.ones(2, 32, 16)), experts.pack(torch.ones(2, 16, 16))
    with pytest.raises(RuntimeError, match="expert 2 of 2"):
        experts.moe_experts(x, w13, w2, torch.ones(1, 1), torch.full((1, 1), 2, dtype=torch.int32), torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_heads_weight_is_looked_up_exactly(ops, linear_isa, dtype):
    table = random(77, 83, dtype=dtype)
    table[3, 5], table[40, 0], table[41, 1] = float("nan"), float("inf"), 2**-20
    ids = torch.tensor([0, 76, 3, 40, 41, 33, 33], dtype=torch.int32)
    got = ops.embedding(ids, ops.share(ops.pack(table)))
    assert got.dtype == dtype
    assert torch.equal(got.nan_to_num(nan=9.0), table[ids].nan_to_num(nan=9.0))
    assert torch.equal(ops.embedding(ids, table).nan_to_num(nan=9.0), table[ids].nan_to_num(nan=9.0))
    with pytest.raises(RuntimeError, match="id 77 of 77"):
        ops.embedding(torch.tensor([77]), ops.pack(table))
