"""Level 3: the attention and KV cache that core would choose, against dense attention in float64 on the host.

Owns: the scenarios and the matrix of head counts, head sizes, block sizes, windows and soft caps.
Reads: `paging`.
Never: looks into a cache beyond whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from oarlock.backend_api import Support
from oarlock.backend_api.runtime import AttentionParams
from oarlock.conformance.cases import Case, CheckFailed, Measure, worst
from oarlock.conformance.metrics import same_bits
from oarlock.conformance.paging import World
from oarlock.conformance.pairwise import pairwise
from oarlock.conformance.subject import DTYPES, Subject
from oarlock.shapes import BucketTable, ShapePolicy

LEVEL = 3
LIMITS = {"float32": 1e-9, "float16": 5e-4, "bfloat16": 5e-4}


def padded(block_size: int) -> BucketTable:
    """One shape of each kind, so that a compiled device compiles few programs: the largest steps below; 8 blocks of 8 hold every row."""
    return BucketTable(
        decode_rows=(5,),
        chunk_rows=(3,),
        chunk_tokens=(max(72, block_size + 42, 2 * block_size + 3),),
        chunk_lens=(max(48, 2 * block_size + 3),),
        blocks=(8,),
        out_rows=(8,),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """One column of the matrix. block_size None: the device's preferred one."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int | None = None
    window: int | None = None
    softcap: float | None = None
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        extra = "".join(f",{name}={value}" for name, value in (("window", self.window), ("softcap", self.softcap)) if value is not None)
        block = "" if self.block_size is None else f",block={self.block_size}"
        kept = "" if self.kv_dtype == "auto" else f",kv={self.kv_dtype}"
        return f"heads={self.heads}/{self.kv_heads},dim={self.head_dim}{block}{extra}{kept}"

    def params(self) -> AttentionParams:
        return AttentionParams(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window, self.softcap)


# ---- scenarios: each is given a world with no rows and returns the worst measure


def prefill(world: World, limit: float) -> Measure:
    """Whole prompts in one step: shorter than a block, exactly one, and longer."""
    plan = {world.add(n): n for n in (5, world.block_size, 37)}
    return world.step(plan, limit)[0]


def chunk(world: World, limit: float) -> Measure:
    """One prompt in chunks that end inside blocks, the second of a single token."""
    row = world.add(41)
    return worst([world.step({row: n}, limit)[0] for n in (13, 1, 16, 11)])


def decode(world: World, limit: float) -> Measure:
    """Several rows, a token at a time, over a block's end."""
    size = world.block_size
    rows = {world.add(n + 3): n for n in (2, size - 1, size, 40)}
    found = [world.step({row: n}, limit)[0] for row, n in rows.items()]
    return worst(found + [world.step(dict.fromkeys(rows, 1), limit)[0] for _ in range(3)])


def mixed(world: World, limit: float) -> Measure:
    """Rows that decode beside rows that compute chunks of different lengths."""
    a, b, c, d = (world.add(n) for n in (20, 3, 45, 26))
    found = [world.step({a: 18, b: 2}, limit)[0], world.step({a: 1, b: 1, c: 19, d: 3}, limit)[0]]
    return worst([*found, world.step({a: 1, c: 26, d: 22}, limit)[0], world.step({d: 1}, limit)[0]])


def shared(world: World, limit: float) -> Measure:
    """Two rows over the same first blocks; the owner goes away and the blocks stay."""
    size = world.block_size
    a = world.add(2 * size + 5)
    found = [world.step({a: 2 * size + 3}, limit)[0]]
    b, c = world.add(2 * size + 9, like=(a, 2 * size)), world.add(size + 1, like=(a, size))
    return worst([*found, world.step({a: 1, b: 8, c: 1}, limit)[0], world.step({a: 1, b: 1}, limit)[0]])


def freed(world: World, limit: float) -> Measure:
    """A row ends, its blocks are poisoned and given to the next one, whose stale table entries point at poison."""
    a, b = world.add(30), world.add(40)
    found = [world.step({a: 30, b: 17}, limit)[0]]
    world.drop(a)
    c = world.add(23)
    return worst([*found, world.step({b: 1, c: 22}, limit)[0], world.step({b: 22, c: 1}, limit)[0]])


def window(world: World, limit: float) -> Measure:
    """Blocks behind the window are freed and poisoned while the row goes on."""
    a, b = world.add(46), world.add(9)
    found = []
    for plan in ({a: 21, b: 4}, {a: 1, b: 5}, {a: 9}, {a: 1}, {a: 14}):
        found.append(world.step(plan, limit)[0])
        world.slide()
    return worst(found)


