"""Which implementation serves: ops, attention and graph runner of one device, chosen among what plugins offer.

Owns: the choice (the supported one of highest priority, else core's own) and the words when it is ambiguous.
Reads: `backend_api.runtime`, the references.
Never: calls a hook (it is given the records); names a device. The worker and the conformance kit choose by these functions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oarlock.backend_api.runtime import Attention, AttentionParams, Device, EagerRunner, GraphRunner, Ops, bind_ops
from oarlock.backend_api.runtime.ops import resolve
from oarlock.backend_api.specs import AttentionSpec, GraphRunnerSpec, OpImpl
from oarlock.errors import PluginError
from oarlock.runtime.quantization.kv_cache import cache_dtype
from oarlock.runtime.reference.attention import FunctionalReferenceAttention, ReferenceAttention
from oarlock.runtime.reference.state import index_update_in_place


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best of several records."""

    spec: Any | None  # None: no plugin's record is supported; core's own serves
    rejected: str  # who was not supported and why, for the op table


def best(specs: Sequence[Any], what: str, **facts: Any) -> Chosen:
    """The supported record of highest priority.

    Raises:
        PluginError: two supported records have equal, highest priority.
    """
    answers = [(spec, spec.supports(**facts)) for spec in sorted(specs, key=lambda s: -s.priority)]
    fit = [spec for spec, support in answers if support.ok]
    if len(fit) > 1 and fit[0].priority == fit[1].priority:
        raise PluginError(f"{what} {fit[0].name} and {fit[1].name} have equal priority {fit[0].priority}; remove one package")
    rejected = " | ".join(f"{spec.name}: {'; '.join(support.reasons)}" for spec, support in answers if not support.ok)
    return Chosen(fit[0] if fit else None, rejected)


def choose_ops(records: Sequence[OpImpl], device: Device, dtype: str) -> Ops:
    """The op registry bound for one device and dtype."""
    ops = bind_ops(records, dtype)
    if device.capabilities.kv_update == "in_place" and ("index_update", "reference") in ((op, name) for op, name, _ in ops.table):
        setattr(ops, "index_update", index_update_in_place)  # noqa: B010  ops are attributes that no class declares
    return ops


def choose_graph_runner(records: Sequence[GraphRunnerSpec], device: Device) -> GraphRunner:
    """How programs are compiled on this device; core's eager runner when nobody offers another."""
    spec = best(records, "graph runner", device=device).spec
    return resolve(spec.factory)(device) if spec else EagerRunner(device)


def choose_attention(
    records: Sequence[AttentionSpec], device: Device, params: AttentionParams, kind: str, dtype: str, block_size: int, kv_dtype: str = "auto"
) -> tuple[Attention, str, str]:
    """(implementation, its name, who was rejected and why) for one KV cache group. `kv_dtype`: --kv-cache-dtype."""
    facts: dict[str, Any] = {"head_dim": params.head_dim, "num_heads": params.num_heads, "num_kv_heads": params.num_kv_heads}
    facts |= {"kind": kind, "dtype": dtype, "block_size": block_size, "window": params.window, "softcap": params.softcap}
    able = [spec for spec in records if kv_dtype in spec.kv_dtypes]
    found = best(able, "attention", **facts)
    rejected = [f"{spec.name}: it serves a cache of {', '.join(spec.kv_dtypes)}, not of {kv_dtype}" for spec in records if spec not in able]
    if found.spec is not None:
        factory, name = resolve(found.spec.factory), found.spec.name
    else:
        factory, name = (FunctionalReferenceAttention if device.capabilities.kv_update == "functional" else ReferenceAttention), "reference"
    made: Attention = factory(block_size, cache_dtype(kv_dtype, getattr(torch, dtype)), params)
    return made, name, " | ".join(filter(None, (found.rejected, *rejected)))


def rejections(table: Sequence[tuple[str, str, str]]) -> list[str]:
    """For the log: which implementations an op table's ops are not served by, and why. Ops of one answer share a line."""
    ops: dict[tuple[str, str], list[str]] = {}
    for op, served_by, rejected in table:
        if rejected:
            ops.setdefault((served_by, rejected), []).append(op)
    return [f"{', '.join(names)}: served by {served_by}, not by {rejected}" for (served_by, rejected), names in ops.items()]
