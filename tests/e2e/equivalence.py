"""Engines whose steps are watched, the ways through them, and the comparison with transformers' own tokens.

Owns: `Engine` (one in-process engine and the events that happened in it), `Way` (a feature: options, traffic, events that must happen).
Reads: checkpoints (references), seeds.
Never: changes a seed; excuses a difference that the reference does not call a near-tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import oarlock_sim
import pytest
import seeds
import torch
from checkpoints import NEAR_TIE, NEAR_TIES, NEW_TOKENS, Tiny
from oarlock.config.resolve import from_kwargs
from oarlock.engine.launch import launch_inprocess
from oarlock.messages import EngineRequest, SchedulerOutput, SchedulerStats
from oarlock.model_summary import ModelSummary, load_summary
from oarlock.runtime.reference.logits import apply_penalties
from oarlock.runtime.reference.sampling import sample
from oarlock.sampling_params import SamplingParams
from oarlock.scheduler.policy import seed_bits
from oarlock.shapes import ShapePolicy, StepKey

DEVICES = ("cpu", "sim-eager", "sim-static")
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
CONTEXT = 704  # 600 + 64, rounded up
Answers = dict[int, list[int]]  # branch index -> tokens


def skip_missing(device: str) -> None:
    """Skip, counted, where the installed torch cannot carry a simulated device."""
    probe = next((d.probe() for d in oarlock_sim.devices() if d.name == device), None)
    if probe is not None and probe.status != "available":
        pytest.skip(f"{device}: {probe.reason}")


class Engine:
    """An engine in this process. `events` counts what its steps held:

    chunks (rows that left the rest of a prompt for later), mixed (steps with decode rows beside prompt rows), overlapped (steps
    launched while another was in flight), rows (the most of one step), longest (the longest row), swap_out, swap_in,
    block_copy (blocks); and from the scheduler preemptions, swap_outs, prefix_hits. `keys`: step shapes that were used.
    """

    def __init__(self, path: Any, device: str, *, summary: ModelSummary | None = None, **options: Any) -> None:
        skip_missing(device)
        options = {"dtype": "float32", "max_model_len": CONTEXT, "max_num_seqs": 8, "skip_tokenizer_init": True, **options}
        config = from_kwargs(str(path), device=device, **options).engine
        summary = summary or load_summary(config.model)
        self.client = launch_inprocess(config, summary)
        self.core: Any = self.client._core
        self.info = self.client.info
        self.events: Counter[str] = Counter()
        self.keys: set[StepKey] = set()
        self._ids = count()
        self._execute = self.core.executor.execute
        self.core.executor.execute = self._watched
        if device == "sim-static":
            self.policy: ShapePolicy = self.core.scheduler._policy

    @property
    def stats(self) -> SchedulerStats:
        return self.core.scheduler.stats()

    @property
    def worker(self) -> Any:
        """The worker, where it is in this process."""
        return self.core.executor._worker

    def close(self) -> None:
        self.client.shutdown()

    # ------------------------------------------------------------ watching
    def _watched(self, out: SchedulerOutput) -> Any:
        events = self.events
        decodes = sum(row.num_tokens == 1 and row.emits for row in out.rows)
        events["chunks"] += sum(not row.emits for row in out.rows)
        events["mixed"] += 0 < decodes < len(out.rows)
        events["overlapped"] += bool(self.core._in_flight)
        events["rows"] = max(events["rows"], len(out.rows))
        events["longest"] = max(events["longest"], max((row.num_tokens for row in out.rows), default=0))
        for name in ("swap_out", "block_copy", "swap_in"):
            events[name] += len(getattr(out, name))
        lens = [row.num_tokens for row in out.rows if row.num_tokens > 1]
        ends = [row.start + row.num_tokens for row in out.rows]
        if ends:
            self.keys.add(self.core.scheduler._policy.fit(len(out.rows) - len(lens), lens, -(-max(ends) // self.info.block_size)))
        return self._execute(out)

    def _forget(self) -> SchedulerStats:
        """Start counting from zero, with an empty prefix cache."""
        self.client.reset_prefix_cache()
        self.events.clear()
        self.keys.clear()
        return self.stats

    # ------------------------------------------------------------ running
    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any) -> str:
        name = str(next(self._ids))
        self.client.submit(EngineRequest(name, tuple(prompt), params, **fields))
        return name

    def run(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, waves: Sequence[int] = (), gap: int = 5, fresh: bool = True
    ) -> list[Answers]:
        """Tokens of each request and branch. `waves`: how many requests arrive at a time, `gap` steps apart; what is left comes last.

        Raises:
            AssertionError: an error, no end or two ends for a branch, blocks held at the end, or a compilation while serving.
        """
        before = self._forget() if fresh else self.stats
        names: list[str] = []
        answers: dict[str, Answers] = {}
        ended: Counter[tuple[str, int]] = Counter()
        for size in waves:
            names += [self.submit(prompt, params) for prompt, params in requests[len(names) : len(names) + size]]
            for _ in range(gap):
                self._step(answers, ended)
        names += [self.submit(prompt, params) for prompt, params in requests[len(names) :]]
        while self.client.has_unfinished():
            self._step(answers, ended)
        for name, (_, params) in zip(names, requests, strict=True):
            for index in range(params.n):
                assert ended[name, index] == 1, f"branch {index} of request {name} has {ended[name, index]} terminal answers"
        self.check_idle()
        after = self.stats
        for event, counter in (("preemptions", "num_preemptions"), ("swap_outs", "num_swap_outs"), ("prefix_hits", "prefix_hits")):
            self.events[event] += getattr(after, counter) - getattr(before, counter)
        return [answers[name] for name in names]

    def _step(self, answers: dict[str, Answers], ended: Counter[tuple[str, int]]) -> None:
        outputs = self.client.step()
        for output in outputs.outputs if outputs else ():
            assert output.error is None, f"request {output.request_id}: {output.error}"
            answers.setdefault(output.request_id, {}).setdefault(output.index, []).extend(output.new_token_ids)
            ended[output.request_id, output.index] += output.finish_reason is not None
        assert outputs is None or outputs.compiles_after_warmup == 0, "a program was compiled while serving"

    def check_idle(self) -> None:
        """Nothing is held by anybody, and every count fits every other."""
        self.core.scheduler.check_invariants()
        stats = self.stats
        assert not (stats.num_used_blocks or stats.num_used_host_blocks or stats.num_running or stats.num_waiting), f"not idle: {stats}"

    def greedy(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
        """The greedy tokens of each prompt."""
        return [answer[0] for answer in self.run([(prompt, GREEDY) for prompt in prompts], **how)]

    def require(self, *events: str, what: str) -> None:
        """Raises AssertionError when something that the test is about did not happen."""
        missing = [event for event in events if not self.events[event]]
        assert not missing, f"{what}: no {', '.join(missing)} happened: {dict(self.events)}"


# ---------------------------------------------------------------- prompts and references
def prompts_of(tiny: Tiny, lengths: Sequence[int]) -> list[list[int]]:
    """The fixed prompts: one a length, the same whichever other lengths are asked for."""
    return [tiny.prompts(length, seed=seeds.PROMPTS + length)[0] for length in lengths]


def with_tail(tiny: Tiny, prompt: Sequence[int], length: int) -> list[int]:
    """A prompt that shares its beginning with another and goes on differently."""
    return [*prompt, *tiny.prompts(length, seed=seeds.TAILS + length)[0]]


def base_lengths(tiny: Tiny) -> tuple[int, ...]:
    return seeds.SHORT_CONTEXT if short_context(tiny) else seeds.FEW


def short_context(tiny: Tiny) -> bool:
    """Whether rotary factors depend on the served context: such a checkpoint is served and compared below the change only."""
    return "original_max_position_embeddings" in tiny.recipe.values


def context_of(tiny: Tiny) -> dict[str, int]:
    return {"max_model_len": 256 if short_context(tiny) else CONTEXT}


def has_full_attention(tiny: Tiny) -> bool:
    """Whether some layer sees everything; else no request ever holds more than its window."""
    return any(window is None for window in summary_of(tiny).layer_windows)


def summary_of(tiny: Tiny) -> ModelSummary:
    return load_summary(from_kwargs(str(tiny.path), dtype="float32", skip_tokenizer_init=True, **context_of(tiny)).engine.model)


def check_all(tiny: Tiny, prompts: Sequence[Sequence[int]], got: Sequence[Sequence[int]], what: str) -> None:
    """Every continuation is transformers' own."""
    assert len(prompts) == len(got)
    for prompt, tokens in zip(prompts, got, strict=True):
        assert len(tokens) == NEW_TOKENS, f"{what}: {len(tokens)} tokens instead of {NEW_TOKENS}"
        tiny.check(list(prompt), list(tokens), what)