def copies(world: World, limit: float) -> Measure:
    """A branch: blocks are copied, both rows go on apart; then the copy of a row gives the row's own bits."""
    a = world.add(29)
    found = [world.step({a: 27}, limit)[0]]
    row = world.rows[a]
    b = world.add(29)
    twin = world.rows[b]
    twin.query, twin.key, twin.value, twin.done = row.query.clone(), row.key.clone(), row.value.clone(), row.done
    twin.blocks = [world.free.pop() for _ in row.blocks]
    world.copy(row.blocks, twin.blocks)
    measure, out = world.step({a: 1, b: 1}, limit)
    if not same_bits(out[a], out[b]):
        raise CheckFailed("a row and its copy, side by side, give different bits")
    twin.key[28], twin.value[28] = -twin.key[28], -twin.value[28]
    return worst([*found, measure, world.step({a: 1, b: 1}, limit)[0]])


def swap(world: World, limit: float) -> Measure:
    """Layout round trip: whole blocks go to the host and come back in other places, and the row goes on."""
    a, b = world.add(34), world.add(12)
    found = [world.step({a: 31, b: 11}, limit)[0]]
    world.swap(a)
    return worst([*found, world.step({a: 1, b: 1}, limit)[0], world.step({a: 2}, limit)[0]])


def padding(world: World, limit: float) -> Measure:
    """The same steps exact and padded: real rows agree, padded rows are finite and write nothing."""
    other = World(
        world.subject,
        world.params,
        str(world.dtype).removeprefix("torch."),
        world.block_size,
        ShapePolicy(padded(world.block_size)),
        seed=1,
        kv_dtype=world.kv_dtype,
    )
    found = []
    for w in (world, other):
        w.random.manual_seed(7)
        a, b, c = w.add(9), w.add(30), w.add(12)
        found.append([w.step({a: 8, b: 20}, limit), w.step({a: 1, b: 9, c: 11}, limit), w.step({b: 1, c: 1}, limit)])
    return worst([measure for steps in found for measure, _ in steps])


def layers(world: World, limit: float) -> Measure:
    """A later layer of the group: the attention was made for the first one, whose scale and soft cap are others."""
    p = world.params
    world.turn_to(replace(p, scale=p.scale * 1.5, softcap=p.softcap and p.softcap * 0.5))
    return mixed(world, limit)


def extremes(world: World, limit: float) -> Measure:
    """Scores of a row all far below 0, of another all far above: what exp of them cannot hold."""
    rows = {world.add(n + 1): n for n in (21, 21)}
    for r, shift in zip(rows, (-4, 4), strict=True):
        world.rows[r].query += 4
        world.rows[r].key += shift
    return worst([world.step(rows, limit)[0], world.step(dict.fromkeys(rows, 1), limit)[0]])


def saturated(world: World, limit: float) -> Measure:
    """Values beyond what an 8-bit float holds: the largest that it can stand for them."""
    row = world.add(25)
    world.rows[row].value *= float(torch.finfo(world.kept).max)
    return worst([world.step({row: n}, limit)[0] for n in (24, 1)])


def writes(world: World, limit: float) -> Measure:
    """What is written, without a program around it."""
    world.check_writes()
    return Measure(0.0, limit, 0.0)


Scenario = Callable[[World, float], Measure]
_PLAIN: tuple[Scenario, ...] = (prefill, chunk, decode, mixed, shared, freed, copies, swap, padding)
_ALONE: tuple[tuple[Scenario, Setting], ...] = ((layers, Setting()), (layers, Setting(softcap=30.0)), (extremes, Setting()), (writes, Setting()))  # in one dtype
_KV_DTYPES = ("fp8_e4m3", "fp8_e5m2")
_QUICK_FP8: tuple[Scenario, ...] = (saturated,)
_HEADS = ((4, 2), (4, 4), (8, 1), (9, 3), (16, 2))
_HEAD_DIMS = (64, 72, 80, 96, 112, 128, 192, 256)
_SOFTCAPS = (None, 30.0, 0.5)
_WINDOWS = (1, 5, 16, 24)
_BLOCK_SIZES = (8, 12, 16, 32, 64, 128)
_QUICK_HEAD_DIMS = (64, 80, 96, 128, 256)
_QUICK_WINDOWS = (None, 1, 5, 24)


