"""What serves each operation on the device, beside what limits it: bandwidth, torch's own kernels, FlashInfer.

Owns: the shapes (Llama-3-8B's) and what is compared with what.
Reads: the op registry and the attention that core would choose, through the kit's `Subject`.
Never: judges (`gpu_figures` does).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu_figures import bandwidth_share, causal_attention_flops, decode_attention_bytes, judged, plain
from gpu_results import Results
from gpu_timing import copies_for, seconds_of
from oarlock.backend_api.runtime import Attention, AttentionParams, Ops, registry
from oarlock.backend_api.runtime.ops import resolve
from oarlock.conformance.ops_level import arrange
from oarlock.conformance.subject import Subject
from oarlock.errors import PluginError
from oarlock.plugins import collect
from oarlock.runtime.choice import choose_ops

FULL: dict[str, Any] = {
    "copy_bytes": 1 << 30, "matrix": 8192, "dtype": "bfloat16", "heads": 32, "kv_heads": 8, "head_dim": 128,
    "decode": ((16, 2048), (64, 2048), (16, 8192), (1, 32768)), "prefill": 4096, "hidden": 4096, "size": 14336, "tokens": 8192,
    "linear": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), "fp8_tokens": (1, 64, 4096),
    "descriptor_tokens": (512, 4096),
}  # fmt: skip
TINY: dict[str, Any] = {
    **FULL, "copy_bytes": 1 << 16, "matrix": 64, "dtype": "float32", "heads": 4, "kv_heads": 2, "head_dim": 64, "decode": ((2, 48),), "prefill": 32,
    "hidden": 64, "size": 128, "tokens": 8, "linear": ((64, 128),), "fp8_tokens": (1,),
    "descriptor_tokens": (256,),
}  # fmt: skip
DESCRIPTORS = ("linear_w8a8_fp8", "linear_w8a8")  # what --triton-descriptors changes
ELEMENTWISE = ("rms_norm", "fused_add_rms_norm", "layer_norm", "rotary", "silu_and_mul", "gelu_and_mul")


class Bench:
    """The device, its measured limits, and inputs on it."""

    def __init__(self, subject: Subject, results: Results, is_tiny: bool) -> None:
        self.subject, self.results, self.is_tiny = subject, results, is_tiny
        self.sizes = TINY if is_tiny else FULL
        self.device = subject.device.torch_device
        self.dtype: torch.dtype = getattr(torch, self.sizes["dtype"])

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def limit(self, name: str) -> float:
        """A figure that is there."""
        return float(self.results.data["figures"][name]["value"])

    @property
    def copy_rate(self) -> float:
        return self.limit("copy bandwidth") * 1e9

    def served_by(self, op: str) -> str:
        return next(name for known, name, _ in self.subject.ops(self.sizes["dtype"]).table if known == op)


def run(results: Results, subject: Subject, is_tiny: bool) -> bool:
    """Whether every figure is there."""
    bench = Bench(subject, results, is_tiny)
    sizes, done = bench.sizes, []
    figures: list[tuple[str, Callable[[], dict[str, Any]]]] = [("copy bandwidth", partial(copy_rate, bench)), ("matrix rate", partial(matrix_rate, bench))]
    figures += [(f"decode attention, {rows} x {context}", partial(decode, bench, rows, context, "")) for rows, context in sizes["decode"]]
    figures += [(f"prefill attention, {sizes['prefill']} causal", partial(prefill, bench))]
    figures += [(f"{op}, {sizes['tokens']} tokens", partial(elementwise, bench, op)) for op in ELEMENTWISE]
    figures += [(f"int4 linear, 1 x {k} -> {n}", partial(int4, bench, n, k)) for n, k in sizes["linear"]]
    figures += [(f"fp8 linear, {m} x {k} -> {n}", partial(fp8, bench, m, n, k)) for m in sizes["fp8_tokens"] for n, k in sizes["linear"][-2:]]
    for op, (n, k) in ((op, shape) for op in DESCRIPTORS for shape in sizes["linear"][-2:]):
        figures += [(f"{op} by descriptors, {m} x {k} -> {n}", partial(by_descriptors, bench, op, m, n, k)) for m in sizes["descriptor_tokens"]]
    figures += [(f"flashinfer, decode attention, {rows} x {context}", partial(flashinfer, bench, rows, context)) for rows, context in sizes["decode"]]
    for name, make in figures:
        with subject.session():
            done.append(results.measure(name, make))
        if device_memory_is_cached(bench.device):
            torch.cuda.empty_cache()
    return all(done)


def device_memory_is_cached(device: torch.device) -> bool:
    return device.type == "cuda"


# ---------------------------------------------------------------- limits
def copy_rate(bench: Bench) -> dict[str, Any]:
    """Bytes read and written by a copy of a large tensor."""
    size = bench.sizes["copy_bytes"]
    source, target = (torch.zeros(size // 4, device=bench.device) for _ in range(2))
    return plain(2 * size / seconds_of([lambda: target.copy_(source)], bench.device) / 1e9, "GB/s", bytes=size)


def matrix_rate(bench: Bench) -> dict[str, Any]:
    """A square product in the model's dtype."""
    size = bench.sizes["matrix"]
    a, b = bench.randn(size, size), bench.randn(size, size)
    return plain(2 * size**3 / seconds_of([lambda: a @ b], bench.device) / 1e12, "TFLOP/s", size=size, dtype=bench.sizes["dtype"])


