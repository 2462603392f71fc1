"""Level 4: the model runner on the device, with tiny random models, against a whole-sequence forward pass in float64.

Owns: the cases: teacher-forced log-probabilities, greedy and seeded tokens, batches, preemption, swaps, copies, programs.
Reads: `tiny_models`, `driver`, the worker.
Never: runs the scheduler (the next levels do).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from oarlock.backend_api import Support
from oarlock.backend_api.runtime import EagerRunner
from oarlock.config.sections import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from oarlock.conformance import graph_contract
from oarlock.conformance.cases import Case, CheckFailed, Measure
from oarlock.conformance.driver import Branch, Driver
from oarlock.conformance.metrics import judge
from oarlock.conformance.subject import Subject
from oarlock.conformance.tiny_models import MODELS, QUANTISED, VOCAB, TinyModel
from oarlock.executor.base import Pending
from oarlock.executor.multiproc import MultiprocExecutor
from oarlock.messages import ModelRunnerOutput, PositionLogprobs, SchedulerOutput, WorkerReady
from oarlock.plugins import installed
from oarlock.runtime.worker import Worker
from oarlock.sampling_params import SamplingParams

LEVEL = 4
LIMITS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2e-3}
NUM_BLOCKS, HOST_BYTES = 64, 1 << 20
_ALL = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=VOCAB, logprobs=VOCAB)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


class Bench:
    """A model loaded on the device in one dtype, warmed up."""

    def __init__(self, subject: Subject, tiny: TinyModel, dtype: str, kind: type[Worker] = Worker) -> None:
        self.tiny, self.dtype, self.limit = tiny, dtype, subject.limit("logits", dtype, LIMITS[dtype])
        self.worker = kind(engine_config(tiny, dtype), tiny.summary, subject.spec.name, subject.spec.factory)
        self.worker.prepare()
        self.ready = self.worker.load()
        self.worker.start(self.ready.num_blocks, self.ready.num_host_blocks, self.ready.max_model_len)
        self._spoil_cache()
        self.driver = Driver(self.worker, self.ready)

    def _spoil_cache(self) -> None:
        """Fill the cache with NaN: what was never written must not be read, and new memory may hold what an earlier bench left in it."""
        runner = self.worker.runner
        assert runner is not None
        with self.worker.device.context(), torch.no_grad():
            runner.state["kv"] = [tuple(torch.full_like(tensor, torch.nan) for tensor in cache) for cache in runner.state["kv"]]

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def engine_config(tiny: TinyModel, dtype: str) -> EngineConfig:
    model = ModelConfig(model=str(tiny.folder), dtype=dtype, max_logprobs=-1, generation_config="none", skip_tokenizer_init=True)
    cache = CacheConfig(num_blocks_override=NUM_BLOCKS, swap_space_bytes=HOST_BYTES)
    return EngineConfig(model, cache, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))


class Lab:
    """Models and benches of one run, made when first needed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oarlock-conformance-"))
        self.models: dict[str, TinyModel] = {}
        self.benches: dict[tuple[str, str], Bench] = {}

    def bench(self, subject: Subject, name: str, dtype: str) -> Bench:
        if (name, dtype) not in self.benches:
            self.benches[name, dtype] = Bench(subject, self.model(name), dtype)
        return self.benches[name, dtype]

    def model(self, name: str) -> TinyModel:
        if name not in self.models:
            self.models[name] = TinyModel(name, self.folder / name)
        return self.models[name]

    def close(self) -> None:
        for bench in self.benches.values():
            bench.worker.close()
        self.benches.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


Check = Callable[[Bench], Measure | None]


class EagerWorker(Worker):
    """A worker whose programs run as they are, whatever the device would make of them."""

    def _choose_parts(self) -> None:
        super()._choose_parts()
        self.graph = EagerRunner(self.device)


