"""One rank of two, in a process of its own: `SymmetricCommunicator` over gloo, shared memory acted by gloo's own collectives.

    python two_ranks.py RANK FOLDER
"""

from __future__ import annotations

import json
import sys

import torch

from oarlock_cuda import collectives, vendor

CALLS: list[str] = []


def one_shot(shared: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """As torch's kernel: the local numbers into the buffer, then every rank's buffer added up in rank order."""
    CALLS.append("one")
    assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and shared.shape == tensor.shape and shared.dtype == tensor.dtype
    shared.copy_(tensor)
    parts = [torch.empty_like(shared) for _ in range(2)]
    torch.distributed.all_gather(parts, shared)
    return parts[0] + parts[1]


def two_shots(shared: torch.Tensor) -> torch.Tensor:
    """As torch's kernel: each rank sums its part, then everybody takes all parts."""
    CALLS.append("two")
    flat, rank = shared.view(-1), torch.distributed.get_rank()
    every = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(every, flat)
    half = len(flat) // 2
    mine = sum(part[rank * half : (rank + 1) * half] for part in every)
    sums = [torch.empty(half, dtype=flat.dtype) for _ in range(2)]
    torch.distributed.all_gather(sums, mine)
    return torch.cat(sums).view(shared.shape)


def main(rank: int, folder: str) -> None:
    vendor.BACKEND, vendor.TYPE = "gloo", "cpu"
    vendor.symmetric_buffer = lambda size, device: torch.empty(size, dtype=torch.uint8, device=device)
    vendor.one_shot, vendor.two_shots = one_shot, two_shots
    collectives.ONE_SHOT_BYTES = {2: 4096}
    comm = collectives.SymmetricCommunicator(rank, 2, f"file://{folder}/rendezvous")
    plain = collectives.DistributedCommunicator.all_reduce
    found = {}
    for name, shape, dtype in (
        ("a decode", (3, 64), torch.float32),
        ("a decode in bfloat16", (16, 128), torch.bfloat16),
        ("many rows", (64, 64), torch.float32),
        ("a prompt", (4096, 1024), torch.float32),
        ("half precision", (3, 64), torch.float16),
        ("an odd size", (3, 3), torch.float32),
        ("nothing", (0, 64), torch.float32),
    ):
        CALLS.clear()
        values = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        got, want = comm.all_reduce(values.clone()), plain(comm, values.clone())
        kept = got.clone()
        comm.all_reduce(values.clone() + 1)  # the buffer is used again
        found[name] = [CALLS[:1], torch.equal(got, want) and torch.equal(got, kept)]
    strided = (torch.arange(128.0) + rank).view(2, 64)[:, ::2]
    found["a view"] = [["one"], torch.equal(comm.all_reduce(strided), 2 * torch.arange(128.0).view(2, 64)[:, ::2] + 1)]
    shifted = torch.arange(65.0)[1:]
    found["at an odd address"] = [["one"], torch.equal(comm.all_reduce(shifted), 2 * torch.arange(65.0)[1:])]
    gathered = comm.all_gather(torch.full((2, 1), float(rank)))
    found["the rest"] = [[], gathered.tolist() == [[0.0, 1.0]] * 2 and comm.broadcast(torch.tensor([rank])).tolist() == [0]]
    comm.close()
    assert not torch.distributed.is_initialized()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