# ---------------------------------------------------------------- attention
def _params(bench: Bench) -> AttentionParams:
    s = bench.sizes
    return AttentionParams(s["heads"], s["kv_heads"], s["head_dim"], s["head_dim"] ** -0.5)


def _chosen(bench: Bench, name: str) -> tuple[Attention, str]:
    """(attention, its name): what core would choose, or the plugin's of this name."""
    params, dtype = _params(bench), bench.sizes["dtype"]
    size = bench.subject.device.capabilities.block_sizes[0]
    if not name:
        made = bench.subject.attention(params, dtype, size)
        return made, bench.subject.attention_served[dtype]
    for spec in collect(bench.subject.plugins, "attention", device=bench.subject.device):
        facts = {"kind": "full", "dtype": dtype, "block_size": size, "window": None, "softcap": None}
        support = spec.supports(**facts, head_dim=params.head_dim, num_heads=params.num_heads, num_kv_heads=params.num_kv_heads)
        if spec.name == name and not support.ok:
            raise LookupError("; ".join(support.reasons))
        if spec.name == name:
            return resolve(spec.factory)(size, bench.dtype, params), name
    raise LookupError(f"no plugin offers {name} on this device")


def _decode_call(bench: Bench, attention: Attention, rows: int, context: int) -> list[Callable[[], Any]]:
    """One layer's attention of `rows` rows, over as many caches as a cold run takes; blocks lie in random order."""
    params, size = attention.params, attention.block_size
    width = -(-context // size)
    shapes = attention.kv_layout(rows * width + 1)
    calls: list[Callable[[], Any]] = []
    for _ in range(copies_for(sum(torch.Size(shape).numel() for shape in shapes) * bench.dtype.itemsize, bench.is_tiny)):
        cache = tuple(bench.randn(*shape) for shape in shapes)
        tables = (torch.randperm(rows * width, device=bench.device, dtype=torch.int32) + 1).view(rows, width)
        lens = torch.full((rows,), context, device=bench.device, dtype=torch.int32)
        starts = torch.arange(rows + 1, device=bench.device, dtype=torch.int32)
        query = bench.randn(rows, params.num_heads, params.head_dim)
        calls.append(partial(attention.attend, query, cache, attention.metadata(tables, lens, starts, 1, rows), params))
    return calls


def decode(bench: Bench, rows: int, context: int, name: str) -> dict[str, Any]:
    attention, served = _chosen(bench, name)
    p = attention.params
    seconds = seconds_of(_decode_call(bench, attention, rows, context), bench.device)
    share = bandwidth_share(decode_attention_bytes(rows, context, p.num_heads, p.num_kv_heads, p.head_dim, bench.dtype.itemsize), seconds, bench.copy_rate)
    if rows < 16:
        return plain(seconds * 1e6, "us", served_by=served, share=share, of="the copy bandwidth")
    return judged("decode attention", seconds * 1e6, "us", share, served_by=served)


def flashinfer(bench: Bench, rows: int, context: int) -> dict[str, Any]:
    """The plugin's, beside ours. Where it is not there, that is said."""
    try:
        found = decode(bench, rows, context, "flashinfer")
    except LookupError as missing:
        return {"status": "unavailable", "reason": str(missing)}
    return {name: value for name, value in found.items() if name not in ("target", "met", "group")}


def prefill(bench: Bench) -> dict[str, Any]:
    """One prompt, causal, beside the fastest of torch's backends on contiguous tensors."""
    attention, served = _chosen(bench, "")
    p, tokens, size = attention.params, bench.sizes["prefill"], attention.block_size
    width = -(-tokens // size)
    cache = tuple(bench.randn(*shape) for shape in attention.kv_layout(width + 1))
    tables = torch.arange(1, width + 1, device=bench.device, dtype=torch.int32)[None]
    ends = torch.tensor([0, tokens], device=bench.device, dtype=torch.int32)
    query = bench.randn(tokens, p.num_heads, p.head_dim)
    metadata = attention.metadata(tables, ends[1:], ends, tokens, tokens)
    ours = seconds_of([lambda: attention.attend(query, cache, metadata, p)], bench.device)
    best, backend = _best_sdpa(bench, tokens)
    rate = causal_attention_flops(tokens, p.num_heads, p.head_dim) / ours / 1e12
    return judged("prefill attention", rate, "TFLOP/s", best / ours, served_by=served, sdpa_s=best, sdpa_backend=backend, ours_s=ours)


def _best_sdpa(bench: Bench, tokens: int) -> tuple[float, str]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    s = bench.sizes
    q, k, v = (bench.randn(1, heads, tokens, s["head_dim"]) for heads in (s["heads"], s["kv_heads"], s["kv_heads"]))
    found, refused = [], []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        if backend is SDPBackend.MATH and found:
            break
        try:
            with sdpa_kernel(backend):
                attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
                found.append((seconds_of([attend], bench.device), backend.name))
        except RuntimeError as error:
            refused.append(f"{backend.name}: {error}")
    if not found:
        raise RuntimeError(f"no backend of SDPA runs: {refused}")
    return min(found)


# ---------------------------------------------------------------- ops
def _op_calls(bench: Bench, op_name: str, case: dict[str, Any], ops: Ops | None = None) -> tuple[list[Callable[[], Any]], int]:
    """(calls of an op on inputs of this case, on as many sets of data as a cold run takes; bytes that one call moves)"""
    op, subject, dtype = registry()[op_name], bench.subject, bench.sizes["dtype"]
    assert op.generate is not None and op.cost is not None
    ops = subject.ops(dtype) if ops is None else ops
    args, kwargs = op.generate(case, bench.dtype, torch.Generator().manual_seed(1))
    _, moved = op.cost(*args, **kwargs)
    packed, calls = subject.upload(torch.zeros(1, dtype=torch.int32)), []
    for _ in range(copies_for(moved, bench.is_tiny)):
        weights, written, inputs, program = arrange(op, args, kwargs, getattr(ops, op_name), ops.prepare.get(op_name), subject, lambda _, leaf: subject.upload(leaf))
        calls.append(partial(program, weights, written, {}, packed, inputs))
    return calls, moved


def elementwise(bench: Bench, op: str) -> dict[str, Any]:
    s = bench.sizes
    case = {"tokens": s["tokens"], "hidden": s["hidden"], "heads": s["heads"], "head_dim": s["head_dim"], "size": s["size"], "approximate": "tanh"}
    case = {name: value for name, value in case.items() if name in registry()[op].cases[0]}
    calls, moved = _op_calls(bench, op, case)
    seconds = seconds_of(calls, bench.device)
    return judged("elementwise", seconds * 1e6, "us", bandwidth_share(moved, seconds, bench.copy_rate), served_by=bench.served_by(op))


def int4(bench: Bench, n: int, k: int) -> dict[str, Any]:
    group = min(128, k)
    calls, moved = _op_calls(bench, "linear_int4", {"tokens": 1, "k": k, "n": n, "group": group})
    seconds = seconds_of(calls, bench.device)
    share = bandwidth_share(moved, seconds, bench.copy_rate)
    return judged("int4 linear", seconds * 1e6, "us", share, served_by=bench.served_by("linear_int4"), group_size=group)


def fp8(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    """Ours quantises its activations on the way; torch's is given them quantised."""
    calls, _ = _op_calls(bench, "linear_w8a8_fp8", {"tokens": m, "k": k, "n": n})
    ours = seconds_of(calls, bench.device)
    rows = max(m, 16)  # cuBLAS takes multiples of 16
    a, b = (bench.randn(size, k).to(torch.float8_e4m3fn) for size in (rows, n))
    one = torch.ones((), device=bench.device)
    out = torch.bfloat16
    theirs = seconds_of([lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out)], bench.device)
    return judged("fp8 linear", ours * 1e6, "us", theirs / ours, served_by=bench.served_by("linear_w8a8_fp8"), scaled_mm_s=theirs)


def by_descriptors(bench: Bench, op: str, m: int, n: int, k: int) -> dict[str, Any]:
    """The same product both ways in one run, and the share of the speed that `--triton-descriptors` gives. Above 1 on all, it is to be the default."""
    device, dtype, case = bench.subject.device, bench.sizes["dtype"], {"tokens": m, "k": k, "n": n}
    plain_calls, _ = _op_calls(bench, op, case)
    try:
        with mock.patch.dict(device.options, {"triton_descriptors": True}):
            ops = choose_ops(collect(bench.subject.plugins, "kernels", device=device), device, dtype)
        calls, _ = _op_calls(bench, op, case, ops)
    except (PluginError, RuntimeError) as refused:  # no Triton, or a chip without descriptors
        return {"status": "unavailable", "reason": str(refused)}
    served = next(name for known, name, _ in ops.table if known == op)
    ours, theirs = (seconds_of(each, bench.device) for each in (calls, plain_calls))
    more = {"share": theirs / ours, "of": "the speed without", "without_us": theirs * 1e6, "served_without_by": bench.served_by(op)}
    return plain(ours * 1e6, "us", served_by=served, **more)