class Ranks:
    """An executor of several ranks, driven as one worker is."""

    def __init__(self, config: EngineConfig, tiny: TinyModel, subject: Subject) -> None:
        self._executor = MultiprocExecutor(config, tiny.summary, subject.spec.name, subject.spec.factory)
        self.close = self._executor.shutdown

    def load(self) -> WorkerReady:
        every = self._executor.load()
        self._executor.start(min(r.num_blocks for r in every), min(r.num_host_blocks for r in every), every[0].max_model_len)
        return every[0]

    def execute(self, out: SchedulerOutput) -> Pending:
        return self._executor.execute(out)

    def read(self, pending: Pending) -> ModelRunnerOutput:
        return pending.result()


# ---- comparing


def _vector(position: PositionLogprobs) -> torch.Tensor:
    """All log-probabilities at one position, by token id."""
    row = torch.full((VOCAB,), torch.nan, dtype=torch.float64)
    for token, value in position.top:
        row[token] = torch.nan if value is None else value
    if bool(row.isnan().any()):
        raise CheckFailed(f"{int(row.isnan().sum())} of {VOCAB} log-probabilities are missing or not finite")
    return row


def _distance(bench: Bench, got: list[torch.Tensor], want: list[torch.Tensor]) -> Measure:
    """NMSE of centred logits; and the mean Kullback-Leibler divergence must keep the same limit."""
    a, b = torch.stack(got), torch.stack(want)
    divergence = float((b.exp() * (b - a)).sum(-1).mean())
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    found = judge(a - b, b, bench.limit, "logits")
    if not divergence <= found.limit:
        raise CheckFailed(f"logits: divergence {divergence:.2g} nats > {found.limit:.2g}", found)
    return found


def _forced(bench: Bench, prompts: list[tuple[int, ...]], plans: list[dict[int, int]]) -> Measure:
    """Compute prompts by `plans` (prompt number -> tokens, one dict a step) and compare all log-probabilities."""
    driver = bench.driver
    branches = [driver.add(prompt, _ALL) for prompt in prompts]
    prompt_rows: dict[int, list[torch.Tensor]] = {b.branch_id: [] for b in branches}
    last: dict[int, torch.Tensor] = {}
    for plan in plans:
        out = driver.step({branches[n]: count for n, count in plan.items()})
        for branch in branches:
            prompt_rows[branch.branch_id] += [_vector(p) for p in out.prompt_logprobs.get(branch.branch_id, ())]
            for position in out.logprobs.get(branch.branch_id, ()):
                last.setdefault(branch.branch_id, _vector(position))
    got, want = [], []
    for branch, prompt in zip(branches, prompts, strict=True):
        rows = [*prompt_rows[branch.branch_id], last[branch.branch_id]]
        if len(rows) != len(prompt):
            raise CheckFailed(f"log-probabilities for {len(rows)} of {len(prompt)} positions")
        got += rows
        want += list(bench.tiny.logprobs(prompt))
    driver.end(*branches)
    return _distance(bench, got, want)


def whole(bench: Bench) -> Measure:
    """A prompt in one chunk."""
    return _forced(bench, [bench.prompt(45, 1)], [{0: 45}])


def chunks(bench: Bench) -> Measure:
    """In chunks of 7, which end inside blocks."""
    return _forced(bench, [bench.prompt(45, 2)], [{0: n} for n in (7, 7, 7, 7, 7, 7, 3)])


def decodes(bench: Bench) -> Measure:
    """A token at a time: the decode region, teacher forced."""
    return _forced(bench, [bench.prompt(40, 3), bench.prompt(37, 4)], [{0: 3}, *({0: 1, 1: 1} for _ in range(37))])


def mixtures(bench: Bench) -> Measure:
    """Four prompts of different lengths, some in chunks while others decode."""
    prompts = [bench.prompt(n, 5 + n) for n in (30, 2, 44, 17)]
    plans = [{0: 28, 1: 1}, {0: 1, 1: 1, 2: 19}, {0: 1, 2: 9, 3: 16}, {2: 15, 3: 1}, {2: 1}]
    return _forced(bench, prompts, plans)


# ---- tokens