def check_sampled(tiny: Tiny, prompt: Sequence[int], params: SamplingParams, answers: Answers, what: str) -> None:
    """Each branch of a seeded request is what the sampler's definition draws from transformers' logits, token for token.

    One forward pass over the whole text gives every position's logits. A token that differs is excused where raising its logit by
    less than a near-tie makes the definition draw it.
    """
    for index, tokens in answers.items():
        text = [*prompt, *tokens]
        logits = logits_of(tiny, text)[len(prompt) - 1 : -1]
        want = draw(logits, params, index, text)
        for at, (ours, theirs) in enumerate(zip(tokens, want, strict=True)):
            if ours == theirs:
                continue
            nudged = logits.clone()
            nudged[at, ours] += NEAR_TIE
            place = f"{tiny.name} {what} prompt of {len(prompt)}, branch {index}, token {at}: got {ours}, the definition draws {theirs}"
            assert draw(nudged, params, index, text)[at] == ours, f"{place}\n got {tokens}\nwant {want}"
            NEAR_TIES.append(place)


def logits_of(tiny: Tiny, text: Sequence[int]) -> torch.Tensor:
    """transformers' logits at every position of a text, computed without a cache. [tokens, vocab_size] float32"""
    with torch.no_grad():
        return tiny._reference()(torch.tensor([list(text)]), use_cache=False).logits[0].float()


