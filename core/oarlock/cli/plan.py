"""`oarlock plan MODEL`: the memory plan from a checkpoint's headers and a device's claims, without loading weights.

Owns: the estimate of what loaded weights take.
Reads: `config`, `model_summary`, `plugins`, `memory_plan`, `kv_spec`.
Never: loads a weight or a heavy module. What the worker measures at start counts; this is the estimate of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oarlock.backend_api import Claims
from oarlock.config.parser import make_parser, parse
from oarlock.config.resolve import resolve, token_budget
from oarlock.config.sections import EngineConfig
from oarlock.engine.launch import prepare
from oarlock.errors import ConfigError
from oarlock.kv_spec import KVSpec, make_groups
from oarlock.memory_plan import MemoryNeeds, MemoryPlan, activation_bytes, available_host_bytes, plan_memory, total_host_bytes
from oarlock.model_summary import ModelSummary, load_summary, weight_bytes
from oarlock.plugins import Selection

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def main(argv: Sequence[str]) -> int:
    """Print the plan. Exit code 0; a model that does not fit is a ConfigError."""
    config = resolve(parse(make_parser("oarlock plan"), argv)).engine
    launch = prepare(config, load_summary(config.model))
    print(report(launch.config, launch.selection, launch.summary))
    return 0


def report(config: EngineConfig, selection: Selection, summary: ModelSummary) -> str:
    """The plan of one worker as text."""
    claims = selection.probe.claims or Claims()
    dtype = _dtype(config, summary, claims)
    plan = make_plan(config, summary, claims, dtype)
    workers = config.parallel.tensor_parallel_size
    head = [
        f"model    {summary.architecture}, {summary.num_layers} layers, {dtype}, context {plan.max_model_len} (the checkpoint allows {summary.derived_max_model_len})",
        f"device   {selection.spec.name}: {selection.probe.reason}",
        f"workers  {workers}{', each as below' if workers > 1 else ''}",
    ]
    return "\n".join([*head, plan.table(), "Estimated from headers; `oarlock serve` prints the same table as measured."])


def make_plan(config: EngineConfig, summary: ModelSummary, claims: Claims, dtype: str) -> MemoryPlan:
    """The memory plan of one worker.

    Raises:
        ConfigError: too small, or the device claims no memory size and none was given.
    """
    workers, item = config.parallel.tensor_parallel_size, ITEM_BYTES[dtype]
    block_size = config.cache.block_size or (claims.block_sizes[0] if claims.block_sizes else 16)
    kv_heads = max(summary.num_kv_heads // workers, 1)
    windows = summary.layer_windows or (None,) * summary.num_layers
    specs = tuple(KVSpec("full" if w is None else "window", kv_heads, summary.head_dim, w) for w in windows)
    groups = make_groups(specs)
    budget = token_budget(config.scheduler, summary.max_model_len)
    total, available = _memory(claims)
    swap = claims.default_swap_bytes if config.cache.swap_space_bytes is None else config.cache.swap_space_bytes
    shared = workers if claims.host_is_device else 1
    needs = MemoryNeeds(
        weights_bytes=loaded_bytes(summary, item) // workers,
        activation_bytes=activation_bytes(summary, budget, config.scheduler.max_num_seqs, item),
        program_bytes=0,
        bytes_per_block=specs[0].values_per_token() * block_size * item * max(len(g.layers) for g in groups),
        block_size=block_size,
        available_bytes=available // shared,
        total_bytes=total // shared,
        host_is_device=claims.host_is_device,
        groups=groups,
    )
    return plan_memory(
        needs,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=summary.max_model_len,
        fit_model_len=config.model.max_model_len == -1,
        chunk_tokens=min(budget, summary.max_model_len),
        num_blocks_override=config.cache.num_blocks_override,
        kv_cache_bytes=config.cache.kv_cache_bytes,
        utilization=config.cache.device_memory_utilization,
        swap_bytes=swap,
    )


def _dtype(config: EngineConfig, summary: ModelSummary, claims: Claims) -> str:
    """The dtype that a worker would choose, as far as claims tell."""
    if config.model.dtype != "auto":
        if claims.dtypes and config.model.dtype not in claims.dtypes:
            raise ConfigError(f"--dtype {config.model.dtype}: the device computes in {', '.join(claims.dtypes)}")
        return config.model.dtype
    return summary.dtype if not claims.dtypes or summary.dtype in claims.dtypes else claims.dtypes[0]


def _memory(claims: Claims) -> tuple[int, int]:
    """(total, available) bytes. What others use on an accelerator is not known without opening it: all of it counts as free."""
    if claims.host_is_device:
        return total_host_bytes(), available_host_bytes()
    if claims.memory_bytes is None:
        raise ConfigError("the device does not say how much memory it has before it is opened; oarlock serve measures it")
    return claims.memory_bytes, claims.memory_bytes


def loaded_bytes(summary: ModelSummary, item: int) -> int:
    """Bytes of all weights once loaded with `item` bytes a value."""
    if summary.is_gguf:
        from oarlock.gguf_header import read_header

        return sum(math.prod(tensor.shape) for tensor in read_header(summary.path).tensors.values()) * item
    return weight_bytes(summary) * item // ITEM_BYTES[summary.dtype]
