"""Level 1: the device object moves bytes, computes, counts memory and seeds.

Owns: the checks of `Device`'s members.
Reads: `subject`.
Never: calls an op of the registry.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from oarlock.backend_api import Support
from oarlock.conformance.cases import Case, CheckFailed
from oarlock.conformance.metrics import same_bits
from oarlock.conformance.subject import DTYPES, Subject

LEVEL = 1
TAKES = 4  # tries to see a host's free memory move
PIECE = 64 << 20  # bytes allocated to see the free memory move
SLACK = 8 << 20  # allocators round up
_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the transpose": lambda t: t.T,
    "every second row": lambda t: t[::2],
    "a column": lambda t: t[:, 3],
    "a row expanded": lambda t: t[:1].expand(4, 12),
    "a part": lambda t: t[2:5, 1:8],
}
_MOVED = {**DTYPES, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}


def cases() -> Iterator[Case]:
    yield Case("device[verify]", LEVEL, verify, is_vital=True)
    for dtype in _MOVED:
        yield Case(f"device[copies,{dtype}]", LEVEL, partial(copies, dtype), dtype=dtype, supports=partial(_declares, dtype), is_vital=True)
    for dtype in DTYPES:
        yield Case(f"device[computes,{dtype}]", LEVEL, partial(computes, dtype), dtype=dtype, supports=partial(_declares, dtype))
    yield Case("device[indexing]", LEVEL, indexing, is_vital=True)
    yield Case("device[isolation]", LEVEL, isolation, supports=_apart)
    yield Case("device[placing]", LEVEL, placing)
    yield Case("device[memory]", LEVEL, memory, supports=_tells_memory)
    yield Case("device[memory moves]", LEVEL, memory_moves, supports=_accounts)
    yield Case("device[seeding]", LEVEL, seeding)
    yield Case("device[synchronise]", LEVEL, synchronise)


def _declares(dtype: str, subject: Subject) -> Support:
    ok = dtype not in DTYPES or dtype in subject.dtypes
    return Support(ok, () if ok else (f"the device declares {', '.join(subject.dtypes)}",))


def _apart(subject: Subject) -> Support:
    if subject.device.capabilities.host_is_device:
        return Support(False, ("the device's memory is the host's",))
    return _tells_memory(subject)


def _accounts(subject: Subject) -> Support:
    if subject.device.capabilities.host_is_device and subject.profile.options.get("stands_in"):
        return Support(False, ("the device's memory is the host's, and what stands in for it tells a simulated size",))
    return _tells_memory(subject)


def _tells_memory(subject: Subject) -> Support:
    try:
        subject.device.memory_info()
    except NotImplementedError:
        return Support(False, ("the device cannot tell its free memory; users must give absolute sizes",))
    return Support(True)


def verify(subject: Subject) -> None:
    with subject.session():
        subject.device.verify()


def copies(dtype: str, subject: Subject) -> None:
    """Bits survive the way there and back: scalars, empty, odd, large and strided tensors."""
    random = torch.Generator().manual_seed(3)
    for shape in ((), (0,), (0, 3), (1,), (7, 13), (3, 1, 5), (1 << 18,)):
        host = _numbers(shape, _MOVED[dtype], random)
        _same(host, subject.download(subject.upload(host)), f"a tensor of shape {list(shape)}")
    base = _numbers((9, 12), _MOVED[dtype], random)
    on_device = subject.upload(base)
    for name, view in _VIEWS.items():
        given = subject.upload(view(base))
        with subject.session():
            packed, read = given.contiguous(), view(on_device)
        _same(view(base).contiguous(), subject.download(packed), f"{name}, given to to_device,")
        _same(view(base).contiguous(), subject.download(read), f"{name} of a device tensor, read by to_host,")


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Whole range of integers; floats of several sizes, with infinities and zeros of both signs among them."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=random) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, generator=random, dtype=dtype)
    host = (torch.randn(shape, generator=random) * 100).to(dtype)
    special = torch.tensor([-0.0, torch.inf, -torch.inf, 0.0], dtype=dtype)
    return host if host.numel() < 8 else torch.cat((special, host.flatten()[4:])).view(shape)


def _same(want: torch.Tensor, got: torch.Tensor, what: str) -> None:
    if got.device.type != "cpu":
        raise CheckFailed(f"to_host gave a tensor on {got.device}")
    if not same_bits(want, got.contiguous()):
        raise CheckFailed(f"{what} came back as {got.dtype} {list(got.shape)} with other bits")


def computes(dtype: str, subject: Subject) -> None:
    """Small whole numbers are exact in every dtype: sums, products, comparisons, a matrix product."""
    a = torch.arange(-6, 6).view(3, 4).to(DTYPES[dtype])
    x = subject.upload(a)
    with subject.session():
        results = {"2x+1": x * 2 + 1, "sum": x.sum(-1), "max": x.amax(0), "where": torch.where(x > 0, x, 0), "matmul": x @ x.T, "float": x.float()}
    want = {"2x+1": a * 2 + 1, "sum": a.sum(-1), "max": a.amax(0), "where": torch.where(a > 0, a, 0), "matmul": a @ a.T, "float": a.float()}
    for name, result in results.items():
        got = subject.download(result)
        if got.dtype != want[name].dtype or not torch.equal(got, want[name]):
            raise CheckFailed(f"{name} in {dtype} gives {got.tolist()} instead of {want[name].tolist()}")


def indexing(subject: Subject) -> None:
    """int32 indices read, gather and write."""
    host, ids = torch.arange(24, dtype=torch.float32).view(6, 4), torch.tensor([5, 0, 3], dtype=torch.int32)
    x, i = subject.upload(host), subject.upload(ids)
    with subject.session():
        results = [x[i], x.index_select(0, i), x.index_put((i,), x[i] + 1)]
    want = [host[ids], host[ids], host.index_put((ids,), host[ids] + 1)]
    for name, result, right in zip(("x[i]", "index_select", "index_put"), results, want, strict=True):
        if not torch.equal(subject.download(result), right):
            raise CheckFailed(f"{name} with int32 indices is wrong")


def isolation(subject: Subject) -> None:
    """A copy is a copy: later writes on either side do not show on the other."""
    host = torch.ones(1000)
    on_device = subject.upload(host)
    subject.device.synchronise()
    host.fill_(2)
    back = subject.download(on_device)
    if not bool((back == 1).all()):
        raise CheckFailed("writing to the host tensor after the copy changed the device's")
    back.fill_(3)
    if not bool((subject.download(on_device) == 1).all()):
        raise CheckFailed("writing to the tensor that was read back changed the device's")


def placing(subject: Subject) -> None:
    """Weights arrive whole, also the slices of columns and the transposes that a rank's part of a weight is."""
    dtype, random = DTYPES[subject.dtypes[0]], torch.Generator().manual_seed(4)
    whole, wide, turned = (torch.randn(shape, generator=random).to(dtype) for shape in ((6, 8), (6, 16), (8, 6)))
    for what, weight in (("a weight", whole), ("a slice of columns", wide[:, 4:12]), ("a transposed weight", turned.T)):
        for shard in ("column", "row", "vocab", "expert", "none"):
            with subject.session():
                placed = subject.device.place("w", weight, shard)
            _same(weight.contiguous(), subject.download(placed), f"{what}, given to place with shard {shard},")