def draw(logits: torch.Tensor, params: SamplingParams, index: int, text: Sequence[int]) -> list[int]:
    """What the definitions in runtime.reference draw at the last positions of a text, given what precedes each.

    logits [positions, vocab_size]: row i is what the text up to its (i - positions)th token predicts.
    """
    size = logits.shape[0]
    number = lambda value, kind=torch.float32: torch.full((size,), value, dtype=kind)
    at = torch.arange(size, dtype=torch.int32)
    num_prompt = len(text) - size
    history = torch.tensor([list(text)], dtype=torch.int32).expand(size, -1)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    logits = apply_penalties(logits, history, number(num_prompt, torch.int32), num_prompt + at, *map(number, penalties))
    for token, value in params.logit_bias:
        logits[:, token] += value
    if params.allowed_token_ids is not None:
        banned = torch.ones(logits.shape[1], dtype=torch.bool)
        banned[list(params.allowed_token_ids)] = False
        logits[:, banned] = -torch.inf
    seed, choice = number(seed_bits(params.seed, 0, 0), torch.int32), number(index, torch.int32)
    drawn = sample(logits, number(params.temperature), number(params.top_p), number(params.top_k, torch.int32), number(params.min_p), seed, choice, at)
    return drawn.tolist()


# ---------------------------------------------------------------- ways through the engine
@dataclass(frozen=True)
class Way:
    """One feature: the engine that has it, the traffic that brings it about, and the events that must have happened."""

    name: str
    traffic: Callable[[Engine, Tiny, str], None]
    options: dict[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    devices: tuple[str, ...] = DEVICES
    num_blocks: tuple[int, int, int] | None = None  # of 8 tokens: usually, for a short context, and where every layer has a window

    def options_for(self, tiny: Tiny) -> dict[str, Any]:
        """What the engine is made with: few enough blocks, and enough for the longest request."""
        found = {**context_of(tiny), **self.options}
        if self.num_blocks is not None:
            usual, short, windows = self.num_blocks
            found["num_blocks_override"] = windows if not has_full_attention(tiny) else short if short_context(tiny) else usual
        return found


def _base(engine: Engine, tiny: Tiny, what: str) -> None:
    """One request at a time on the device that is fast enough for it, else all at once."""
    prompts = prompts_of(tiny, base_lengths(tiny))
    for group in [[p] for p in prompts] if engine.info.device == "cpu" else [prompts]:
        check_all(tiny, group, engine.greedy(group), what)


def _prefix(engine: Engine, tiny: Tiny, what: str) -> None:
    """Prompts that are in the cache whole, as a beginning, up to where they go on differently, or with their blocks in another order."""
    long = prompts_of(tiny, base_lengths(tiny))[0]
    middle = prompts_of(tiny, (129,))[0]
    check_all(tiny, [long, middle], engine.greedy([long, middle]), f"{what}, first time")
    assert not engine.events["prefix_hits"], f"{what}: {engine.events['prefix_hits']} tokens were found in an empty cache"
    turned = [*middle[96:128], *middle[:96]]  # whole blocks that have changed places
    related = [long, middle, with_tail(tiny, middle[:100], 17), middle[:90], with_tail(tiny, long[: len(long) // 2], 40), turned]
    check_all(tiny, related, engine.greedy(related, fresh=False), what)
    shared = [len(long) - 1, len(middle) - 1, 100, 89, len(long) // 2, 0]  # the last token is always computed
    size = engine.info.block_size
    want = sum(n // size * size for n in shared)
    assert engine.events["prefix_hits"] == want, f"{what}: {engine.events['prefix_hits']} tokens were found, {want} in blocks of {size} were there"


def _chunks(engine: Engine, tiny: Tiny, what: str) -> None:
    prompts = prompts_of(tiny, base_lengths(tiny))
    check_all(tiny, prompts, engine.greedy(prompts, waves=(2,)), what)
    assert engine.events["longest"] == 7, f"{what}: the longest row had {engine.events['longest']} tokens"


def _crowd(engine: Engine, tiny: Tiny, what: str) -> None:
    prompts = prompts_of(tiny, seeds.CROWD)
    check_all(tiny, prompts, engine.greedy(prompts), what)


def _recompute(engine: Engine, tiny: Tiny, what: str) -> None:
    _crowd(engine, tiny, what)
    assert not engine.events["swap_outs"], f"{what}: something was swapped"


def _mixed(engine: Engine, tiny: Tiny, what: str) -> None:
    lengths = [length for length in seeds.MIXED if length + NEW_TOKENS <= engine.info.max_model_len]
    prompts = prompts_of(tiny, lengths)
    check_all(tiny, prompts, engine.greedy(prompts, waves=(len(prompts) // 2,)), what)
    assert engine.events["rows"] == len(prompts), f"{what}: {engine.events['rows']} of {len(prompts)} requests ran in one step at most"


def _overlap(engine: Engine, tiny: Tiny, what: str) -> None:
    prompts = prompts_of(tiny, base_lengths(tiny))
    check_all(tiny, prompts, engine.greedy(prompts, waves=(3,)), what)


def sampled_params(number: int, n: int = 1, **fields: Any) -> SamplingParams:
    """A seeded request; which one, `number` says."""
    kinds: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 50, "top_p": 0.95})
    return SamplingParams(
        **{"n": n, "temperature": 0.9, "seed": seeds.SAMPLED + number, "max_tokens": 24, "ignore_eos": True, "detokenize": False,
           **kinds[number % len(kinds)], **fields}
    )  # fmt: skip


def _branches(engine: Engine, tiny: Tiny, what: str) -> None:
    """n of 2 to 5, beside each other and greedy requests; each as the definition draws it, and as the request alone gives it."""
    prompts = prompts_of(tiny, (40, 17, 129, 1))
    requests: list[tuple[Sequence[int], SamplingParams]] = [(p, sampled_params(i, n=2 + i)) for i, p in enumerate(prompts)]
    together = engine.run([*requests, (prompts[0], GREEDY)], waves=(2,))
    check_all(tiny, [prompts[0]], [together[-1][0]], f"{what}, a greedy request beside")
    for (prompt, params), answers in zip(requests, together, strict=False):
        assert len({tuple(tokens) for tokens in answers.values()}) == params.n, f"{what}: branches of one request are equal"
        check_sampled(tiny, prompt, params, answers, what)
        assert engine.run([(prompt, params)], fresh=False)[0] == answers, f"{what}: alone the request gives other tokens"


# Arrivals that lead through every shape: few and many decode rows, each beside no chunk, a short one, several short ones, and a long one.
LONG_TABLES = ((600, 350), (17,), (24, 31, 25), (20,), (32, 16, 13), (100,))
SHORT_TABLES = ((90,), *LONG_TABLES[1:-1], (75,))


def _buckets(engine: Engine, tiny: Tiny, what: str) -> None:
    seen, longest = set(), engine.info.max_model_len - NEW_TOKENS
    for waves in (LONG_TABLES, SHORT_TABLES):
        prompts = prompts_of(tiny, [min(length, longest) for wave in waves for length in wave])
        check_all(tiny, prompts, engine.greedy(prompts, waves=[len(wave) for wave in waves], gap=9), what)
        seen |= engine.keys
    table = engine.policy.table.blocks
    # A short context's narrow table ends before an answer does; those shapes are met while rows are short, where they are met at all.
    kept = table if table[0] * engine.info.block_size >= max(SHORT_TABLES[0]) + NEW_TOKENS else table[1:]
    missing = {key for key in set(engine.policy.keys()) - seen if key.blocks in kept}
    assert not missing, f"{what}: shapes that were never used: {sorted(missing, key=str)}"


def _hostile(engine: Engine, tiny: Tiny, what: str) -> None:
    """Everything at once. The first of the sampled requests forks while there are seats; the last ones lose their blocks."""
    base = prompts_of(tiny, base_lengths(tiny))
    shared = base[4]
    prompts = [shared, *base, with_tail(tiny, shared[:100], 17), base[3], shared[:90], base[2]]
    greedy = [(prompt, GREEDY) for prompt in prompts]
    sampled = [(base[3], sampled_params(1, n=2)), (base[2], sampled_params(2, n=3)), (base[3], sampled_params(3, n=2))]
    answers = engine.run([sampled[0], *greedy[:4], *sampled[1:], *greedy[4:]], waves=(2,), gap=24)
    check_all(tiny, prompts, [a[0] for a in (*answers[1:5], *answers[7:])], what)
    for (prompt, params), got in zip(sampled, (answers[0], *answers[5:7]), strict=True):
        check_sampled(tiny, prompt, params, got, what)
    assert engine.events["longest"] == 7, f"{what}: the longest row had {engine.events['longest']} tokens"
    assert engine.events["preemptions"] > engine.events["swap_outs"], f"{what}: nothing was recomputed: {dict(engine.events)}"


TIGHT = {"block_size": 8, "max_model_len": 256, "max_num_seqs": 8}
HOSTILE_EVENTS = ("prefix_hits", "chunks", "preemptions", "swap_outs", "swap_in", "mixed", "overlapped", "block_copy")
ROOMY = {"max_num_seqs": 32, "max_num_batched_tokens": 160}

WAYS = (
    Way("base", _base, ROOMY),
    Way("prefix hit", _prefix, ROOMY, ("prefix_hits",)),
    Way("mixed batch of 32", _mixed, ROOMY, ("mixed", "chunks")),
    Way("n > 1", _branches, ROOMY, ("mixed", "block_copy")),
    Way("every bucket", _buckets, ROOMY, ("mixed",), ("sim-static",)),
    Way("chunk 7", _chunks, {"max_num_seqs": 7, "max_num_batched_tokens": 7, "block_size": 16}, ("chunks", "mixed")),
    Way("recompute", _recompute, {**TIGHT, "preemption_mode": "recompute"}, ("preemptions",), num_blocks=(48, 48, 12)),
    Way(
        "swap", _crowd, {**TIGHT, "preemption_mode": "swap", "swap_space": "16MiB"},
        ("preemptions", "swap_outs", "swap_out", "swap_in"), num_blocks=(48, 48, 12),
    ),
    Way("max_in_flight 2", _overlap, {"max_in_flight": 2, "max_num_batched_tokens": 64}, ("overlapped", "mixed", "chunks")),
    Way("TP 2", _overlap, {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}, ("mixed", "chunks")),
)  # fmt: skip
BASE = WAYS[0]
HOSTILE = Way(
    "hostile", _hostile,
    {"block_size": 8, "max_num_seqs": 7, "max_num_batched_tokens": 7, "max_in_flight": 2, "swap_space": "16MiB"},
    HOSTILE_EVENTS, num_blocks=(90, 40, 12),
)  # fmt: skip
HOSTILE_TP = replace(HOSTILE, name="hostile, TP 2", options={**HOSTILE.options, "tensor_parallel_size": 2})


class Engines:
    """The engine that served last, kept for the next way that wants the same one."""

    def __init__(self) -> None:
        self._key: Any = None
        self._engine: Engine | None = None

    def get(self, tiny: Tiny, device: str, **options: Any) -> Engine:
        key = (tiny.name, device, tuple(sorted(options.items())))
        if key != self._key:
            self.close()
            self._engine = Engine(tiny.path, device, **options)
            self._key = key
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine, self._key = None, None


def take(way: Way, engine: Engine, tiny: Tiny, device: str) -> None:
    """Go that way and require what it is about.

    Raises:
        AssertionError: another token, or an event that did not happen; the message begins with the feature.
    """
    what = f"{way.name} on {device}"
    way.traffic(engine, tiny, what)
    engine.require(*way.events, what=what)