def _generate(bench: Bench, branches: list[Branch], count: int) -> None:
    """Prompts in one step each, then `count` tokens of all together."""
    for branch in branches:
        bench.driver.step({branch: len(branch.tokens) - branch.done})
    for _ in range(count - 1):
        bench.driver.step(dict.fromkeys(branches, 1))


def _check_greedy(tiny: TinyModel, branch: Branch, count: int) -> None:
    if len(branch.output) != count:
        raise CheckFailed(f"{len(branch.output)} tokens instead of {count}")
    tiny.check_greedy(branch.tokens[: branch.prompt_len], branch.output)


def greedy(bench: Bench) -> None:
    """Greedy tokens of a batch, past the window of a windowed model."""
    branches = [bench.driver.add(bench.prompt(n, 20 + n), _GREEDY) for n in (5, 16, 33)]
    _generate(bench, branches, 26)
    for branch in branches:
        _check_greedy(bench.tiny, branch, 26)
    bench.driver.end(*branches)


def overlapped(bench: Bench) -> None:
    """Each step is launched before the last one is read: the tokens it goes on from are known to the device alone."""
    driver = bench.driver
    branches = [driver.add(bench.prompt(n, 60 + n), _GREEDY) for n in (4, 15, 30)]
    plans = [*({b: len(b.tokens)} for b in branches), *(dict.fromkeys(branches, 1) for _ in range(17))]
    before = driver.launch(plans[0])
    for plan in plans[1:]:
        after = driver.launch(plan)
        driver.collect(before)
        before = after
    driver.collect(before)
    for branch in branches:
        _check_greedy(bench.tiny, branch, 18)
    driver.end(*branches)


def seeded(bench: Bench) -> None:
    """Seeded sampling with every parameter: the same tokens alone, in a batch, and on another row."""
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1
    )
    prompt = bench.prompt(11, 31)
    alone = bench.driver.add(prompt, params, seed=77)
    _generate(bench, [alone], 16)
    bench.driver.end(alone)
    others = [bench.driver.add(bench.prompt(n, n), params, seed=n) for n in (9, 20)]
    again = bench.driver.add(prompt, params, seed=77)
    other_seed = bench.driver.add(prompt, params, seed=78)
    _generate(bench, [others[0], other_seed, again], 16)
    if again.output != alone.output:
        raise CheckFailed(f"with others the tokens are {again.output}, alone {alone.output}")
    if other_seed.output == alone.output:
        raise CheckFailed("another seed gives the same tokens")
    bench.driver.end(*others, again, other_seed)


def _interrupted(bench: Bench, interrupt: Callable[[Driver, Branch], None]) -> None:
    """Greedy tokens with something done to the branch half-way, while another branch decodes."""
    driver = bench.driver
    branch, other = driver.add(bench.prompt(19, 40), _GREEDY), driver.add(bench.prompt(8, 41), _GREEDY)
    _generate(bench, [branch, other], 9)
    interrupt(driver, branch)
    driver.step({branch: len(branch.tokens) - branch.done, other: 1})
    for _ in range(8):
        driver.step({branch: 1, other: 1})
    for b in (branch, other):
        _check_greedy(bench.tiny, b, 18)
    driver.end(branch, other)


def preempted(bench: Bench) -> None:
    """Blocks given back, everything computed again from prompt and output."""
    _interrupted(bench, lambda driver, branch: driver.end(branch))


def swapped(bench: Bench) -> None:
    """Blocks out to the host tier and back in elsewhere."""
    _interrupted(bench, lambda driver, branch: driver.relocate(branch, via_host=True))


def copied(bench: Bench) -> None:
    """Blocks copied on the device, as branches do on a write."""
    _interrupted(bench, lambda driver, branch: driver.relocate(branch, via_host=False))


