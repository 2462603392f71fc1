"""What this process may use of the host: processors, quota, nodes, memory, instruction sets. Standard library only.

Owns: the reading of /proc, /sys and the cgroup files.
Reads: the operating system.
Never: imports torch; raises for a file that is missing (the answer is then the wider one).
"""

from __future__ import annotations

import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

ENOUGH_CORES = 8  # so many of one socket bring more than their number again across the link between sockets
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor's name and the instruction sets that the kernels ask about."""

    name: str
    flags: frozenset[str]

    @property
    def has_bf16(self) -> bool:
        """Whether bfloat16 products run in hardware."""
        return bool(self.flags & {"avx512_bf16", "amx_bf16"})

    @property
    def isa(self) -> str:
        """The widest useful instruction sets, for people: "AVX-512 BF16"."""
        if "amx_bf16" in self.flags:
            return "AVX-512 and AMX BF16"
        if "avx512_bf16" in self.flags:
            return "AVX-512 BF16"
        if "avx512f" in self.flags:
            return "AVX-512"
        if {"avx2", "fma"} <= self.flags:
            return "AVX2"
        return "no vector extension known to the kernels"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def read_processor(root: Path = Path("/")) -> Processor:
    """The first processor of /proc/cpuinfo; elsewhere the platform's name and no flags."""
    text = _read(root / "proc/cpuinfo") or ""
    first = text.split("\n\n", 1)[0]
    fields = dict(re.findall(r"^([^\t:]+)\s*:\s*(.*)$", first, re.MULTILINE))
    name = fields.get("model name", "").strip() or platform.processor() or platform.machine()
    return Processor(name, frozenset((fields.get("flags") or fields.get("Features") or "").split()))


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup folder and its parents, innermost first, for v2 and for v1's `controller`."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / inner.lstrip("/")
        while True:  # in a container the path may not exist below its own mount; the base then holds its limits
            folders.append(folder)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return folders


def _number(text: str | None) -> int | None:
    """The integer in a cgroup file; None for "max", a missing file, or v1's huge "no limit"."""
    if text is None or not re.fullmatch(r"-?\d+", text.strip()):
        return None
    value = int(text)
    return value if 0 <= value < _UNLIMITED else None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the cgroup grants, the smallest over its parents; None without a quota."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(_read(folder / "cpu.cfs_quota_us")), _number(_read(folder / "cpu.cfs_period_us"))
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _first_siblings(cpus: set[int], root: Path) -> set[int]:
    """One logical processor of each core among `cpus`: two threads of one core share its vector units."""
    chosen: set[int] = set()
    for cpu in sorted(cpus):
        if not _cpu_list(_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)) & chosen:
            chosen.add(cpu)
    return chosen


def _ranges(cpus: frozenset[int]) -> str:
    """{0, 1, 2, 8} as "0-2,8"."""
    starts = [cpu for cpu in sorted(cpus) if cpu - 1 not in cpus]
    ends = [cpu for cpu in sorted(cpus) if cpu + 1 not in cpus]
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in zip(starts, ends, strict=True))


def _cpu_list(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    return {cpu for low, high in re.findall(r"(\d+)(?:-(\d+))?", text) for cpu in range(int(low), int(high or low) + 1)}


def usable_threads(root: Path = Path("/"), allowed: set[int] | None = None) -> int:
    """Compute threads to use: allowed cores (not hyperthreads), within the cgroup's quota, at least 1."""
    cores = len(_first_siblings(_allowed() if allowed is None else allowed, root))
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank computes. `cpus` None: wherever the system puts its threads; else it keeps to them, and its memory lies beside them."""

    threads: int
    cpus: frozenset[int] | None = None

    def __str__(self) -> str:
        """For people: "24 threads on CPUs 0-23,48-71"."""
        return f"{self.threads} thread{'s' if self.threads > 1 else ''}{' on CPUs ' + _ranges(self.cpus) if self.cpus else ''}"


def placement(rank: int = 0, ranks: int = 1, threads: int | None = None, root: Path = Path("/"), allowed: set[int] | None = None) -> Placement:
    """Ranks take turns on the sockets, or on the NUMA nodes where there are more ranks than sockets. `threads`: of all ranks, where the user says.

    A rank keeps to its socket where its threads fit, or where the socket has ENOUGH_CORES: a step waits for memory, and other sockets' is far.
    """
    allowed = _allowed() if allowed is None else allowed
    own = max(1, (threads or usable_threads(root, allowed)) // ranks)
    nodes = _nodes(allowed, root)
    sockets: dict[int, set[int]] = {}
    for node in nodes:  # a socket may be several nodes; a virtual machine may show each processor as a socket of one node
        first = min(int(_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id") or 0) for cpu in node)
        sockets.setdefault(first, set()).update(node)
    places = nodes if ranks > len(sockets) else list(sockets.values())
    if len(places) < 2:
        return Placement(own)
    # Every rank must see the same order, so what changes while they start counts for a lone one only: two servers then part.
    places.sort(key=lambda cpus: (-len(_first_siblings(cpus, root)), -_free_kib(cpus, root) if ranks == 1 else 0))
    which = rank % len(places)
    cores = len(_first_siblings(places[which], root)) // -(-(ranks - which) // len(places))
    if own <= cores or (threads is None and cores >= ENOUGH_CORES):
        return Placement(min(own, cores), frozenset(places[which]))
    return Placement(own)


def _node_folders(root: Path) -> list[Path]:
    return sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))


def _nodes(allowed: set[int], root: Path) -> list[set[int]]:
    """The allowed processors of each NUMA node that has some."""
    return [node for folder in _node_folders(root) if (node := _cpu_list(_read(folder / "cpulist") or "") & allowed)]


def _free_kib(cpus: set[int], root: Path) -> int:
    """Free memory of the NUMA nodes of these processors."""
    texts = [_read(folder / "meminfo") or "" for folder in _node_folders(root) if _cpu_list(_read(folder / "cpulist") or "") & cpus]
    return sum(int(kib) for text in texts for kib in re.findall(r"MemFree:\s+(\d+)", text))


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE)}


def memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(free bytes, total bytes) within the cgroup's limits; page cache that the kernel would give back counts as free. None: unknown.

    A cgroup limit binds where it is below the machine's memory.
    """
    info = _meminfo(root)
    total, free = info.get("MemTotal"), info.get("MemAvailable")
    if total is None or free is None:
        return None
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _number(_read(folder / limit_name)), _number(_read(folder / used_name))
            if limit is None:
                continue
            total = min(total, limit)
            reclaimable = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat") or "", re.MULTILINE)
            free = min(free, limit - (used or 0) + (int(reclaimable[1]) if reclaimable else 0))
    return max(0, min(free, total)), total
