"""The memory plan: how many KV blocks there are, computed from measured bytes before anything large is allocated.

Owns: `plan_worker`, `plan_memory`, the printed table, what the host has left (cgroup limits included).
Reads: `config`, `errors`, `kv_spec`, `model_summary`.
Never: allocates; asks a device (the caller measures).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oarlock.config.resolve import token_budget
from oarlock.config.sections import EngineConfig
from oarlock.errors import ConfigError
from oarlock.kv_spec import KVGroup
from oarlock.model_summary import ModelSummary

DEFAULT_UTILIZATION = 0.9  # of an accelerator's whole memory
HOST_KV_SHARE = 0.4  # of what is left, where the device's memory is the host's
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What was measured or declared on one worker. All sizes in bytes."""

    weights_bytes: int
    activation_bytes: int  # peak of the largest step
    program_bytes: int  # compiled or captured programs, workspaces
    bytes_per_block: int  # one block in every layer tensor of the pool, the device's padding included
    block_size: int  # tokens
    available_bytes: int  # free for this worker before anything of it was loaded; workers that share the memory get a part each
    total_bytes: int  # of the device; the host's limit where host_is_device, a part each likewise
    host_is_device: bool
    groups: tuple[KVGroup, ...] = ()  # (): one group of full attention
    is_measured: bool = False  # activations and programs are; else the activations are reckoned


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one worker will allocate."""

    num_blocks: int  # null block included
    num_host_blocks: int
    max_model_len: int  # as asked, or what fits when that was left to the memory
    limit: str  # what bounds the KV cache, for people
    rows: tuple[tuple[str, int, str], ...]  # (what, bytes, note)

    def table(self) -> str:
        """The plan as lines for a log or a terminal."""
        lines = [f"  {what:<18} {gib(size):>11}   {note}".rstrip() for what, size, note in self.rows]
        return "\n".join(["memory plan", *lines, f"  limit: {self.limit}"])


def plan_worker(needs: MemoryNeeds, config: EngineConfig, summary: ModelSummary, *, item_bytes: int, default_swap_bytes: int) -> MemoryPlan:
    """The plan of one worker under this configuration, before or after its weights are loaded.

    `needs`: the device and the model as they are. The activations, unless measured, and one rank's part where all ranks share the host's memory, are
    worked out here. `item_bytes`: one value of the model's dtype.

    Raises:
        ConfigError: as `plan_memory`.
    """
    cache, s = config.cache, config.scheduler
    budget = token_budget(s, summary.max_model_len)
    shared = config.parallel.tensor_parallel_size if needs.host_is_device else 1
    needs = replace(
        needs,
        activation_bytes=needs.activation_bytes if needs.is_measured else activation_bytes(summary, budget, s.max_num_seqs, item_bytes),
        available_bytes=needs.available_bytes // shared,
        total_bytes=needs.total_bytes // shared,
    )
    return plan_memory(
        needs,
        max_num_seqs=s.max_num_seqs,
        max_model_len=summary.max_model_len,
        fit_model_len=config.model.max_model_len == -1,
        chunk_tokens=min(budget, summary.max_model_len),
        step_tokens=budget * s.max_in_flight,
        num_blocks_override=cache.num_blocks_override,
        kv_cache_bytes=cache.kv_cache_bytes,
        utilization=cache.device_memory_utilization,
        swap_bytes=default_swap_bytes if cache.swap_space_bytes is None else cache.swap_space_bytes,
    )


def plan_memory(
    needs: MemoryNeeds,
    *,
    max_num_seqs: int,
    max_model_len: int,
    fit_model_len: bool = False,
    chunk_tokens: int = 0,
    step_tokens: int | None = None,
    num_blocks_override: int | None = None,
    kv_cache_bytes: int | None = None,
    utilization: float | None = None,
    swap_bytes: int = 0,
) -> MemoryPlan:
    """Divide the memory.

    `fit_model_len`: lower `max_model_len` to what fits instead of failing (`--max-model-len auto`).
    `chunk_tokens`: most new tokens of one request in a step; a window group holds them beside the window. `step_tokens`: most new tokens
    of all requests together that are under way; None: `chunk_tokens` of each.
    `num_blocks_override` counts usable blocks and may be smaller than one longest request needs: requests that can never
    fit are then refused one by one.

    Raises:
        ConfigError: one request of `max_model_len` does not fit; says needed, available and the largest length that fits.
    """
    most = _most_blocks(needs, max_num_seqs, max_model_len, chunk_tokens, step_tokens)
    enough = (most + 1) * needs.bytes_per_block, f"{max_num_seqs} sequences of {max_model_len} tokens need no more"
    kv_bytes, limit = _kv_budget(needs, enough, kv_cache_bytes, utilization)
    if num_blocks_override is not None:
        num_blocks, limit = num_blocks_override + 1, f"--num-blocks-override {num_blocks_override}"
        _require_room(needs, num_blocks * needs.bytes_per_block, limit)
    else:
        num_blocks = max(kv_bytes, 0) // needs.bytes_per_block
    needed = _blocks_for(needs, max_model_len, chunk_tokens)
    if num_blocks - 1 < needed and num_blocks_override is None:
        longest = _longest(needs, num_blocks - 1, max_model_len, chunk_tokens)
        if not fit_model_len or longest < 1:
            raise ConfigError(_too_small(needs, needed, kv_bytes, limit, max_model_len, longest), "max-model-len")
        max_model_len, limit = longest, f"{limit}; the context length follows it"
    num_host_blocks = swap_bytes // needs.bytes_per_block
    usable = num_blocks - 1
    holds = f"{usable} blocks of {needs.block_size} tokens: {usable / max(_blocks_for(needs, max_model_len, chunk_tokens), 1):.1f} requests of {max_model_len}"
    rows = [
        ("weights", needs.weights_bytes, ""),
        ("activations", needs.activation_bytes, f"peak of the largest step{', measured' if needs.is_measured else ''}"),
        ("programs", needs.program_bytes, "graphs, and what libraries took" if needs.is_measured else ""),
        ("KV cache", num_blocks * needs.bytes_per_block, holds),
        ("host KV tier", num_host_blocks * needs.bytes_per_block, f"{num_host_blocks} blocks" if num_host_blocks else "off"),
        ("available", needs.available_bytes, f"of {gib(needs.total_bytes)}"),
    ]
    return MemoryPlan(num_blocks, num_host_blocks, max_model_len, limit, tuple(rows))


def activation_bytes(summary: ModelSummary, budget: int, max_num_seqs: int, item: int) -> int:
    """An upper estimate of a step's temporaries: the widest layer's inputs and outputs, the sampler's float32 rows, and the token
    histories that penalties read.

    `budget` is the most tokens of a step, `item` the bytes of one value.
    """
    attention = 2 * (summary.num_heads + 2 * summary.num_kv_heads) * summary.head_dim
    width = 4 * summary.hidden_size + max(3 * summary.intermediate_size, attention)
    histories = (max_num_seqs + 1) * (summary.max_model_len + 1) * 4
    return budget * width * item + min(max_num_seqs, budget, 64) * summary.vocab_size * 4 * 8 + histories


def _kv_budget(needs: MemoryNeeds, enough: tuple[int, str], kv_cache_bytes: int | None, utilization: float | None) -> tuple[int, str]:
    """(bytes for the KV cache, what bounds them). `enough`: what nobody could use more than."""
    loaded = needs.weights_bytes + needs.activation_bytes + needs.program_bytes
    if kv_cache_bytes is not None:
        limit = f"--kv-cache-memory {gib(kv_cache_bytes)}"
        _require_room(needs, kv_cache_bytes, limit)
        return kv_cache_bytes, limit
    left = needs.available_bytes - loaded
    if needs.host_is_device and utilization is None:
        share = int(max(left, 0) * HOST_KV_SHARE)
        if enough[0] <= share:
            return enough
        return share, f"{HOST_KV_SHARE:.0%} of the {gib(max(left, 0))} that the weights and activations leave"
    fraction = DEFAULT_UTILIZATION if utilization is None else utilization
    used_by_others = needs.total_bytes - needs.available_bytes
    budget = int(needs.total_bytes * fraction) - used_by_others - loaded
    return min(budget, left), f"--device-memory-utilization {fraction:g} of {gib(needs.total_bytes)}"


def _require_room(needs: MemoryNeeds, kv_bytes: int, limit: str) -> None:
    left = needs.available_bytes - needs.weights_bytes - needs.activation_bytes - needs.program_bytes
    if kv_bytes > left:
        raise ConfigError(f"{limit} takes {gib(kv_bytes)}, but weights and activations leave {gib(max(left, 0))} of {gib(needs.available_bytes)}; ask for less")


def _most_blocks(needs: MemoryNeeds, max_num_seqs: int, length: int, chunk_tokens: int, step_tokens: int | None) -> int:
    """Blocks that so many requests of `length` tokens hold at most at one time.

    Each keeps its window, and beside it what of its own is under way. Beyond a block for each, that is shared: `step_tokens` in all.
    """
    alone = max_num_seqs * _blocks_for(needs, length, chunk_tokens)
    if step_tokens is None:
        return alone
    beside = sum(-(-step_tokens // needs.block_size) for group in needs.groups if group.window is not None)
    return min(alone, max_num_seqs * _blocks_for(needs, length, needs.block_size) + beside)


def _blocks_for(needs: MemoryNeeds, length: int, chunk_tokens: int) -> int:
    """Blocks that one request of `length` tokens holds at most, over all groups: as `KVCacheManager.blocks_at_once`."""
    whole = -(-length // needs.block_size)
    if not needs.groups:
        return whole
    count = 0
    for group in needs.groups:
        # The first new token sees window - 1 before it; those and the chunk may begin and end inside a block.
        kept = whole if group.window is None else -(-(group.window - 2 + max(chunk_tokens, 1)) // needs.block_size) + 1
        count += min(whole, kept)
    return count


def _longest(needs: MemoryNeeds, usable: int, max_model_len: int, chunk_tokens: int) -> int:
    """The largest length of which one request fits into `usable` blocks. O(log max_model_len)."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _blocks_for(needs, middle, chunk_tokens) <= usable else (low, middle - 1)
    return low


