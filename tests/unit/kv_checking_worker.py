"""A worker without tensors that checks what the scheduler tells it.

Owns: a simulated KV store in which a slot holds the hash of all tokens up to its position, so that any wrong block is noticed.
Reads: `messages`.
Never: knows the scheduler.

The next token is arithmetic on the tokens before it; `expected_tokens` computes the same from the request alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from oarlock.kv_spec import KVGroup
from oarlock.messages import EngineOutput, EngineRequest, ModelRunnerOutput, NewRequest, PositionLogprobs, SchedulerOutput
from oarlock.sampling_params import SamplingParams
from oarlock.scheduler.scheduler import Scheduler

FULL = (KVGroup(0, "full", None, (0,)),)
HYBRID = (KVGroup(0, "full", None, (0,)), KVGroup(1, "window", 5, (1,)), KVGroup(2, "window", 9, (2,)))


def toy_token(tokens: list[int], index: int, vocab: int, banned: tuple[int, ...] = ()) -> int:
    """Depends on every token and its place, and on the branch number."""
    value = index * 5 + len(tokens)
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    for step in range(vocab):
        if (value + step) % vocab not in banned:
            return (value + step) % vocab
    return value % vocab


def toy_logprobs(tokens: list[int], vocab: int) -> list[float]:
    """A Markov chain: depends on the last token only."""
    scores = [((tokens[-1] * 37 + v * 101 + (v * tokens[-1]) % 7) % 23) / 5 for v in range(vocab)]
    total = math.log(sum(math.exp(s) for s in scores))
    return [s - total for s in scores]


def expected_tokens(request: EngineRequest, index: int, vocab: int, max_model_len: int) -> tuple[list[int], str]:
    """(generated tokens, finish reason) by naive generation."""
    p, tokens, out = request.params, list(request.prompt_token_ids), []
    limit = min(p.max_tokens, max_model_len - len(tokens))
    eos = () if p.ignore_eos else request.eos_token_ids
    while len(out) < limit:
        banned = [words[0] for words in p.bad_words_token_ids if len(words) == 1]
        banned += [words[-1] for words in p.bad_words_token_ids if len(words) > 1 and tuple(out[-len(words) + 1 :]) == words[:-1]]
        if len(out) < p.min_tokens:
            banned += [*eos, *p.stop_token_ids]
        token = toy_token(tokens, index, vocab, tuple(banned))
        tokens.append(token)
        out.append(token)
        if len(out) >= p.min_tokens and (token in eos or token in p.stop_token_ids):
            return out, "stop"
    return out, "length"


def expected_beams(request: EngineRequest, vocab: int, max_model_len: int) -> list[tuple[tuple[int, ...], str, float]]:
    """The n best (tokens, finish reason, cumulative logprob) by a plain search over whole sequences of toy log-probabilities."""
    p, prompt = request.params, list(request.prompt_token_ids)
    width, limit = p.num_branches, min(p.max_tokens, max_model_len - len(prompt))
    ending = set(p.stop_token_ids) | (set() if p.ignore_eos else set(request.eos_token_ids))

    def score(total: float, length: int) -> float:
        return total / length**p.length_penalty

    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[tuple[tuple[int, ...], str, float]] = []
    for length in range(1, limit + 1):
        pairs = []
        for parent, (tokens, total) in enumerate(live):
            values = toy_logprobs(prompt + list(tokens), vocab)
            allowed = [v for v in range(vocab) if length > p.min_tokens or v not in ending]
            pairs += [(-(total + values[v]), parent, v) for v in allowed]
        grown = []
        for negative, parent, token in sorted(pairs)[: 2 * width]:
            tokens = (*live[parent][0], token)
            if token in ending:
                done.append((tokens, "stop", -negative))
            elif len(grown) < width:
                grown.append((tokens, -negative))
        if length == limit:
            done += [(tokens, "length", total) for tokens, total in grown]
        live = grown
        done = sorted(done, key=lambda h: (-score(h[2], len(h[0])), h[0]))[:width]
        if not live:
            break
        if len(done) == width:
            reach = limit if p.early_stopping == "never" and p.length_penalty > 0 else length
            if p.early_stopping is True or score(done[-1][2], len(done[-1][0])) >= score(live[0][1], reach):
                break
    return done[: p.n]


@dataclass
class _Known:
    """A branch as the worker knows it."""

    new: NewRequest
    tokens: list[int]
    tables: list[list[int]]
    chain: list[int] = field(default_factory=list)  # chain[i]: hash of tokens[: i + 1]

    def hash_at(self, position: int) -> int:
        while len(self.chain) <= position:
            self.chain.append(hash((self.chain[-1] if self.chain else 0, self.tokens[len(self.chain)])))
        return self.chain[position]


class KVCheckingWorker:
    """Executes steps at once; the test decides when the scheduler sees the results."""

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        vocab: int = 11,
        max_num_seqs: int = 256,
    ) -> None:
        self.groups, self.block_size, self.vocab, self.max_num_seqs = groups, block_size, vocab, max_num_seqs
        self.kv: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[object]] = [["never written"] * block_size for _ in range(num_host_blocks)]
        self.known: dict[int, _Known] = {}
        self.fail_prompts: set[int] = set()  # prompts that begin with one of these fail in their first sampled row
        self.num_computed = 0
        self.num_copies = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Take in what changed, move blocks, compute."""
        self._apply(step)
        self._move(step)
        lens = [r.num_tokens for r in step.rows]
        assert lens and min(lens) >= 1 and lens == sorted(lens, key=lambda n: n > 1), f"decode rows must come first: {lens}"
        assert len({r.branch_id for r in step.rows}) == len(step.rows), "a branch has two rows"
        tokens, logprobs, prompt, failed, written = {}, {}, defaultdict(tuple), {}, set()
        for row in step.rows:
            known = self.known[row.branch_id]
            end = row.start + row.num_tokens
            assert end <= len(known.tokens), f"branch {row.branch_id} is asked for a token that nobody knows"
            assert row.emits == (end == len(known.tokens) and known.new.params.max_tokens != 0 and row.emits)
            self._write(known, row.start, end, written)
            if known.new.params.prompt_logprobs is not None:
                for at in range(row.start + 1, min(end + 1, known.new.num_prompt_tokens)):
                    prompt[row.branch_id] += (PositionLogprobs(known.tokens[at], -float(at), 1),)
        for row in step.rows:
            known = self.known[row.branch_id]
            self._check_reads(known, row.start, row.start + row.num_tokens)
            self.num_computed += row.num_tokens
            if not row.emits:
                continue
            if known.tokens[0] in self.fail_prompts:
                failed[row.branch_id] = "not finite"
                known.tokens.append(0)
                continue
            masked = tuple(t for t in range(self.vocab) if row.mask and not row.mask[t >> 3] >> (t & 7) & 1)
            self._sample(row.branch_id, known, (*row.banned_token_ids, *masked), tokens, logprobs)
        return ModelRunnerOutput(step.step_id, tokens, logprobs, dict(prompt), failed)

    def _sample(self, branch_id: int, known: _Known, banned: tuple[int, ...], tokens: dict, logprobs: dict) -> None:
        params = known.new.params
        token = toy_token(known.tokens, known.new.index, self.vocab, banned)
        tokens[branch_id] = (token,)
        if params.logprobs is not None or params.use_beam_search or params.num_branches > params.n:
            values = toy_logprobs(known.tokens, self.vocab)
            order = sorted(range(self.vocab), key=lambda v: (-values[v], v))
            count = max(params.logprobs or 0, 2 * params.num_branches + len(banned) if params.use_beam_search else 0)
            top = tuple((v, values[v]) for v in order[:count])
            logprobs[branch_id] = (PositionLogprobs(token, values[token], order.index(token) + 1, top),)
        if not params.use_beam_search:
            known.tokens.append(token)

    def _apply(self, step: SchedulerOutput) -> None:
        for branch_id in step.finished:
            self.known.pop(branch_id, None)
        for new in step.new_requests:
            assert new.branch_id not in self.known, f"branch {new.branch_id} is announced twice"
            assert -(2**31) <= new.seed < 2**31
            self.known[new.branch_id] = _Known(new, list(new.token_ids), [list(ids) for ids in new.block_ids])
        assert len(self.known) <= self.max_num_seqs, "more branches than rows"
        for cached in step.cached_requests:
            known = self.known[cached.branch_id]
            known.tokens += cached.new_token_ids
            for table, ids in zip(known.tables, cached.new_block_ids, strict=False):
                table += ids
            for group, index, block in cached.replaced:
                known.tables[group][index] = block

    def _move(self, step: SchedulerOutput) -> None:
        for device, host in step.swap_out:
            self.host[host] = list(self.kv[device])
        sources = [list(self.kv[source]) for source, _ in step.block_copy]  # as a gather, then a scatter
        for (_, destination), content in zip(step.block_copy, sources, strict=True):
            self.kv[destination] = content
        for host, device in step.swap_in:
            self.kv[device] = list(self.host[host])
        for host, _ in step.swap_in:
            self.host[host] = ["swapped in"] * self.block_size
        self.num_copies += len(step.block_copy)
        for moves, side in ((step.swap_out, 1), (step.block_copy, 1), (step.swap_in, 1)):
            assert len({m[side] for m in moves}) == len(moves), "two moves to one block"
            assert all(m[side] != 0 or moves is step.swap_out for m in moves), "a move to the null block"

    def _write(self, known: _Known, start: int, end: int, written: set[int]) -> None:
        for group in range(len(self.groups)):
            for position in range(start, end):
                block = known.tables[group][position // self.block_size]
                assert block != 0, "a token is written to the null block"
                slot = block * self.block_size + position % self.block_size
                assert slot not in written, "two tokens are written to one slot"
                written.add(slot)
                self.kv[block][position % self.block_size] = (group, known.hash_at(position))

    def _check_reads(self, known: _Known, start: int, end: int) -> None:
        for g, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                block = known.tables[g][position // self.block_size]
                found = self.kv[block][position % self.block_size] if block else "null block"
                assert found == (g, known.hash_at(position)), (
                    f"branch {known.new.branch_id} group {g} position {position}: wrong KV in block {block}: {found}"
                )


class Drive:
    """A scheduler and a worker, and everything that was said about each branch."""

    def __init__(self, scheduler: Scheduler, worker: KVCheckingWorker, depth: int = 1) -> None:
        self.scheduler, self.worker, self.depth = scheduler, worker, depth
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[str, int], EngineOutput] = {}
        self.outputs: list[EngineOutput] = []
        self.steps: list[SchedulerOutput] = []

    def take(self, outputs: list[EngineOutput]) -> None:
        for o in outputs:
            key = (o.request_id, o.index)
            assert key not in self.ends, f"{key} got an output after its last one"
            self.tokens[key] += o.new_token_ids
            if o.finish_reason is not None:
                self.ends[key] = o
            assert (o.error is not None) == (o.finish_reason == "error")
        self.outputs += outputs

    def add(self, request: EngineRequest) -> None:
        self.take(self.scheduler.add_request(request))

    def launch(self) -> bool:
        """Schedule and execute one step, without telling the scheduler its result."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.steps.append(step)
        self.in_flight.append((step, self.worker.execute(step)))
        return True

    def land(self) -> bool:
        """Tell the scheduler the oldest result."""
        if not self.in_flight:
            return False
        self.take(self.scheduler.update_from_output(*self.in_flight.pop(0)))
        return True

    def step(self) -> bool:
        launched = self.launch()
        if not launched or len(self.in_flight) >= self.depth:
            self.land()
        return launched

    def run(self, limit: int = 5000) -> None:
        """Run until idle."""
        while self.scheduler.has_unfinished():
            limit -= 1
            assert limit > 0, f"no end in sight: {self.scheduler.stats()}"
            self.take(self.scheduler.settle_constraints())
            if not self.launch():
                if not self.in_flight and (self.scheduler._constraints.num_asked or not self.scheduler.has_unfinished()):
                    continue
                assert self.in_flight, "nothing runs, nothing is in flight, and requests are open"
                self.land()
            elif len(self.in_flight) >= self.depth:
                self.land()
            self.scheduler.check_invariants()


def request(
    request_id: str, prompt: list[int] | tuple[int, ...], eos: tuple[int, ...] = (), salt: str | None = None, priority: int = 0, **params
) -> EngineRequest:
    params.setdefault("max_tokens", 8)
    if params.get("use_beam_search"):
        params.setdefault("temperature", 0.0)
    if params["max_tokens"] == 0:
        params.setdefault("prompt_logprobs", 0)
    return EngineRequest(request_id, tuple(prompt), SamplingParams(**params), eos, 0.0, priority, salt)
