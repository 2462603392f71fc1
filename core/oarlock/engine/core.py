"""`EngineCore`: the loop. Schedule, execute, update; it names no feature.

Owns: the handshake's outcome, steps in flight, the judgement after a fault.
Reads: `scheduler`, `kv`, `executor`, `messages`, `shapes`.
Never: sees text, tensors or HTTP; knows what a step computes.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import asdict, replace

from oarlock.config.resolve import to_dict
from oarlock.config.sections import EngineConfig
from oarlock.errors import ConfigError, EngineDead, WorkerDied
from oarlock.executor.base import Executor, Pending
from oarlock.kv.manager import KVCacheManager
from oarlock.messages import Abort, EngineInfo, EngineOutput, EngineOutputs, EngineRequest, SchedulerOutput, WorkerReady
from oarlock.model_summary import ModelSummary
from oarlock.scheduler.constraints import Constraints, make_grammars
from oarlock.scheduler.scheduler import Scheduler
from oarlock.shapes import BIAS_BUCKET, ShapePolicy

log = logging.getLogger("oarlock.engine")
MUST_AGREE = ("capabilities", "kv_groups", "block_size", "dtype", "buckets", "op_table")


def vocabulary_source(config: EngineConfig, summary: ModelSummary) -> tuple[str, str]:
    """(import string, its argument) of the tokens as bytes: backends for structured output load them in processes of their own."""
    return "oarlock.frontend.tokenizer:load_vocabulary", json.dumps({"config": to_dict(config), "summary": asdict(summary)})


class EngineCore:
    """One model on one executor. Called from one thread."""

    def __init__(self, config: EngineConfig, summary: ModelSummary, executor: Executor) -> None:
        self.config, self.summary, self.executor = config, summary, executor
        self.max_in_flight = config.scheduler.max_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, Pending]] = deque()
        self._ready_outputs: list[EngineOutput] = []
        self._compiles = 0
        self._unreported = False  # something ended of which no step has told
        self._grammars, self._grammar_states = make_grammars(config, executor.device_name, vocabulary_source(config, summary))
        ready = self._handshake()
        self.scheduler = self._make_scheduler(ready)
        self.info = self._describe(ready)

    # ------------------------------------------------------------ start
    def _handshake(self) -> WorkerReady:
        """Load on every rank, require equal answers, take the smallest memory and the shortest context."""
        answers = self.executor.load()
        first = min(range(len(answers)), key=lambda rank: answers[rank].max_model_len)
        agreed = answers[first]
        for rank, other in enumerate(answers):
            for name in MUST_AGREE:
                if name == "buckets" and other.max_model_len != agreed.max_model_len:
                    continue  # derived from the rank's own context; `start` derives them from the agreed one
                if getattr(other, name) != getattr(agreed, name):
                    raise ConfigError(f"rank {rank} differs from rank {first} in {name}: {getattr(other, name)} against {getattr(agreed, name)}")
        ready = replace(
            agreed,
            num_blocks=min(a.num_blocks for a in answers),
            num_host_blocks=min(a.num_host_blocks for a in answers),
        )
        log.info("KV cache: %d blocks of %d tokens; context %d tokens", ready.num_blocks - 1, ready.block_size, ready.max_model_len)
        warmup_s, programs = self.executor.start(ready.num_blocks, ready.num_host_blocks, ready.max_model_len)
        return replace(ready, warmup_s=warmup_s, num_programs=programs)

    def _make_scheduler(self, ready: WorkerReady) -> Scheduler:
        cache = self.config.cache
        manager = KVCacheManager(ready.kv_groups, ready.num_blocks, ready.block_size, cache.enable_prefix_caching, ready.num_host_blocks)
        constraints = Constraints(self._grammars, self.summary.vocab_size)
        policy = ShapePolicy(ready.buckets)
        return Scheduler(self.config.scheduler, manager, policy, ready.max_model_len, self.config.model.seed, constraints=constraints)

    def _describe(self, ready: WorkerReady) -> EngineInfo:
        return EngineInfo(
            max_model_len=ready.max_model_len, vocab_size=self.summary.vocab_size, block_size=ready.block_size, num_blocks=ready.num_blocks - 1,
            num_host_blocks=ready.num_host_blocks, max_num_seqs=self.config.scheduler.max_num_seqs, device=self.executor.device_name,
            device_text=ready.device_text, dtype=ready.dtype, kv_groups=ready.kv_groups, max_prompt_tokens=self.scheduler.longest_request,
            op_table=ready.op_table, memory_plan=ready.memory_plan, load_s=ready.load_s, warmup_s=ready.warmup_s, num_programs=ready.num_programs,
            program_folder=ready.program_folder, max_logit_bias=0 if ready.buckets.is_exact else BIAS_BUCKET,
            supports_host_callbacks=self.executor.supports_host_callbacks, structured_outputs=self._grammar_states,
        )  # fmt: skip

    # ------------------------------------------------------------ requests
    def add(self, request: EngineRequest) -> None:
        """Queue a request; a refusal comes out of the next step."""
        self._ready_outputs += self.scheduler.add_request(request)

    def abort(self, abort: Abort) -> None:
        """End a request or a branch; its terminal output comes out of the next step, and the counters without it."""
        self._ready_outputs += self.scheduler.abort(abort)
        self._unreported = True

    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._in_flight or self._ready_outputs or self._unreported) or self.scheduler.has_unfinished()

    # ------------------------------------------------------------ the loop
    def step(self) -> EngineOutputs:
        """Launch what fits in flight, then read the oldest step.

        Raises:
            EngineDead: a fault after which the device or its state cannot be trusted.
            KeyboardInterrupt, SystemExit: what a step raised to end the program. Its requests have failed, and the next step says so.
        """
        started = time.monotonic()
        outputs, self._ready_outputs, self._unreported = self._ready_outputs, [], False
        outputs += self.scheduler.end_overdue()
        outputs += self.scheduler.settle_constraints()
        while len(self._in_flight) < self.max_in_flight:
            out = self.scheduler.schedule()
            if out is None:
                break
            try:
                self._in_flight.append((out, self.executor.execute(out)))
            except BaseException as fault:  # noqa: BLE001  any fault of a step is judged by the canary
                outputs += self._step_failed(out, fault)
                self._pass_on(fault, outputs)
                break
        tokens = self._read_oldest(outputs) if self._in_flight else 0
        return EngineOutputs(tuple(outputs), self.scheduler.stats(), time.monotonic() - started, tokens, self._compiles)

    def _read_oldest(self, outputs: list[EngineOutput]) -> int:
        """Add the oldest step's outputs to `outputs`. Returns how many tokens it computed."""
        out, pending = self._in_flight.popleft()
        try:
            result = pending.result()
        except BaseException as fault:  # noqa: BLE001  any fault of a step is judged by the canary
            outputs += self._step_failed(out, fault)
            self._pass_on(fault, outputs)
            return 0
        self._compiles = result.compiles_after_warmup
        outputs += self.scheduler.update_from_output(out, result)
        return out.num_tokens

    def _pass_on(self, fault: BaseException, outputs: list[EngineOutput]) -> None:
        """Raise what is to end the program, not a step; the outputs come out of the next step, if there is one."""
        if not isinstance(fault, Exception):
            self._ready_outputs = outputs
            raise fault

    def _step_failed(self, out: SchedulerOutput, fault: BaseException) -> list[EngineOutput]:
        """Fail that step's requests; go on only if every worker passes a canary."""
        log.error("step %d failed: %s: %s", out.step_id, type(fault).__name__, fault, exc_info=fault)
        if isinstance(fault, WorkerDied):
            raise EngineDead(f"a worker died: {fault}") from fault
        outputs = self.scheduler.fail_step(out, f"the step that served this request failed: {type(fault).__name__}: {fault}")
        try:
            self.executor.canary()
        except Exception as error:  # noqa: BLE001  any fault of a step is judged by the canary
            raise EngineDead(f"step {out.step_id} failed ({fault}) and the device did not pass the check that followed: {error}") from fault
        return outputs

    def check_workers(self) -> None:
        """Raises EngineDead when a worker is gone. Only while nothing is in flight."""
        try:
            self.executor.check_idle()
        except WorkerDied as death:
            raise EngineDead(f"a worker died: {death}") from death

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks that no request holds."""
        self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for grammars in self._grammars.values():
            grammars.close()
        self.executor.shutdown()