def _too_small(needs: MemoryNeeds, needed: int, kv_bytes: int, limit: str, max_model_len: int, longest: int) -> str:
    wanted = (needed + 1) * needs.bytes_per_block
    text = f"the KV cache is too small: one request of --max-model-len {max_model_len} needs {gib(wanted)}, available are {gib(max(kv_bytes, 0))} ({limit})"
    if longest >= 1:
        return f"{text}; --max-model-len {longest} is the largest that fits"
    loaded = needs.weights_bytes + needs.activation_bytes + needs.program_bytes
    return (
        f"{text}; not even one block of {gib(needs.bytes_per_block)} fits beside weights and activations of {gib(loaded)}: "
        "take a smaller model or give it more memory"
    )


def gib(size: int) -> str:
    """A size for people: 1.50 GiB, 12.0 MiB, 3.0 KiB."""
    if 0 < abs(size) < 2**20 // 10:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.1f} MiB"


# ---------------------------------------------------------------- the host
def total_host_bytes(root: str | Path = "/") -> int:
    """Memory that this process may ever use: the host's, or a smaller cgroup limit."""
    limits = [limit for limit, _ in _cgroup_limits(Path(root))]
    return min([_meminfo(Path(root), "MemTotal"), *limits])


def available_host_bytes(root: str | Path = "/") -> int:
    """Memory that this process could take now without swapping: MemAvailable, or less where a cgroup limit says so."""
    rooms = [max(limit - used, 0) for limit, used in _cgroup_limits(Path(root))]
    return min([_meminfo(Path(root), "MemAvailable"), *rooms])


def _meminfo(root: Path, key: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise ConfigError(f"/proc/meminfo has no {key}; give the size of the KV cache with --kv-cache-memory")


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each cgroup above this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            found += _walk(root / "sys/fs/cgroup", path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _walk(root / "sys/fs/cgroup/memory", path, names)
    return found


def _walk(mount: Path, path: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """A limit holds for everything below it, so every cgroup up to the mount counts."""
    found = []
    parts = [p for p in path.split("/") if p and p != ".."]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        try:
            limit = (folder / names[0]).read_text().strip()
            used = int((folder / names[1]).read_text())
        except (OSError, ValueError):
            continue  # no such file in a container's own view, or no memory controller at this level
        if limit == "max" or int(limit) >= _UNLIMITED:
            continue
        found.append((int(limit), max(used - _stat(folder, names[2]), 0)))
    return found


def _stat(folder: Path, key: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)
