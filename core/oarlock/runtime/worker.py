"""`Worker`: one rank. Makes the device, the ops, the model and the runner, and answers the engine.

Owns: weights, KV tensors, compiled programs (through its runner).
Reads: `config`, `model_summary`, `memory_plan`, `plugins`, `backend_api.runtime`.
Never: names a device; decides what runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

import oarlock.runtime.reference  # noqa: F401  registers core's ops
from oarlock import extensions
from oarlock.backend_api.runtime import (
    Attention,
    AttentionParams,
    Communicator,
    Device,
    DistributedCommunicator,
    GraphRunner,
    IdentityCommunicator,
    Ops,
    Quantization,
)
from oarlock.backend_api.runtime.ops import resolve
from oarlock.config.device_rules import check_device, notes_for
from oarlock.config.resolve import token_budget
from oarlock.config.sections import EngineConfig
from oarlock.errors import ConfigError, ModelError, OutOfDeviceMemory, PluginError, UnsupportedByBackend
from oarlock.memory_plan import MemoryNeeds, MemoryPlan, gib, plan_worker
from oarlock.messages import SchedulerOutput, WorkerReady
from oarlock.model_summary import ModelSummary
from oarlock.plugins import collect, worker_plugins
from oarlock.quantization import choose_method, methods, settings_for
from oarlock.runtime.choice import best, choose_attention, choose_graph_runner, choose_ops, rejections
from oarlock.runtime.layers.spec import WeightSpec
from oarlock.runtime.loader import open_checkpoint, progress
from oarlock.runtime.measured import Measured, measure
from oarlock.runtime.model_runner import ModelRunner, RunnerLimits
from oarlock.runtime.models import FAMILIES, build_model
from oarlock.runtime.pending import PendingStep
from oarlock.runtime.quantization.kv_cache import Scales, cache_dtype, layer_scales
from oarlock.runtime.warmup import canary
from oarlock.runtime.weights import WeightLoader
from oarlock.shapes import BucketTable, ShapePolicy

log = logging.getLogger("oarlock.worker")
DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"}


def choose_dtype(asked: str, summary: ModelSummary, device: Device) -> str:
    """The model's dtype. `auto`: the checkpoint's if the device is fast in it, else the device's preferred one.

    A GGUF file of quantised blocks has no dtype: there `auto` is what the device prefers to multiply them in, if it says so.

    Raises:
        UnsupportedByBackend: the device does not compute in the dtype that was asked for.
    """
    caps = device.capabilities
    if asked != "auto":
        name = DTYPES[asked]
        if name not in caps.dtypes:
            raise UnsupportedByBackend(f"--dtype {asked}: {device.describe()} computes in {', '.join(caps.dtypes)}")
        return name
    if summary.is_gguf_quantised and caps.gguf_dtype:
        log.info("dtype auto: %s, in which the device multiplies quantised GGUF blocks", caps.gguf_dtype)
        return caps.gguf_dtype
    fast, checkpoint = caps.fast_dtypes or caps.dtypes, summary.dtype
    chosen = checkpoint if checkpoint in fast else caps.dtypes[0]
    log.info("dtype auto: %s (the checkpoint is in %s; the device is fast in %s)", chosen, checkpoint, ", ".join(fast))
    return chosen


class Worker:
    """Created inside the process (or thread) that computes. Calls come from one thread."""

    def __init__(self, config: EngineConfig, summary: ModelSummary, device_name: str, factory: str, rank: int = 0, size: int = 1, rendezvous: str = "") -> None:
        self.config, self.summary, self.device_name = config, summary, device_name
        self.rank, self.size, self.rendezvous = rank, size, rendezvous
        self.device: Device = resolve(factory)(rank, {**config.device.options, "threads": config.device.threads, "ranks": size})
        self.runner: ModelRunner | None = None

    # ------------------------------------------------------------ start
    def prepare(self) -> None:
        """Verify the device, choose implementations and join the other ranks: what all ranks do together.

        Raises:
            ConfigError, UnsupportedByBackend, PluginError: what cannot be honoured, and why.
        """
        self.device.activate()
        with self.device.context(), torch.no_grad():
            self.device.verify()
            self.device.seed(self.config.model.seed)
            self._choose_parts()

    def load(self) -> WorkerReady:
        """Plan the memory, say so, and load the model, after `prepare`.

        Raises:
            ConfigError, ModelError, UnsupportedByBackend, PluginError: what cannot be honoured, and why. Before anything large is read.
            OutOfDeviceMemory: the weights do not fit.
        """
        started = time.monotonic()
        with self.device.context(), torch.no_grad(), self._naming_memory("loading the weights"):
            self._before = free, total = self._memory()
            with self._planned(free, total) as (loader, specs):
                self._load(loader, specs)
            self._check_plan(free, total)
        table = (*self.ops.table, ("paged_attention", self.attention_name, self.attention_rejected))
        for line in rejections(table) if self.rank == 0 else ():
            log.info("%s", line)
        self._load_s = time.monotonic() - started
        return self._ready(table)

    def measure(self) -> WorkerReady:
        """After `load`, on all ranks together: what `load` answered, planned anew where the device can be looked at while the largest steps run.

        Raises:
            ConfigError: what is left holds no request.
            OutOfDeviceMemory: the largest step does not fit.
        """
        spec = best(collect(self.plugins, "memory_profiler", device=self.device), "memory profiler", device=self.device).spec
        length, scheduler = self.plan.max_model_len, self.config.scheduler
        if spec is None or not self.buckets.is_exact or self.config.cache.num_blocks_override is not None:
            return self._answer
        limits = RunnerLimits(scheduler.max_num_seqs, length, 2, 0, self.config.model.max_logprobs)
        with self.device.context(), torch.no_grad(), self._naming_memory("the largest step"):
            found = measure(resolve(spec.factory)(self.device), lambda: self._make_runner(self._graph_runner(), limits), token_budget(scheduler, length))
        log.info("rank %d: steps take %s, graphs %s, libraries %s", self.rank, gib(found.activations), gib(found.programs), gib(found.libraries))
        self.plan = self._plan(*self._before, {"weights": self._planned_bytes("weights")}, found)
        return self._ready(self._answer.op_table)

    def _ready(self, table: tuple[tuple[str, str, str], ...]) -> WorkerReady:
        caps, self.buckets = self.device.capabilities, self._buckets(self.plan.max_model_len)
        self._answer = WorkerReady(
            capabilities=caps,
            kv_groups=self.model.groups,
            block_size=self.block_size,
            num_blocks=self.plan.num_blocks,
            num_host_blocks=self.plan.num_host_blocks,
            max_model_len=self.plan.max_model_len,
            dtype=self.dtype_name,
            device_text=self.device.describe(),
            buckets=self.buckets,
            op_table=table,
            memory_plan=(*self.plan.rows, ("limit", 0, self.plan.limit)),
            threads=torch.get_num_threads(),
            load_s=self._load_s,
            program_folder=self.graph.kept_in(),
        )
        return self._answer

    def preview(self) -> MemoryPlan:
        """The plan that `load` would begin with, after `prepare`. Nothing is loaded. Raises as `load`."""
        with self.device.context(), torch.no_grad(), self._planned(*self._memory()):
            return self.plan

    @contextlib.contextmanager
    def _planned(self, free: int, total: int) -> Iterator[tuple[WeightLoader, list[WeightSpec]]]:
        """The plan is made; what loads the weights, and which."""
        quantization = self._quantization()
        has_kernels = all(f"linear_{scheme}" in self.ops.prepare for scheme in ("int4", "int8"))  # a reference dequantises at every step
        checkpoint = open_checkpoint(self.summary, self.config.model, keeps_codes=has_kernels)
        try:
            specs = self._build(layer_scales(self.config, self.summary, checkpoint, self.rank), quantised=quantization is not None)
            loader = WeightLoader(checkpoint, self.device, self.dtype, self.rank, self.size, self.ops.prepare, quantization or checkpoint.quantization)
            self.plan = self._plan(free, total, {**loader.measure(specs), "rope": self._table_bytes()})
            yield loader, specs
        finally:
            checkpoint.close()

    def _choose_parts(self) -> None:
        """dtype, block size, communicator, graph runner and ops: everything chosen among plugins, once."""
        caps = self.device.capabilities
        self.plugins = worker_plugins(self.device_name)
        self.dtype_name = choose_dtype(self.config.model.dtype, self.summary, self.device)
        self.dtype = getattr(torch, self.dtype_name)
        self.kv_dtype = cache_dtype(self.config.cache.kv_cache_dtype, self.dtype)
        check_device(caps, self.config, self.device.describe())
        self.block_size = self.config.cache.block_size or caps.block_sizes[0]
        communicators = collect(self.plugins, "communicator", device=self.device)
        if self.rank == 0:
            for note in notes_for(caps, self.config, custom_all_reduce=bool(communicators)):
                log.warning("%s", note)
        self.comm = self._communicator([] if self.config.device.disable_custom_all_reduce else communicators)
        self.graph = self._graph_runner()
        self.ops: Ops = choose_ops(collect(self.plugins, "kernels", device=self.device), self.device, self.dtype_name)
        self.attention_name, self.attention_rejected = "reference", ""
        self._partial_attention: list[str] = []  # implementations that serve some groups of this model, in another layout than the rest
        self._attention_served: set[str] = set()

    def _graph_runner(self) -> GraphRunner:
        records = [] if self.config.device.enforce_eager else collect(self.plugins, "graph_runner", device=self.device)
        return choose_graph_runner(records, self.device)

    def _communicator(self, offered: list[Any]) -> Communicator:
        if self.size == 1:
            return IdentityCommunicator(0, 1)
        chosen, names = best(offered, "communicator", device=self.device), self.device.capabilities.collectives
        spec = chosen.spec
        if chosen.rejected and self.rank == 0:
            log.info("collectives: served by %s, not by %s", spec.name if spec else ", ".join(names) or "none", chosen.rejected)
        if (spec is not None or names) and not self.rendezvous:
            return IdentityCommunicator(self.rank, self.size)  # this rank plans alone
        if spec is not None:
            return resolve(spec.factory)(self.rank, self.size, self.rendezvous)
        if not names:
            raise UnsupportedByBackend(f"--tensor-parallel-size {self.size}: {self.device.describe()} declares no collectives; use 1")
        return DistributedCommunicator(self.rank, self.size, names[0], self.rendezvous)

    def make_attention(self, params: AttentionParams, kind: str) -> Attention:
        """The attention implementation for one KV cache group: the supported one of highest priority, else the reference."""
        records = [record for record in collect(self.plugins, "attention", device=self.device) if record.name not in self._partial_attention]
        made, self.attention_name, rejected = choose_attention(
            records, self.device, params, kind, self.dtype_name, self.block_size, self.config.cache.kv_cache_dtype
        )
        partial = (f"{name}: serves some layers of this model only, in a layout of its own, and all layers share the cache" for name in self._partial_attention)
        self.attention_rejected = " | ".join(filter(None, (rejected, *partial)))
        self._attention_served.add(self.attention_name)
        return made

    def _build(self, kv_scales: Scales, *, quantised: bool) -> list[WeightSpec]:
        """The model without weights; what weights it wants."""
        family = extensions.find("model", self.summary.architecture, self.device_name, own=self.summary.architecture in FAMILIES)
        given = extensions.load(family) if family is not None else None
        while True:
            self._attention_served = set()
            self.model, specs = build_model(
                self.summary, self.ops, self.comm, self.make_attention, self.block_size, self.dtype, given,
                remote_code=self.config.model.trust_remote_code, kv_scales=kv_scales, quantised=quantised,
            )  # fmt: skip
            of_plugins = self._attention_served - {"reference"}
            if not of_plugins or len({attention.kv_layout(1) for attention in self.model.attentions}) == 1:
                return specs
            # Groups share their tensors, so one layout must do for all: without the best one, until it does.
            priority = {record.name: record.priority for record in collect(self.plugins, "attention", device=self.device)}
            self._partial_attention.append(max(of_plugins, key=lambda name: priority[name]))

    def _quantization(self) -> Quantization | None:
        """What reads the checkpoint's quantised weights, where it has any. Raises as `choose_method`; ModelError for settings that are not read."""
        method = choose_method(self.config.model, self.summary, methods(self.plugins))
        if method is None:
            return None
        try:
            made: Quantization = resolve(method.factory)(settings_for(method, self.summary))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ModelError(f"{self.summary.path} is quantised with settings of {method.name} that cannot be read: {error}") from error
        return made

    def _table_bytes(self) -> int:
        return self.model.table_bytes(self.summary.max_model_len)

    def _load(self, loader: WeightLoader, specs: list[WeightSpec]) -> None:
        self.weights = loader.load(specs, progress if self.rank == 0 else lambda unseen: unseen)
        if self.model.joined:
            self.weights["layers"] = self.ops.prepare["decoder_stack"](self.weights["layers"])
        tables = self.model.tables(self.summary.max_model_len)
        self.weights["rope"] = {name: self.device.place(f"rope.{name}", table, "none") for name, table in tables.items()}

    # ------------------------------------------------------------ memory and shapes
    def _memory(self) -> tuple[int, int]:
        try:
            return self.device.memory_info()
        except NotImplementedError:
            if self.config.cache.kv_cache_bytes is None and self.config.cache.num_blocks_override is None:
                raise ConfigError(f"{self.device.describe()} cannot tell its free memory; give --kv-cache-memory or --num-blocks-override") from None
            return 1 << 62, 1 << 62

    @contextlib.contextmanager
    def _naming_memory(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"{self.device.describe()} has no room for {what}: {error}. Take a smaller model or dtype, more devices (--tensor-parallel-size), "
                "or lower --device-memory-utilization, --max-num-seqs or --max-num-batched-tokens"
            ) from error

    def _buckets(self, max_model_len: int) -> BucketTable:
        caps, s = self.device.capabilities, self.config.scheduler
        if caps.dynamic_shapes and self.config.device.enforce_eager:
            return BucketTable()
        captured = self.config.device.max_seq_len_to_capture if caps.execution == "capture" and caps.dynamic_shapes else max_model_len
        longest = -(-min(max_model_len, captured) // self.block_size)
        found = BucketTable(**self.device.buckets(s.max_num_seqs, token_budget(s, max_model_len), longest))
        if not caps.dynamic_shapes and found.is_exact:
            raise PluginError(f"{self.device_name} declares dynamic_shapes=False and gives no buckets()")
        return found

    def _plan(self, free: int, total: int, weights: dict[str, int], measured: Measured | None = None) -> MemoryPlan:
        """The plan for weights, and tables beside them, of so many bytes. Rank 0 logs it."""
        caps, item = self.device.capabilities, self.dtype.itemsize
        shapes = self.model.attentions[0].kv_layout(2)
        per_tensor = sum(torch.Size(shape).numel() // 2 for shape in shapes) * self.kv_dtype.itemsize
        tensors = max(len(g.layers) for g in self.model.groups)
        needs = MemoryNeeds(
            weights_bytes=sum(weights.values()),
            activation_bytes=measured.activations if measured else 0,
            program_bytes=measured.programs + measured.libraries if measured else 0,
            is_measured=measured is not None,
            bytes_per_block=per_tensor * tensors,
            block_size=self.block_size,
            available_bytes=free,
            total_bytes=total,
            host_is_device=caps.host_is_device,
            groups=self.model.groups,
        )
        plan = plan_worker(needs, self.config, self.summary, item_bytes=item, default_swap_bytes=caps.default_swap_bytes)
        if self.rank == 0:
            log.info("%s", plan.table())
        return plan

    def _check_plan(self, free: int, total: int) -> None:
        """Plan anew if the weights take more of a device than their shapes say, as packed ones may. A host's memory has other users.

        Raises:
            ConfigError: what is left holds no request.
        """
        used = free - self._memory()[0]
        planned = self._planned_bytes("weights")
        if used > planned and not self.device.capabilities.host_is_device:
            log.info("rank %d: the weights take %s, planned were %s", self.rank, gib(used), gib(planned))
            self.plan = self._plan(free, total, {"weights": used})

    def _planned_bytes(self, row: str) -> int:
        return next(size for what, size, _ in self.plan.rows if what == row)

    def _make_runner(self, graph: GraphRunner, limits: RunnerLimits) -> ModelRunner:
        return ModelRunner(self.device, graph, self.model, self.weights, self.ops, ShapePolicy(self.buckets), limits, self.kv_dtype)

    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        """Allocate the KV cache with the agreed sizes and warm up. Returns (seconds, programs). Raises OutOfDeviceMemory."""
        started = time.monotonic()
        self.buckets = self._buckets(max_model_len)  # another rank's memory may have shortened the context
        s, budget = self.config.scheduler, token_budget(self.config.scheduler, max_model_len)
        limits = RunnerLimits(s.max_num_seqs, max_model_len, num_blocks, num_host_blocks, self.config.model.max_logprobs, budget)
        with self.device.context(), self._naming_memory(f"a KV cache of {num_blocks} blocks, and the largest step"):
            self.runner = self._make_runner(self.graph, limits)
            self.runner.warmup()
            self.device.synchronise()
        return time.monotonic() - started, len(self.runner.compiled)

    # ------------------------------------------------------------ serving
    def execute(self, out: SchedulerOutput) -> PendingStep:
        """Launch one step."""
        assert self.runner is not None
        with self.device.context():
            return self.runner.execute(out)

    def read(self, pending: PendingStep) -> Any:
        """Wait for a launched step."""
        with self.device.context():
            return pending.result()

    def canary(self) -> None:
        """After a fault: prove that the device and its state still work.

        Raises:
            RuntimeError: they do not; the engine must end.
        """
        with self.device.context():
            self.device.verify()
            canary(self.runner)

    def close(self) -> None:
        """Drop everything large, even where a fault's traceback still refers to the runner, and leave the process group."""
        if self.runner is not None:
            self.runner.close()
        self.runner = None
        self.weights = {}
        if getattr(self, "comm", None) is not None:
            self.comm.close()