def broken_row(bench: Bench) -> None:
    """A row without a finite logit is reported and gives no token; its neighbour's tokens stay right."""
    driver = bench.driver
    broken, healthy = driver.add(bench.prompt(7, 50), _GREEDY), driver.add(bench.prompt(6, 51), _GREEDY)
    _generate(bench, [broken, healthy], 3)
    out = driver.step({broken: 1, healthy: 1}, banned={broken: tuple(range(VOCAB))})
    if list(out.failed) != [broken.branch_id] or broken.branch_id in out.token_ids:
        raise CheckFailed(f"a row whose logits are all -inf gave {out.token_ids.get(broken.branch_id)}, failed rows are {out.failed}")
    driver.end(broken)
    driver.step({healthy: 1})
    _check_greedy(bench.tiny, healthy, 5)
    driver.end(healthy)


def programs(bench: Bench) -> None:
    """After all that, nothing was compiled beyond warm-up, and the cache has the planned size."""
    runner = bench.worker.runner
    assert runner is not None
    if runner.compiles_after_warmup:
        raise CheckFailed(f"{runner.compiles_after_warmup} programs were compiled after warm-up")
    joined = runner.num_tensors // len(runner.state["kv"])  # layers in one tensor
    shapes = runner.model.attentions[0].kv_layout(bench.ready.num_blocks * joined)
    have = [tuple(t.shape) for cache in runner.state["kv"] for t in cache]
    if have != [tuple(s) for _ in runner.state["kv"] for s in shapes]:
        raise CheckFailed(f"the cache has shapes {have}, the plan says {shapes} for {bench.ready.num_blocks} blocks")
    bench.worker.canary()


def as_eager(subject: Subject) -> Measure:
    """Captured or compiled programs give the log-probabilities that the same programs give when they run as they are."""
    found: list[list[torch.Tensor]] = []
    lab = subject.part(Lab)
    bench = lab.bench(subject, "dense", "float32")
    eager = Bench(subject, lab.models["dense"], "float32", EagerWorker)
    try:
        for each in (bench, eager):
            branches = [each.driver.add(each.prompt(n, 70 + n), _ALL) for n in (21, 6)]
            rows = []
            for plan in ({0: 18, 1: 3}, *({0: 1, 1: 1},) * 3):  # the same shapes again: a replay takes the inputs of now
                out = each.driver.step({branches[n]: count for n, count in plan.items()})
                rows += [
                    _vector(p) for b in branches for p in (*out.prompt_logprobs.get(b.branch_id, ()), *out.logprobs.get(b.branch_id, ()))
                ]
            found.append(rows)
            each.driver.end_all()
        return _distance(bench, *found)
    finally:
        eager.worker.close()


def two_ranks(subject: Subject) -> None:
    """Two ranks on this host, layers split between them: the oracle's greedy tokens, in a batch with chunks."""
    lab = subject.part(Lab)
    tiny = lab.model("dense")
    config = replace(engine_config(tiny, "float32"), parallel=ParallelConfig(tensor_parallel_size=2, executor="mp"))
    ranks = Ranks(config, tiny, subject)
    try:
        driver = Driver(ranks, ranks.load())
        branches = [driver.add(tuple((n * k) % VOCAB for k in range(1, n)), _GREEDY) for n in (12, 30)]
        for plan in ((11, 9), (1, 20), *((1, 1),) * 9):
            driver.step(dict(zip(branches, plan, strict=True)))
        for branch, count in zip(branches, (11, 10), strict=True):
            _check_greedy(tiny, branch, count)
    finally:
        ranks.close()


def invariant(subject: Subject) -> None:
    """A row's log-probabilities have the same bits alone and beside others, in its chunk and while it decodes."""
    for dtype in subject.device.capabilities.batch_invariant:
        bench = subject.part(Lab).bench(subject, "dense", dtype)
        found = []
        for others in ((), (5, 17, 2)):
            branches = [bench.driver.add(bench.prompt(n, 90 + n), _ALL) for n in (13, *others)]
            rows: list[torch.Tensor] = []
            for plan in ((9, *(n - 1 for n in others)), *((1,) * len(branches),) * 4):
                out = bench.driver.step(dict(zip(branches, plan, strict=True)))
                positions = (*out.prompt_logprobs.get(branches[0].branch_id, ()), *out.logprobs.get(branches[0].branch_id, ()))
                rows += [_vector(p) for p in positions]
            found.append(torch.stack(rows))
            bench.driver.end_all()
        if not torch.equal(*found):
            wrong = int((found[0] != found[1]).any(-1).sum())
            raise CheckFailed(f"batch_invariant declares {dtype}, but at {wrong} of {len(found[0])} positions a row's bits differ alone and in a batch")


