"""The frozen records that layers exchange. Standard library only.

Owns: the shape of every record between frontend, engine, executor and worker.
Reads: `sampling_params`, `pooling_params`.
Never: has behaviour beyond small derived values; never holds a tensor.

Direction: EngineRequest -> scheduler -> SchedulerOutput -> worker -> ModelRunnerOutput -> scheduler -> EngineOutput.
The one message back is Abort.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from oarlock.backend_api.capabilities import Capabilities
from oarlock.kv_spec import KVGroup
from oarlock.pooling_params import PoolingParams
from oarlock.sampling_params import SamplingParams
from oarlock.shapes import BucketTable

FinishReason = Literal["stop", "length", "abort", "error"]


# ---------------------------------------------------------------- frontend <-> engine
@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One validated, tokenised request. n > 1, best_of and beams are branches that the engine forks."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # never empty, every id in [0, vocab_size)
    params: SamplingParams  # max_tokens is set by the frontend; None only under beam search: as many as the cache holds for all beams
    eos_token_ids: tuple[int, ...] = ()  # empty when ignore_eos
    arrival_s: float = 0.0  # time.time() of the front end
    priority: int = 0  # lower runs first, only under the priority policy
    cache_salt: str | None = None
    adapter: str | None = None  # room kept for LoRA
    mm_inputs: None = None  # room kept for images
    pooling: PoolingParams | None = None  # the prompt becomes a vector and no token is generated, whatever params say
    trace: tuple[str, ...] = ()  # for observers: (the client's W3C traceparent or "", its name for the request)
    owner: int = 0  # whose it is: number of the API key; requests of different owners share fairly under the fair policy


@dataclass(frozen=True, slots=True)
class Abort:
    """Ask the engine to end a request. `stop`: a stop string was found (not counted as an abort).

    `index` None ends every branch, else that branch only.
    """

    request_id: str
    reason: Literal["abort", "stop"] = "abort"
    index: int | None = None


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position, of the raw distribution (log-softmax of untouched logits). Finite or None."""

    token_id: int
    logprob: float | None
    rank: int  # 1 is the most probable token
    top: tuple[tuple[int, float | None], ...] = ()  # (token id, logprob), best first; up to k entries


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error laid to one request, as it travels to the front end."""

    message: str
    kind: Literal["request", "step", "engine"] = "request"
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step added to one branch. A branch's last output has a finish_reason; exactly one has."""

    request_id: str
    index: int = 0  # branch number, 0 .. best_of - 1
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None  # one per new token, when asked for
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None  # whole prompt, once, on branch 0's first output
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id; None for EOS
    cumulative_logprob: float | None = None  # sum over generated tokens so far, when logprobs are computed
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    first_scheduled_s: float | None = None  # time.time(), on a branch's first output
    error: ErrorInfo | None = None  # with finish_reason "error"
    pooled: bytes | None = None  # a vector of float32, lowest byte first, where one was asked for


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters after a step; totals are since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks: int = 0  # usable blocks: the null block not counted
    num_used_blocks: int = 0  # held by requests; blocks kept only for prefix reuse do not count
    num_cached_blocks: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed, those of preempted requests again


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """Everything one step says to the front end: one message for all streams."""

    outputs: tuple[EngineOutput, ...]
    stats: SchedulerStats
    step_s: float = 0.0  # wall time of the step that produced this
    num_step_tokens: int = 0  # tokens that this step computed: of prompts, and of answers
    compiles_after_warmup: int = 0


