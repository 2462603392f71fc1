"""Runs recorded op calls as cases, with numbers drawn anew: a fault of a model becomes a file.

Owns: how a written call becomes arguments.
Reads: what `record` wrote.
Never: records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oarlock.backend_api.runtime import AttentionParams, Op, registry
from oarlock.conformance import attention_level, ops_level
from oarlock.conformance.cases import Case, Measure
from oarlock.conformance.paging import World
from oarlock.conformance.record import FORMAT
from oarlock.conformance.subject import Subject
from oarlock.errors import ConfigError
from oarlock.shapes import BucketTable, ShapePolicy


def cases(path: str) -> Iterator[Case]:
    """A case for each different call of a file.

    Raises:
        ConfigError: no file of `--record`, of another format, or with an op that this version does not have.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        is_ours = data["kind"] == "calls" and data["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--replay {path}: no file that --record wrote: {type(error).__name__}: {error}", option="--replay") from None
    if not is_ours:
        raise ConfigError(
            f"--replay {path}: kind {data['kind']!r} in format {data['format']!r}; 'calls' in format {FORMAT} is needed", option="--replay"
        )
    known = registry()
    for number, call in enumerate(data["calls"]):
        name = call["op"]
        if name == "paged_attention":
            yield _attention(call, number)
        elif name in known:
            yield _op(known[name], call, number, data["dtype"])
        else:
            raise ConfigError(f"--replay {path}: {name} is no op of this version; ops are {', '.join(sorted(known))}", option="--replay")


# ---------------------------------------------------------------- ops


def _op(op: Op, call: dict[str, Any], number: int, dtype: str) -> Case:
    dtype = dtype if dtype in op.tolerance else next(iter(op.tolerance))
    case_id = f"{op.name}[{dtype},{','.join(_shown(a) for a in call['args'])}]#{number}"
    run = partial(_run_op, op, call, dtype, case_id)
    return Case(case_id, ops_level.LEVEL, run, op.name, dtype, partial(ops_level.declared, op, dtype))


def _shown(value: dict[str, Any]) -> str:
    if "shape" in value:
        return "x".join(map(str, value["shape"])) or "scalar"
    if "tuple" in value:
        return "(" + " ".join(map(_shown, value["tuple"])) + ")"
    return "{" + " ".join(f"{k} {_shown(v)}" for k, v in value["dict"].items()) + "}" if "dict" in value else str(value["value"])


def _run_op(op: Op, call: dict[str, Any], dtype: str, case_id: str, subject: Subject) -> Measure:
    random = torch.Generator().manual_seed(Case(case_id, 0, lambda _: None).seed)
    args = [drawn(a, random) for a in call["args"]]
    kwargs = {k: drawn(v, random) for k, v in call["kwargs"].items()}
    return ops_level.check_call(op, args, kwargs, dtype, op.tolerance[dtype], case_id, subject)


def drawn(value: dict[str, Any], random: torch.Generator) -> Any:
    """An argument as it was, its numbers drawn evenly from the range that they had."""
    if "tuple" in value:
        return tuple(drawn(v, random) for v in value["tuple"])
    if "dict" in value:
        return {k: drawn(v, random) for k, v in value["dict"].items()}
    if "shape" not in value:
        return value["value"]
    shape, dtype = value["shape"], getattr(torch, value["dtype"])
    if "values" in value:
        return torch.tensor(value["values"], dtype=dtype).view(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=random) < 0.5
    low, high = value.get("range", (0.0, 1.0))
    if not dtype.is_floating_point:
        return torch.randint(int(low), int(high) + 1, shape, generator=random, dtype=torch.int64).to(dtype)
    return (low + (high - low) * torch.rand(shape, generator=random)).to(dtype)


# ---------------------------------------------------------------- attention


def _attention(call: dict[str, Any], number: int) -> Case:
    dtype, rows = call["dtype"], call["rows"]
    extra = "".join(f",{name}={call[name]}" for name in ("window", "softcap") if call[name] is not None)
    text = " ".join(f"{context}/{new}" for context, new in rows[:6]) + (" ..." if len(rows) > 6 else "")
    case_id = f"attention[{dtype},heads={call['heads']}/{call['kv_heads']},dim={call['head_dim']},block={call['block_size']}{extra},rows={text}]#{number}"
    # The block size is the recording device's: another device takes its own where it does not declare that one.
    setting = attention_level.Setting(call["heads"], call["kv_heads"], call["head_dim"], None, call["window"], call["softcap"])
    supports = partial(attention_level.declared, setting, dtype)
    return Case(
        case_id, attention_level.LEVEL, partial(_run_attention, call, setting.params(), case_id), "paged_attention", dtype, supports
    )


def _run_attention(call: dict[str, Any], params: AttentionParams, case_id: str, subject: Subject) -> Measure:
    """The contexts are computed first, a row at a time; then the recorded step."""
    dtype, rows, sizes = call["dtype"], call["rows"], subject.device.capabilities.block_sizes
    size = call["block_size"] if call["block_size"] in sizes else sizes[0]
    blocks, limit = sum(-(-context // size) for context, _ in rows), attention_level.LIMITS[dtype]
    policy = ShapePolicy(BucketTable() if subject.device.capabilities.dynamic_shapes else _holding(rows, size))
    world = World(subject, params, dtype, size, policy, Case(case_id, 0, lambda _: None).seed, num_blocks=blocks + 9)
    limit = subject.limit("paged_attention", dtype, limit)
    plan: dict[int, int] = {}
    for context, new in rows:
        row = world.add(context)
        if context > new:
            world.step({row: context - new}, limit)
        plan[row] = new
    return world.step(plan, limit)[0]


def _holding(rows: list[list[int]], block_size: int) -> BucketTable:
    longest, tokens, count = max(context for context, _ in rows), sum(new for _, new in rows), len(rows)
    chunk = max(longest, tokens)
    return BucketTable((count,), (count,), (chunk,), (chunk,), (-(-longest // block_size),), (2 * count,))
