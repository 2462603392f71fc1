"""The one model runner: turns a step's plan into padded inputs, runs the programs, hands back tokens.

Owns: device state (KV, last tokens, history), compiled programs, the host tier's tensors.
Reads: `batch`, `programs`, `shapes`, `messages`, the graph runner.
Never: names a device; schedules; allocates or frees a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from oarlock.backend_api.runtime import Device, GraphRunner, Ops
from oarlock.errors import WorkerError
from oarlock.messages import SchedulerOutput
from oarlock.runtime.batch import Batch
from oarlock.runtime.pending import LogprobsPart, PendingStep
from oarlock.runtime.pooling import pool_prompts
from oarlock.runtime.programs import Key, ModelPrograms, ProgramSpec, step_axes
from oarlock.runtime.sampling_inputs import apply_processors, choose_program, logprob_wants, sample_inputs
from oarlock.runtime.warmup import warm
from oarlock.shapes import ShapePolicy, StepKey

MOVED = 16  # blocks that a block program moves at once, where shapes are exact
PICKS = 64  # prompt positions whose logits are computed at once, where shapes are exact


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes that shape the runner's buffers."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    max_logprobs: int  # -1: the whole vocabulary may be asked for
    max_step_tokens: int = 0  # new tokens of a step, for warm-up; 0: not known


class ModelRunner:
    """One per worker. Not thread-safe: steps are launched from one thread."""

    def __init__(self, device: Device, graph: GraphRunner, model: Any, weights: Any, ops: Ops, policy: ShapePolicy, limits: RunnerLimits, dtype: torch.dtype) -> None:
        self.device, self.graph, self.model, self.weights, self.ops = device, graph, model, weights, ops
        self.policy, self.limits, self.dtype = policy, limits, dtype  # dtype: of the cache
        self.null_row = limits.max_num_seqs
        self.num_groups = len(model.groups)
        self.programs = ModelPrograms(model, ops, self.null_row).specs()
        self.compiled: dict[tuple[str, Key], Callable[..., Any]] = {}
        self.runs: Counter[str] = Counter()
        self.compiles_after_warmup = 0
        self.is_warm = False
        self._padded = {self.programs["forward"].key(**step_axes(key)) for key in list(policy.keys())}
        max_blocks = max(-(-limits.max_model_len // model.block_size) + 2, *policy.table.blocks, 0)
        self.batch = Batch(limits.max_num_seqs, limits.max_model_len, max_blocks, self.num_groups, model.vocab_size)
        self._nothing = device.to_device(torch.zeros(0, dtype=torch.int32))  # host inputs of programs without any
        self.state = self._new_state()
        self.host_tier = self._new_host_tier()

    # ------------------------------------------------------------ state
    @property
    def num_tensors(self) -> int:
        return max(len(g.layers) for g in self.model.groups)

    def _new_state(self) -> dict[str, Any]:
        where = self.device.torch_device
        joined = self.num_tensors if self.model.joined else 1
        shapes = self.model.attentions[0].kv_layout(self.limits.num_blocks * joined)
        # Not zeroed: attention never reads a slot before it is written, and touching gigabytes at start costs seconds and memory.
        kv = [tuple(torch.empty(s, dtype=self.dtype, device=where) for s in shapes) for _ in range(self.num_tensors // joined)]
        last = torch.zeros(self.null_row + 1, dtype=torch.int32, device=where)
        width = 1 if self.policy.table.is_exact else self.limits.max_model_len + 1
        return {"kv": kv, "last": last, "history": torch.zeros(self.null_row + 1, width, dtype=torch.int32, device=where)}

    def _new_host_tier(self) -> list[tuple[torch.Tensor, ...]]:
        if not self.limits.num_host_blocks:
            return []
        shapes = self.model.attentions[0].kv_layout(self.limits.num_host_blocks)
        sizes = [prod(shape) for shape in shapes] * self.num_tensors
        # In one piece: torch rounds pinned memory up to a power of two, which the whole may be, and a layer's part is not.
        parts = iter(torch.empty(sum(sizes), dtype=self.dtype, pin_memory=self.device.capabilities.pinned_memory).split(sizes))
        return [tuple(next(parts).view(shape) for shape in shapes) for _ in range(self.num_tensors)]

    def history_width(self, needed: int) -> int:
        """Width that penalties read. Exact shapes: grown to what the batch needs, by doubling; else fixed."""
        have = self.state["history"].shape[1]
        if have >= needed:
            return needed if self.policy.table.is_exact else have
        width = min(max(needed, 2 * have, 256), self.limits.max_model_len + 1)
        grown = torch.zeros(self.null_row + 1, width, dtype=torch.int32, device=self.device.torch_device)
        grown[:, :have] = self.state["history"]
        self.state["history"] = grown
        return needed

    # ------------------------------------------------------------ programs
    def run(self, name: str, axes: dict[str, int], host: dict[str, Any], device_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one program through the serving path; warm-up uses it too.

        Raises:
            WorkerError: a key that warm-up did not compile, on a device that refuses those.
        """
        spec = self.programs[name]
        key = spec.key(**axes)
        values = spec.pack(key, host)
        packed = self.device.to_device(torch.from_numpy(values)) if values.size else self._nothing
        names = [n for n in spec.writes if n != "history" or key.history]
        written = {n: self.state[n] for n in names}
        read = {n: self.state[n] for n in spec.reads}
        args = (self.weights, written, read, packed, device_inputs or {})
        fn = self.compiled.get((name, key)) or self._compile(spec, key, args)
        self.runs[name] += 1
        new, out = fn(*args)
        self.graph.retire(written, new)
        self.state.update(new)
        return out

    def _compile(self, spec: ProgramSpec, key: Key, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Where only decodes are padded, their `forward` is what the graph runner gets: all else has the shape of its step and runs as it is."""
        exact, fn = self.policy.table.is_exact, spec.pure(key, self.ops)
        is_padded = not exact or (spec.name == "forward" and key in self._padded)
        if self.is_warm and is_padded:
            self.compiles_after_warmup += 1
            if self.graph.refuses_unwarmed():
                raise WorkerError(f"program {spec.name} {key} was not warmed up; warm-up derives its list from the shape policy")
        if is_padded or not self._padded:
            fn = self.graph.compile(fn, args, f"{spec.name}-{abs(hash(key)):x}")
        if is_padded or len(self.compiled) < 4096:
            self.compiled[spec.name, key] = fn
        return fn

    @torch.no_grad()
    def warmup(self) -> None:
        """Run every program for every key that the policy can yield. Afterwards a new key is counted, or refused."""
        warm(self)
        self.is_warm = True

    # ------------------------------------------------------------ a step
    @torch.no_grad()
    def execute(self, out: SchedulerOutput) -> PendingStep:
        """Launch one step; nothing is read back before `PendingStep.result`."""
        self.batch.apply(out)
        self._move_blocks(out)
        self._load_histories(out)
        if not out.rows:
            return PendingStep(self, out, [], None)
        rows, batch = out.rows, self.batch
        decodes = batch.num_decodes(rows)
        blocks = batch.blocks_needed(rows, self.model.block_size)
        key = self.policy.fit(decodes, [r.num_tokens for r in rows[decodes:]], blocks)
        axes = step_axes(key)
        hidden = self.run("forward", axes, batch.forward_inputs(rows, key, self.model.block_size, self.null_row))
        pending = PendingStep(self, out, [], None)
        pending.prompt = self._prompt_logprobs(out, key, axes, hidden["all"])
        pending.pooled = pool_prompts(self, out, key, hidden["all"])
        if any(r.emits for r in rows):
            self._sample(pending, key, hidden["hidden"])
        return pending

    def _sample(self, pending: PendingStep, key: StepKey, hidden: torch.Tensor) -> None:
        rows, batch = pending.out.rows, self.batch
        places = batch.places(rows, key)
        emitting = [(r, batch.rows[r.branch_id], int(places[n])) for n, r in enumerate(rows) if r.emits]
        raw = self.run("head", {"rows": key.rows}, {}, {"hidden": hidden})["logits"]
        logits = raw
        if any(row.processors for _, row, _ in emitting):
            logits = apply_processors(self, emitting, raw, pending)
        name, axes = choose_program(self, emitting, key.rows)
        host = sample_inputs(self, emitting, name, axes)
        tokens = self.run(name, axes, host, {"logits": logits})["tokens"]
        pending.emitted = [(r.branch_id, row.row, place) for r, row, place in emitting]
        pending.tokens = self.device.begin_read(tokens)
        wants = logprob_wants(self, emitting)
        if wants:
            top = max(top for _, top in wants.values())
            index = [place for place, _ in wants.values()]
            pending.logprobs = self._logprobs(key.rows, top, index, [-1] * len(index), {"logits": raw, "sampled": tokens})
            pending.wants = wants

    def _logprobs(self, rows: int, top: int, index: list[int], targets: list[int], device_inputs: dict[str, Any]) -> LogprobsPart:
        exact = self.policy.table.is_exact
        picks = len(index) if exact else rows
        if not exact:
            top = self.top_bucket(top)
        pad = picks - len(index)
        host = {"index": index + [0] * pad, "targets": targets + [0] * pad}
        found = self.run("logprobs", {"rows": rows, "picks": picks, "top": top}, host, device_inputs)
        return LogprobsPart({name: self.device.begin_read(tensor) for name, tensor in found.items()}, targets)

    def top_bucket(self, top: int) -> int:
        """Entries that the logprobs program gives on a bucketed device: enough for beams and for max_logprobs, or all."""
        usual = min(max(32, self.limits.max_logprobs), self.model.vocab_size)
        return usual if top <= usual else self.model.vocab_size

    def _prompt_logprobs(self, out: SchedulerOutput, key: StepKey, axes: dict[str, int], every: torch.Tensor) -> list[tuple[int, int, int, LogprobsPart]]:
        """(branch id, entries wanted, how many of the part's rows, part) for chunks whose prompt log-probabilities were asked for."""
        found: list[tuple[int, int, int, LogprobsPart]] = []
        places, starts = self.batch.places(out.rows, key), None
        for n, row in enumerate(out.rows):
            owner = self.batch.rows[row.branch_id]
            wanted = owner.new.params.prompt_logprobs
            last = min(row.start + row.num_tokens, owner.num_prompt - 1)
            if wanted is None or last <= row.start:
                continue
            if starts is None:
                starts = self.batch.query_starts(out.rows, key)
            top = self.model.vocab_size if wanted < 0 else wanted
            index = [int(starts[places[n]]) + i for i in range(last - row.start)]
            targets = [int(t) for t in self.batch.tokens[owner.row, row.start + 1 : last + 1]]
            found += [(row.branch_id, top, count, part) for count, part in self._prompt_parts(key, index, targets, top, every)]
        return found

    def _prompt_parts(self, key: StepKey, index: list[int], targets: list[int], top: int, every: torch.Tensor) -> list[tuple[int, LogprobsPart]]:
        exact = self.policy.table.is_exact
        found = []
        size = PICKS if exact else self.policy.table.out_rows[0]
        for at in range(0, len(index), size):
            part, wanted = index[at : at + size], targets[at : at + size]
            picks = len(part) if exact else size
            host = {"index": part + [0] * (picks - len(part))}
            hidden = self.run("select", {"tokens": key.tokens, "picks": picks}, host, {"all": every})["hidden"]
            logits = self.run("head", {"rows": picks}, {}, {"hidden": hidden})["logits"]
            sampled = torch.zeros(picks, dtype=torch.int32, device=self.device.torch_device)
            found.append((len(part), self._logprobs(picks, top, list(range(len(part))), wanted, {"logits": logits, "sampled": sampled})))
        return found

    # ------------------------------------------------------------ blocks and history
    def copy_sizes(self, count: int) -> list[int]:
        """How many blocks each block program moves: few at a time, for they are copied on the device; fixed pieces where shapes are bucketed."""
        if not self.policy.table.is_exact:
            return [4] * -(-count // 4)
        return [MOVED] * (count // MOVED) + [count % MOVED] * bool(count % MOVED)

    def _move_blocks(self, out: SchedulerOutput) -> None:
        """In this order: swap_out, block_copy, swap_in. Padding moves the null block onto itself."""
        for part, size in self._pieces(out.swap_out):
            got = self.run("gather_blocks", {"copies": size}, {"ids": _column(part, 0, size)})["blocks"]
            host_ids = torch.tensor([host for _, host in part])
            for tier, blocks in zip(self.host_tier, got, strict=True):
                for store, block in zip(tier, blocks, strict=True):
                    store.index_put_((host_ids,), self.device.to_host(block)[: len(part)])
        for part, size in self._pieces(out.block_copy):
            self.run("block_copy", {"copies": size}, {"source": _column(part, 0, size), "destination": _column(part, 1, size)})
        for part, size in self._pieces(out.swap_in):
            host_ids = torch.tensor(_column(part, 0, size))
            blocks = [tuple(self.device.to_device(store.index_select(0, host_ids)) for store in tier) for tier in self.host_tier]
            self.run("scatter_blocks", {"copies": size}, {"ids": _column(part, 1, size)}, {"blocks": blocks})

    def _pieces(self, moves: tuple[tuple[int, int], ...]) -> list[tuple[tuple[tuple[int, int], ...], int]]:
        found, at = [], 0
        for size in self.copy_sizes(len(moves)) if moves else []:
            found.append((moves[at : at + size], size))
            at += size
        return found

    def _load_histories(self, out: SchedulerOutput) -> None:
        """Upload the tokens of rows that need penalties, once per stay."""
        for scheduled in out.rows:
            row = self.batch.rows[scheduled.branch_id]
            if not row.needs_history or row.history_loaded:
                continue
            known = int(self.batch.known[row.row])
            self.history_width(known + 1)  # grows the buffer where it must
            width = self.state["history"].shape[1]  # whole rows are written, whatever this batch reads
            tokens = np.zeros((1, width), np.int32)
            tokens[0, :known] = self.batch.tokens[row.row, :known]
            self.run("load_history", {"rows": 1, "history": width}, {"rows": [row.row], "tokens": tokens})
            row.history_loaded = True

    def close(self) -> None:
        """Drop state, host tier, weights and programs; the runner is of no use afterwards."""
        for large in (self.state, self.host_tier, self.weights, self.compiled):
            large.clear()


def _column(moves: tuple[tuple[int, int], ...], which: int, size: int) -> list[int]:
    return [m[which] for m in moves] + [0] * (size - len(moves))