# ---------------------------------------------------------------- scheduler -> worker
@dataclass(frozen=True, slots=True)
class NewRequest:
    """A branch that the worker has not seen, or has forgotten because it was preempted. The full record, once."""

    branch_id: int  # unique for the life of the engine
    token_ids: tuple[int, ...]  # every token known on the host: prompt, then generated ones of a resumed branch
    num_prompt_tokens: int
    params: SamplingParams
    index: int  # branch number within its request: the "choice" of the random key
    seed: int  # int32 bits of the random key; derived by the engine when the request has none
    block_ids: tuple[tuple[int, ...], ...]  # per KV group, in order
    adapter: str | None = None
    mm_inputs: None = None
    draft_tokens: tuple[int, ...] = ()
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """What changed for a branch that the worker knows."""

    branch_id: int
    new_block_ids: tuple[tuple[int, ...], ...] = ()  # per KV group, appended; () when none in any group
    replaced: tuple[tuple[int, int, int], ...] = ()  # (group, index in table, block id): copy-on-write, or null block for a passed window
    new_token_ids: tuple[int, ...] = ()  # tokens the *host* decided (beams, logits processors); appended to the history


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One branch's part of a step: compute tokens [start, start + num_tokens)."""

    branch_id: int
    start: int  # position of the first token; all before it have (or will have had) their KV written
    num_tokens: int
    emits: bool  # the last of these tokens is the last known one: sample after it
    banned_token_ids: tuple[int, ...] = ()  # for this step only: min_tokens (EOS, stop ids), bad_words
    mask: bytes = b""  # structured output: one bit a token of the vocabulary, padded to words of 32, lowest bit first; b"": every token


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. The worker applies, in this order: finished, new, cached, swap_out, block_copy, swap_in, forward."""

    step_id: int
    rows: tuple[ScheduledRow, ...]  # decode rows (one token, which is the branch's last known) first, then chunks
    new_requests: tuple[NewRequest, ...] = ()
    cached_requests: tuple[CachedRequest, ...] = ()
    finished: tuple[int, ...] = ()  # branch ids whose rows the worker forgets (finished or preempted)
    swap_out: tuple[tuple[int, int], ...] = ()  # (device block, host block)
    block_copy: tuple[tuple[int, int], ...] = ()  # (source, destination), on the device
    swap_in: tuple[tuple[int, int], ...] = ()  # (host block, device block)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.rows)


# ---------------------------------------------------------------- worker -> scheduler
@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step produced, per branch. Token lists, so that speculation may return several."""

    step_id: int
    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)  # emitting branches only
    logprobs: dict[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]] = field(default_factory=dict)  # for prompt positions start+1 .. start+num_tokens of this step's chunk, those that lie within the prompt
    failed: dict[int, str] = field(default_factory=dict)  # branch id -> why (a non-finite row, a logits processor that raised)
    compiles_after_warmup: int = 0
    pooled: dict[int, bytes] = field(default_factory=dict)  # branches whose prompt is complete: EngineOutput.pooled


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker's answer to the handshake. Equal over ranks but for num_blocks, of which the smallest counts."""

    capabilities: Capabilities
    kv_groups: tuple[KVGroup, ...]
    block_size: int
    num_blocks: int  # device blocks, null block 0 included
    num_host_blocks: int
    max_model_len: int  # as asked, or what fits the memory where that was left open
    dtype: str
    device_text: str
    buckets: BucketTable
    op_table: tuple[tuple[str, str, str], ...]  # (op, implementation chosen, why others were rejected)
    memory_plan: tuple[tuple[str, int, str], ...] = ()  # (what, bytes, note)
    threads: int = 0
    load_s: float = 0.0
    warmup_s: float = 0.0
    num_programs: int = 0
    program_folder: str = ""  # GraphRunner.kept_in()


# ---------------------------------------------------------------- engine -> front end, once
@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front end must know of a started engine; sent once, after every worker's handshake."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int  # usable: the null block not counted
    num_host_blocks: int
    max_num_seqs: int
    device: str  # name of the DeviceSpec
    device_text: str  # Device.describe()
    dtype: str
    kv_groups: tuple[KVGroup, ...] = ()
    max_prompt_tokens: int = 0  # longest request (prompt + output) that can ever fit in the KV cache
    op_table: tuple[tuple[str, str, str], ...] = ()
    memory_plan: tuple[tuple[str, int, str], ...] = ()
    load_s: float = 0.0
    warmup_s: float = 0.0
    num_programs: int = 0
    program_folder: str = ""  # where they are kept for the next start; "": nowhere
    max_logit_bias: int = 0  # entries of one request; 0: as many as there are tokens
    supports_host_callbacks: bool = False  # in-process: per-request logits processors are possible
    structured_outputs: tuple[tuple[str, str], ...] = ()  # (backend, why it cannot serve or ""), the default first; (): no package has one