def cases(dtypes: Sequence[str] = tuple(LIMITS), block_sizes: Sequence[int] = ()) -> Iterator[Case]:
    """Quick: every pair of (dtype, scenario, heads, head size, block size, window, soft cap) in few cases, over what the device declares,
    and the few scenarios that depend on none of these.

    The rest: all scenarios in all settings and dtypes.
    """
    quick = set()
    dtypes = [dtype for dtype in LIMITS if dtype in dtypes]  # one order, whichever a device prefers
    for scenario, dtype, setting in _pairwise(dtypes, block_sizes):
        made = _case(scenario, setting, dtype, quick=True)
        quick.add(made.id)
        yield made
    for scenario, setting in _ALONE if dtypes else ():
        yield _case(scenario, setting, dtypes[0], quick=True)
    for scenario, kept in product((*_PLAIN, window, saturated), _KV_DTYPES if dtypes else ()):
        setting = Setting(kv_dtype=kept, window=5 if scenario is window else None)
        yield _case(scenario, setting, dtypes[0], quick=scenario in _QUICK_FP8)
    for dtype in LIMITS:
        if dtype not in dtypes:  # one case says so
            yield Case(f"attention[{dtype}]", LEVEL, _never, "paged_attention", dtype, partial(declared, Setting(), dtype))
        for scenario, setting in _every():
            made = _case(scenario, setting, dtype, quick=False)
            if made.id not in quick:
                yield made


def _pairwise(dtypes: Sequence[str], block_sizes: Sequence[int]) -> Iterator[tuple[Scenario, str, Setting]]:
    """At most four block sizes: the preferred one (not named), the smallest, the largest and one between."""
    sizes = sorted(set(block_sizes[1:]))
    few = dict.fromkeys((None, *(sizes[at] for at in (0, len(sizes) // 2, -1) if sizes)))
    factors = ((*_PLAIN, window), tuple(dtypes), _HEADS, _QUICK_HEAD_DIMS, tuple(few), _QUICK_WINDOWS, _SOFTCAPS)
    for scenario, dtype, heads, head_dim, size, behind, cap in pairwise(factors, lambda row: not (row[0] is window and row[5] is None)):
        yield scenario, dtype, Setting(*heads, head_dim, size, behind, cap)


def _every() -> Iterator[tuple[Scenario, Setting]]:
    """One thing changed at a time, in every scenario; windows with all of it."""
    settings = (
        [Setting(*heads) for heads in _HEADS] + [Setting(head_dim=d) for d in _HEAD_DIMS[1:]] + [Setting(softcap=c) for c in _SOFTCAPS[1:]]
    )
    settings += [Setting(block_size=size) for size in _BLOCK_SIZES]
    yield from product(_PLAIN, settings)
    for setting, behind in product(settings, _WINDOWS):
        yield window, replace(setting, window=behind)


def _never(subject: Subject) -> None:
    raise AssertionError("an undeclared dtype is never run")


def _case(scenario: Scenario, setting: Setting, dtype: str, *, quick: bool) -> Case:
    case_id = f"attention[{dtype},{scenario.__name__},{setting}]"
    run = partial(_run, scenario, setting, dtype, case_id)
    return Case(case_id, LEVEL, run, "paged_attention", dtype, partial(declared, setting, dtype), quick)


def declared(setting: Setting, dtype: str, subject: Subject) -> Support:
    """Core asks only for dtypes and block sizes that the device declares; every head size must work, by the reference if need be."""
    reasons = [] if dtype in subject.dtypes else [f"the device declares {', '.join(subject.dtypes)}"]
    sizes = subject.device.capabilities.block_sizes
    if setting.block_size is not None and setting.block_size not in sizes:
        reasons.append(f"the device declares block sizes {', '.join(map(str, sizes))}")
    kept = subject.device.capabilities.kv_dtypes
    if setting.kv_dtype not in kept:
        reasons.append(f"the device declares KV caches of {', '.join(kept)}")
    return Support(not reasons, tuple(reasons))


def _run(scenario: Scenario, setting: Setting, dtype: str, case_id: str, subject: Subject) -> Measure:
    assert dtype in DTYPES
    caps = subject.device.capabilities
    block_size = setting.block_size or caps.block_sizes[0]
    policy = ShapePolicy(BucketTable() if caps.dynamic_shapes else padded(block_size))
    seed = Case(case_id, LEVEL, lambda _: None).seed
    world = World(subject, setting.params(), dtype, block_size, policy, seed, kv_dtype=setting.kv_dtype)
    return scenario(world, subject.limit("paged_attention", dtype, LIMITS[dtype]))
