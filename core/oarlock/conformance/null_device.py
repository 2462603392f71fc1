"""The null device: an executor without tensors that answers by arithmetic and checks what the engine tells a worker.

Owns: `NullExecutor`, what it knows of each branch, the sizes it pretends to have.
Reads: `messages`, `memory_plan`, `kv_spec`, `null_answers`, `null_memory`.
Never: imports torch; reads a weight; forgives a breach of the contract (the step raises, and the canary ends the engine).
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

from oarlock.backend_api import Capabilities
from oarlock.config.device_rules import check_device, notes_for
from oarlock.config.resolve import token_budget
from oarlock.conformance.null_answers import logprob, next_token, vector
from oarlock.conformance.null_memory import Breach, Known, NullMemory
from oarlock.conformance.null_plugin import BLOCK_SIZES, DTYPES, MEMORY_BYTES
from oarlock.executor.base import Executor, Pending
from oarlock.kv_spec import KVSpec, make_groups
from oarlock.memory_plan import MemoryNeeds, plan_memory
from oarlock.messages import ModelRunnerOutput, PositionLogprobs, ScheduledRow, SchedulerOutput, WorkerReady
from oarlock.pooling_params import Pooler
from oarlock.shapes import BucketTable

log = logging.getLogger("oarlock.worker")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CAPABILITIES = Capabilities(dtypes=DTYPES, block_sizes=BLOCK_SIZES, host_is_device=True, batch_invariant=DTYPES, default_swap_bytes=0)
TEXT = "null device: arithmetic, no tensors"


class NullDevice:
    """For `oarlock doctor`; the executor needs no device object."""

    torch_device = None
    capabilities = CAPABILITIES

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        self.index, self.options = index, dict(options or {})

    def activate(self) -> None:
        """Nothing to make current."""

    def context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def verify(self) -> None:
        """Check the example of `null_answers`."""
        if next_token(18, 3, 100) != 21:
            raise RuntimeError("18 + 3 is not 21")

    def memory_info(self) -> tuple[int, int]:
        return MEMORY_BYTES, MEMORY_BYTES

    def describe(self) -> str:
        return TEXT


class _Done:
    """A step that has run. Its result is handed over when the engine asks for it, as late as that may be."""

    def __init__(self, result: ModelRunnerOutput) -> None:
        self._result = result

    def result(self) -> ModelRunnerOutput:
        return self._result


class NullExecutor(Executor):
    """One rank in the engine's process."""

    def load(self) -> list[WorkerReady]:
        config, summary = self.config, self.summary
        check_device(CAPABILITIES, config, TEXT)
        for note in notes_for(CAPABILITIES, config):
            log.warning("%s", note)
        dtype = summary.dtype if config.model.dtype == "auto" else {"half": "float16", "float": "float32"}.get(config.model.dtype, config.model.dtype)
        block_size = config.cache.block_size or BLOCK_SIZES[0]
        windows = summary.layer_windows or (None,) * summary.num_layers
        specs = tuple(KVSpec("window" if w else "full", summary.num_kv_heads, summary.head_dim, w) for w in windows)
        self.groups, self.block_size, self.breach = make_groups(specs), block_size, ""
        budget = token_budget(config.scheduler, summary.max_model_len)
        needs = MemoryNeeds(
            weights_bytes=0,
            activation_bytes=0,
            program_bytes=0,
            bytes_per_block=specs[0].values_per_token() * block_size * ITEM_BYTES[dtype] * max(len(g.layers) for g in self.groups),
            block_size=block_size,
            available_bytes=MEMORY_BYTES,
            total_bytes=MEMORY_BYTES,
            host_is_device=True,
            groups=self.groups,
        )
        plan = plan_memory(
            needs,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=summary.max_model_len,
            fit_model_len=config.model.max_model_len == -1,
            chunk_tokens=min(budget, summary.max_model_len),
            num_blocks_override=config.cache.num_blocks_override,
            kv_cache_bytes=config.cache.kv_cache_bytes,
            utilization=config.cache.device_memory_utilization,
            swap_bytes=config.cache.swap_space_bytes or 0,
        )
        return [
            WorkerReady(
                capabilities=CAPABILITIES,
                kv_groups=self.groups,
                block_size=block_size,
                num_blocks=plan.num_blocks,
                num_host_blocks=plan.num_host_blocks,
                max_model_len=plan.max_model_len,
                dtype=dtype,
                device_text=TEXT,
                buckets=BucketTable(),
                op_table=(),
                memory_plan=(*plan.rows, ("limit", 0, plan.limit)),
            )
        ]

    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        limit = self.config.scheduler.max_num_seqs
        self.memory = NullMemory(self.groups, num_blocks, self.block_size, num_host_blocks, limit)
        return 0.0, 0

    def execute(self, out: SchedulerOutput) -> Pending:
        """Run a step now.

        Raises:
            Breach: what the engine asked for breaks the contract of `messages`.
        """
        try:
            return _Done(self._run(out))
        except Breach as error:
            self.breach = str(error)
            raise

    def canary(self) -> None:
        if self.breach:
            raise Breach(self.breach)

    def shutdown(self) -> None:
        self.breach = "the null device has been shut down"

    # ------------------------------------------------------------ a step
    def _run(self, out: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput(out.step_id)
        for row, known in self.memory.step(out):
            self._score_prompt(row, known, result)
            if row.emits:
                self._sample(row, known, result)
            elif known.new.pooling is not None and row.start + row.num_tokens == known.new.num_prompt_tokens:
                result.pooled[row.branch_id] = vector(known.tokens, self._vector_size, known.new.pooling.dimensions, self.summary.vocab_size)
        return result

    @property
    def _vector_size(self) -> int:
        pooler = Pooler.of(self.summary.architecture, self.summary.hf_config, self.summary.path, {})
        return len(pooler.labels) or pooler.size

    def _score_prompt(self, row: ScheduledRow, known: Known, result: ModelRunnerOutput) -> None:
        wanted = known.new.params.prompt_logprobs
        last = min(row.start + row.num_tokens, known.new.num_prompt_tokens - 1)
        if wanted is None or last <= row.start:
            return
        positions = range(row.start + 1, last + 1)
        result.prompt_logprobs[row.branch_id] = tuple(self._position(known.tokens[at], known, at, wanted) for at in positions)

    def _sample(self, row: ScheduledRow, known: Known, result: ModelRunnerOutput) -> None:
        p, count = known.new.params, len(known.tokens)
        token = self._choose(known, row)
        if token is None:
            result.failed[row.branch_id] = "no token is allowed"
            return
        result.token_ids[row.branch_id] = (token,)
        top = -1 if p.logprobs is None else p.logprobs if p.logprobs >= 0 else self.summary.vocab_size
        if p.use_beam_search:  # the engine drops banned candidates, and must still find two for each beam
            some = 2 * p.num_branches + len(row.banned_token_ids)
            top = max(top, some if p.allowed_token_ids is None and not row.mask else self.summary.vocab_size)
        elif p.num_branches > p.n:
            top = max(top, 0)
        if top >= 0:
            result.logprobs[row.branch_id] = (self._position(token, known, count, top),)
        if not p.use_beam_search:  # beams are extended by the engine
            known.append((token,))

    def _choose(self, known: Known, row: ScheduledRow) -> int | None:
        """The best token after penalties, biases, bans and mask; the lower id wins a tie. None: none is allowed. O(tokens that differ or are not allowed)."""
        p, vocab, banned, mask = known.new.params, self.summary.vocab_size, frozenset(row.banned_token_ids), row.mask
        best = next_token(known.sums[-1], len(known.tokens), vocab)
        penalised = p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
        special = {*dict(p.logit_bias), *(known.tokens if penalised else ())}

        def may_follow(v: int) -> bool:
            return v not in banned and (not mask or bool(mask[v >> 3] >> (v & 7) & 1))

        plain = (v for v in ((best + d) % vocab for d in range(vocab)) if v not in special and may_follow(v))
        candidates = {*special, *([first] if (first := next(plain, None)) is not None else ())} if p.allowed_token_ids is None else set(p.allowed_token_ids)
        scored = [(-self._logit(v, best, known), v) for v in candidates if may_follow(v)]
        return min(scored)[1] if scored else None

    def _logit(self, token: int, best: int, known: Known) -> float:
        p, output = known.new.params, known.tokens[known.new.num_prompt_tokens :]
        value = float(-((token - best) % self.summary.vocab_size))
        if p.repetition_penalty != 1 and token in known.tokens:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        times = output.count(token) if p.presence_penalty or p.frequency_penalty else 0
        return value - p.frequency_penalty * times - p.presence_penalty * (times > 0) + dict(p.logit_bias).get(token, 0.0)

    def _position(self, token: int, known: Known, at: int, top: int) -> PositionLogprobs:
        """The raw distribution of the token at position `at`, after the `at` tokens before it."""
        vocab = self.summary.vocab_size
        best = next_token(known.sums[at], at, vocab)
        every = [(best + d) % vocab for d in range(min(top, vocab) if top >= 0 else vocab)]
        value = logprob(token, best, vocab)
        assert math.isfinite(value)
        return PositionLogprobs(token, value, (token - best) % vocab + 1, tuple((v, logprob(v, best, vocab)) for v in every))
