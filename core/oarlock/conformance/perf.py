"""How fast a device is: each op at serving shapes, steps of a small model, launches, start-up. Measures; passes and fails nothing.

Owns: what is measured, and how long.
Reads: the op registry, `subject`, `ops_level.arrange`, `driver`.
Never: judges; compares across machines (a baseline is of the same one).
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from oarlock.backend_api.runtime import AttentionParams, Op, registry
from oarlock.config.sections import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from oarlock.conformance.driver import Driver
from oarlock.conformance.ops_level import arrange
from oarlock.conformance.perf_report import Figure, PerfReport
from oarlock.conformance.subject import DTYPES, Subject
from oarlock.conformance.tiny_models import MODELS, TinyModel
from oarlock.device_choice import Selection
from oarlock.runtime.worker import Worker
from oarlock.sampling_params import SamplingParams

MEASURE_S, CALLS, BATCHES = 0.06, 200, 3  # one figure: the best of three batches of calls, each about so long
COPY_BYTES = 128 << 20
SIZES = {"hidden": 2048, "size": 5632, "vocab": 32000, "heads": 16, "head_dim": 128, "width": 128, "history": 512}
EXPERTS = {"hidden": 1024, "size": 512, "experts": 8}  # of a mixture; the whole of it must fit a small device
COUNTS = {"tokens": (1, 16, 256), "rows": (1, 32)}
MODEL = {
    **MODELS["dense"], "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1408, "vocab_size": 2048, "max_position_embeddings": 512,
}  # fmt: skip


def run(
    selection: Selection, ops: tuple[str, ...] = (), pattern: str = "", on_figure: Callable[[Figure], None] = lambda _: None
) -> PerfReport:
    """Measure one device. With `ops` or `pattern` only what matches, and the peak that shares are taken of."""
    subject = Subject.open(selection)
    report = PerfReport(subject.spec.name, subject.device.describe(), torch.__version__)
    try:
        dtypes = subject.device.capabilities.fast_dtypes or subject.dtypes
        _peaks(subject, report, dtypes)
        for figure in _figures(subject, dtypes, ops, re.compile(pattern)):
            report.figures.append(figure)
            on_figure(figure)
        _peaks(subject, report, dtypes)  # again: whatever else the machine did the first time
    finally:
        subject.close()
    return report


def _figures(subject: Subject, dtypes: tuple[str, ...], ops: tuple[str, ...], pattern: re.Pattern[str]) -> Iterator[Figure]:
    for name, op in sorted(registry().items()):
        if op.generate is None or op.cost is None or (ops and name not in ops):
            continue
        for dtype in op.tolerance:
            if dtype in dtypes or len(op.tolerance) == 1:
                for shape in _shapes(op):
                    text = f"{name}[{dtype},{','.join(f'{k}={v}' for k, v in shape.items())}]"
                    if pattern.search(text):
                        yield _op(subject, op, dtype, shape, text)
    if not ops or "paged_attention" in ops:
        for dtype in dtypes:
            for rows, new, context in ((1, 1, 1024), (16, 1, 1024), (1, 256, 256), (1, 256, 1024)):
                text = f"paged_attention[{dtype},rows={rows},new={new},context={context}]"
                if pattern.search(text):
                    yield _attention(subject, dtype, rows, new, context, text)
    if not ops:
        yield from (figure for figure in (*_launches(subject), *_steps(subject, dtypes[0])) if pattern.search(figure.id))


# ---------------------------------------------------------------- timing


def seconds_of(subject: Subject, call: Callable[[], Any]) -> float:
    """Seconds of one call: of calls launched one after another and waited for together, the best of a few batches."""

    def batch(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            call()
        subject.device.synchronise()
        return (time.perf_counter() - started) / count

    with subject.session():
        batch(1)  # libraries choose their kernels
        once = batch(1)
        if once > MEASURE_S * BATCHES:
            return once
        count = max(1, min(CALLS, int(MEASURE_S / max(once, 1e-7))))
        return min(batch(count) for _ in range(BATCHES))


def _peaks(subject: Subject, report: PerfReport, dtypes: tuple[str, ...]) -> None:
    for dtype in dtypes:
        report.peaks[dtype] = max(report.peaks.get(dtype, 0.0), _matmul_rate(subject, dtype))
    report.bandwidth = max(report.bandwidth, _copy_rate(subject))


def _matmul_rate(subject: Subject, dtype: str) -> float:
    """The largest rate of a square matrix product, in FLOP/s; larger ones are tried while they take no time."""
    best, size = 0.0, 512
    while size <= 8192:
        host = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
        a, b = subject.upload(host), subject.upload(host)
        seconds = seconds_of(subject, lambda a=a, b=b: a @ b)
        best = max(best, 2 * size**3 / seconds)
        if seconds > 0.02:
            break
        size *= 2
    return best


def _copy_rate(subject: Subject) -> float:
    """Bytes read and written by a copy of a large tensor, a second; into memory that is there already where the device can."""
    large = subject.upload(torch.zeros(COPY_BYTES // 4))
    if subject.device.capabilities.kv_update == "functional":
        return 2 * COPY_BYTES / seconds_of(subject, large.clone)
    target = subject.upload(torch.ones(COPY_BYTES // 4))
    return 2 * COPY_BYTES / seconds_of(subject, lambda: target.copy_(large))


# ---------------------------------------------------------------- ops


def _shapes(op: Op) -> Iterator[dict[str, Any]]:
    """The largest plain case of the op, with the sizes of a served model, for a few numbers of tokens or rows."""
    plain = [
        case for case in op.cases if not any(isinstance(v, str) and k in ("fill", "special", "routing", "weight") for k, v in case.items())
    ]
    variants: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in plain:  # static arguments make variants: each activation, each mode
        key = tuple(v for v in case.values() if isinstance(v, str))
        if sum(v for v in case.values() if isinstance(v, int)) >= sum(v for v in variants.get(key, {}).values() if isinstance(v, int)):
            variants[key] = case
    for case in variants.values():
        sizes = EXPERTS if "experts" in case and "hidden" in case else {**SIZES, **({"k": 2048, "n": 5632} if "n" in case else {})}
        count = next((name for name in COUNTS if name in case), "")
        for number in COUNTS.get(count, (0,)):
            yield {**case, **{k: v for k, v in sizes.items() if k in case}, **({count: number} if count else {})}


def _op(subject: Subject, op: Op, dtype: str, shape: dict[str, Any], text: str) -> Figure:
    assert op.generate is not None and op.cost is not None
    args, kwargs = op.generate(shape, DTYPES[dtype], torch.Generator().manual_seed(1))
    ops = subject.ops(dtype if dtype in subject.dtypes else subject.dtypes[0])
    implementation, prepare = getattr(ops, op.name), ops.prepare.get(op.name)
    weights, written, inputs, program = arrange(op, args, kwargs, implementation, prepare, subject, lambda _, leaf: subject.upload(leaf))
    flops, moved = op.cost(*args, **kwargs)
    served = next(name for known, name, _ in ops.table if known == op.name)
    return Figure(text, _timed(subject, program, text, weights, written, inputs), flops, moved, dtype, served)


def _timed(
    subject: Subject, program: Any, tag: str, weights: Any, written: dict[str, Any], inputs: dict[str, Any], packed: Any = None
) -> float:
    """Seconds of a program; state that it replaces is handed to the next call, as a worker does."""
    packed = subject.upload(torch.zeros(1, dtype=torch.int32)) if packed is None else packed
    state = {"now": written}
    with subject.session():
        compiled = subject.runner.compile(program, (weights, _copied(written), {}, packed, inputs), tag)

        def call() -> Any:
            new, out = compiled(weights, state["now"], {}, packed, inputs)
            subject.runner.retire(state["now"], new)
            state["now"] = {**state["now"], **new}
            return out

        return seconds_of(subject, call)


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {k: _copied(v) for k, v in state.items()} if isinstance(state, dict) else type(state)(_copied(v) for v in state)


def _attention(subject: Subject, dtype: str, rows: int, new: int, context: int, text: str) -> Figure:
    """`new` tokens of each row over `context` tokens: KV write and attention of one layer, metadata included."""
    params = AttentionParams(16, 8, 128, 128**-0.5)
    size = subject.device.capabilities.block_sizes[0]
    attention, width, tokens = subject.attention(params, dtype, size), -(-context // size), rows * new
    random = torch.Generator().manual_seed(1)
    cache = tuple(subject.upload(torch.zeros(shape, dtype=DTYPES[dtype])) for shape in attention.kv_layout(rows * width + 1))
    tables = torch.arange(1, rows * width + 1, dtype=torch.int32)
    at = (
        (context - new + torch.arange(new, dtype=torch.int32)).repeat(rows)
        + size
        + torch.arange(rows, dtype=torch.int32).repeat_interleave(new) * width * size
    )
    packed = torch.cat((at, tables, torch.full((rows,), context, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32) * new))
    shapes = {"query": params.num_heads, "key": params.num_kv_heads, "value": params.num_kv_heads}
    inputs = {
        name: subject.upload(torch.randn(tokens, heads, params.head_dim, generator=random).to(DTYPES[dtype]))
        for name, heads in shapes.items()
    }

    def program(
        weights: Any, written: dict[str, Any], read: Any, packed: torch.Tensor, i: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        slots, table, lens, start = packed.split([tokens, rows * width, rows, rows + 1])
        kv = attention.write_kv(written["kv"], i["key"], i["value"], slots)
        meta = attention.metadata(table.reshape(rows, width), lens, start, new, tokens)
        return {"kv": kv}, {"out": attention.attend(i["query"], kv, meta, params)}

    pairs = rows * sum(context - new + n + 1 for n in range(new))
    item = DTYPES[dtype].itemsize
    moved = item * (2 * rows * context * params.num_kv_heads * params.head_dim + 2 * tokens * params.num_heads * params.head_dim)
    seconds = _timed(subject, program, text, {}, {"kv": cache}, inputs, subject.upload(packed))
    return Figure(text, seconds, 4 * pairs * params.num_heads * params.head_dim, moved, dtype, subject.attention_served[dtype])


# ---------------------------------------------------------------- launches, steps, start-up


def _launches(subject: Subject) -> Iterator[Figure]:
    """A program of one addition: launched again and again, and launched and read."""
    one = {"x": subject.upload(torch.ones(1))}

    def program(weights: Any, written: Any, read: Any, packed: Any, i: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"y": i["x"] + 1}

    yield Figure("launch[one after another]", _timed(subject, program, "perf-launch", {}, {}, one))
    packed = subject.upload(torch.zeros(1, dtype=torch.int32))
    with subject.session():
        compiled = subject.runner.compile(program, ({}, {}, {}, packed, one), "perf-read")
    yield Figure("launch[and read]", seconds_of(subject, lambda: subject.device.to_host(compiled({}, {}, {}, packed, one)[1]["y"])))
    host = torch.zeros(4096, dtype=torch.int32)
    yield Figure("copy[16 KiB to the device]", seconds_of(subject, lambda: subject.device.to_device(host)))


def _steps(subject: Subject, dtype: str) -> Iterator[Figure]:
    """Loading, warm-up and whole steps, sampling and the read included, of a model of four layers."""
    with tempfile.TemporaryDirectory(prefix="oarlock-perf-") as folder:
        tiny = TinyModel("dense", Path(folder), MODEL)
        model = ModelConfig(model=folder, dtype=dtype, generation_config="none", skip_tokenizer_init=True)
        cache = CacheConfig(
            num_blocks_override=1 + 16 * -(-MODEL["max_position_embeddings"] // subject.device.capabilities.block_sizes[0]),
            swap_space_bytes=0,
        )
        config = EngineConfig(model, cache, SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256))
        started = time.perf_counter()
        worker = Worker(config, tiny.summary, subject.spec.name, subject.spec.factory)
        try:
            worker.prepare()
            ready = worker.load()
            yield Figure(f"start[{dtype},load]", time.perf_counter() - started)
            seconds, programs = worker.start(ready.num_blocks, ready.num_host_blocks, ready.max_model_len)
            yield Figure(f"start[{dtype},warm-up of {programs} programs]", seconds)
            yield from _driven(Driver(worker, ready), dtype, ready.buckets)
        finally:
            worker.close()


def _driven(driver: Driver, dtype: str, buckets: Any) -> Iterator[Figure]:
    """A step for each bucket of decode rows, and of chunk tokens; where shapes are free, for a few sizes."""
    greedy = SamplingParams(temperature=0.0, max_tokens=400)
    for rows in [n for n in buckets.decode_rows if n <= 16] or (1, 4, 16):
        branches = [driver.add((5,) * 64, greedy) for _ in range(rows)]
        for branch in branches:
            driver.step({branch: 64})
        for _ in range(3):
            driver.step(dict.fromkeys(branches, 1))
        yield Figure(f"step[{dtype},decode,rows={rows}]", min(_time(driver, dict.fromkeys(branches, 1)) for _ in range(12)))
        driver.end_all()
    for tokens in [n for n in buckets.chunk_tokens if n <= min(256, buckets.chunk_lens[-1])] or (16, 64, 256):
        found = []
        for _ in range(4):
            found.append(_time(driver, {driver.add((7,) * tokens, greedy): tokens}))
            driver.end_all()
        yield Figure(f"step[{dtype},prompt,tokens={tokens}]", min(found))


def _time(driver: Driver, plan: dict[Any, int]) -> float:
    started = time.perf_counter()
    driver.step(plan)
    return time.perf_counter() - started