def _declares_invariance(subject: Subject) -> Support:
    return Support(True) if subject.device.capabilities.batch_invariant else Support(False, ("the device declares no dtype as batch_invariant",))


def _is_captured(subject: Subject) -> Support:
    if "float32" not in subject.dtypes or subject.device.capabilities.execution == "compiled":
        return Support(False, ("the device runs compiled programs only, so there is no other way to compare with",))
    if isinstance(subject.graph, EagerRunner):
        return Support(False, ("the device runs programs as they are",))
    return Support(True)


def _has_ranks(subject: Subject) -> Support:
    caps, claims = subject.device.capabilities, subject.selection.probe.claims
    if "float32" not in subject.dtypes or not caps.collectives:
        return Support(False, ("the device declares no collectives",))
    if not caps.host_is_device and (claims is None or (claims.num_devices or 1) < 2):
        return Support(False, ("there is one device",))
    if not any(spec.name == subject.spec.name for plugin in installed().plugins for spec in plugin.devices):
        return Support(False, (f"no installed package provides the device {subject.spec.name}, so no rank can find it",))
    return Support(True)


_FORCED: tuple[Check, ...] = (whole, chunks, decodes, mixtures)
_TOKENS: tuple[Check, ...] = (greedy, overlapped, seeded, preempted, swapped, copied, broken_row)


def cases() -> Iterator[Case]:
    """Forced log-probabilities in every dtype; tokens in float32; the programs' count last."""
    for name, dtype in product(MODELS, LIMITS):
        if (name, dtype == "float32") not in (("moe", False), ("moe-all", True)):
            for check in (*_FORCED, *(_TOKENS if dtype == "float32" else ()), programs):
                case_id = f"runner[{dtype},{name},{check.__name__}]"
                run = partial(_run, check, name, dtype)
                yield Case(case_id, LEVEL, run, dtype=dtype, supports=partial(_declared, check, name, dtype), family=name.partition("-")[0])
    for name, dtype in product(QUANTISED, LIMITS):
        for check in (whole, mixtures, *((greedy,) if dtype == "float32" else ()), programs):
            run = partial(_run, check, name, dtype)
            yield Case(
                f"runner[{dtype},{name},{check.__name__}]",
                LEVEL,
                run,
                dtype=dtype,
                supports=partial(_declared, check, name, dtype),
                family="quantized",
            )
    yield from graph_contract.cases()
    yield Case("runner[batch_invariant]", LEVEL, invariant, supports=_declares_invariance)
    for name, check, supports in (("as_eager", as_eager, _is_captured), ("two_ranks", two_ranks, _has_ranks)):
        yield Case(
            f"runner[float32,dense,{name}]", LEVEL, check, dtype="float32", supports=supports, family="dense", quick=check is as_eager
        )


def _declared(check: Check, name: str, dtype: str, subject: Subject) -> Support:
    if dtype not in subject.dtypes:
        return Support(False, (f"the device declares {', '.join(subject.dtypes)}",))
    if check is swapped and not subject.part(Lab).bench(subject, name, dtype).ready.num_host_blocks:
        return Support(False, ("there is no host tier",))
    return Support(True)


def _run(check: Check, name: str, dtype: str, subject: Subject) -> Measure | None:
    bench = subject.part(Lab).bench(subject, name, dtype)
    try:
        return check(bench)
    finally:
        bench.driver.end_all()  # a case that failed half-way must not starve the next