def memory(subject: Subject) -> None:
    free, total = subject.device.memory_info()
    if not (isinstance(free, int) and isinstance(total, int) and 0 <= free <= total and total > 0):
        raise CheckFailed(f"memory_info() gives free {free!r}, total {total!r}; bytes, 0 <= free <= total, are needed")
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if subject.device.capabilities.host_is_device and total < 1 << 30 and total * 256 < host:
        raise CheckFailed(f"memory_info() gives a total of {total}, on a host with {host} bytes of memory; it must count bytes")


def memory_moves(subject: Subject) -> None:
    """Free memory falls by what is allocated and comes back. The host's also moves by what others do: there it need only move."""
    if subject.device.capabilities.host_is_device:
        before = after = subject.device.memory_info()
        with contextlib.ExitStack() as held:
            for take in range(1, TAKES + 1):  # the system counts late, and gives from what it has set aside, now and then
                piece = held.enter_context(mmap.mmap(-1, take * PIECE))  # fresh pages: an allocator may have kept freed ones
                for at in range(0, len(piece), mmap.PAGESIZE):
                    piece[at] = 1
                after = subject.device.memory_info()
                if after != before:
                    break
                time.sleep(0.1)
        if after == before:
            taken = PIECE * TAKES * (TAKES + 1) // 2 >> 20
            raise CheckFailed(f"memory_info() gives {before} before and after {taken} MiB were taken; it must tell what is free now")
        return
    with subject.session():
        before = subject.device.memory_info()[0]
        piece = subject.device.to_device(torch.zeros(PIECE // 4))
        subject.device.synchronise()
        used = before - subject.device.memory_info()[0]
        if not PIECE <= used + SLACK or used > PIECE + SLACK:
            raise CheckFailed(f"after {PIECE >> 20} MiB were allocated, free memory fell by {used / (1 << 20):.1f} MiB")
        del piece
        gc.collect()
        kept = before - subject.device.memory_info()[0]
        if kept > PIECE + SLACK:
            raise CheckFailed(f"after the piece was freed, {kept / (1 << 20):.1f} MiB more are in use than before")


def seeding(subject: Subject) -> None:
    draws = []
    for seed in (11, 11, 12):
        with subject.session():
            subject.device.seed(seed)
            draws.append(torch.rand(32, device=subject.device.torch_device))
    host = [subject.download(t) for t in draws]
    if not torch.equal(host[0], host[1]) or torch.equal(host[0], host[2]):
        raise CheckFailed("seed() does not repeat the device's random numbers, or ignores its value")


def synchronise(subject: Subject) -> None:
    x = subject.upload(torch.ones(64, 64))
    with subject.session():
        y = x @ x
        subject.device.synchronise()
    if float(subject.download(y)[0, 0]) != 64.0:
        raise CheckFailed("a product of ones is not 64")
