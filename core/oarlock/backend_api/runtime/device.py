"""`Device`: the only class that a backend must write.

Owns: the device protocol and its defaults through `torch.accelerator`.
Reads: `backend_api`.
Never: imports `oarlock.runtime`; knows a model.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch

from oarlock.backend_api import Capabilities


class CheckedOverrides:
    """A base whose subclasses may only define public methods that the base knows, with the base's parameters.

    A misspelt or mis-signed override is a TypeError when the class is created. Names that start with "_" are free.
    """

    _extension_base: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_extension_base" in cls.__dict__:
            return
        base = next(b for b in cls.__mro__ if "_extension_base" in b.__dict__ and b is not CheckedOverrides)
        for name, value in vars(cls).items():
            if name.startswith("_"):
                continue
            if not hasattr(base, name):
                known = sorted(n for n in dir(base) if not n.startswith("_"))
                raise TypeError(f"{cls.__qualname__}.{name} overrides nothing of {base.__name__}; its members are {', '.join(known)}")
            theirs = getattr(base, name)
            if inspect.isfunction(value) and inspect.isfunction(theirs):
                want, got = list(inspect.signature(theirs).parameters), list(inspect.signature(value).parameters)
                if got[: len(want)] != want:
                    raise TypeError(f"{cls.__qualname__}.{name}{inspect.signature(value)} must take the parameters {want}")


class Device(CheckedOverrides, abc.ABC):
    """One device of one worker.

    Required: `torch_device`, `capabilities`, `activate`. Everything else has a default through `torch.accelerator`.
    """

    _extension_base: ClassVar[bool] = True

    def __init__(self, index: int = 0, options: dict[str, Any] | None = None) -> None:
        """`index` is the device's number on this host; `options` are the backend's own settings ("threads", …)."""
        self.index = index
        self.options = dict(options or {})

    @property
    @abc.abstractmethod
    def torch_device(self) -> torch.device:
        """The torch device that tensors live on."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What this device can do. Constant for the life of the object."""

    @abc.abstractmethod
    def activate(self) -> None:
        """Make the device current in this process or thread. Called once before anything is allocated."""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """A context for all that the worker does (a dispatch mode, a stream). Called and entered anew around each step, each read, …"""
        return contextlib.nullcontext()

    def synchronise(self) -> None:
        """Wait until everything launched has ended."""
        if self.torch_device.type != "cpu":
            torch.accelerator.synchronize(self.index)

    def seed(self, value: int) -> None:
        """Seed the device's own generator (sampling does not use it)."""
        torch.manual_seed(value)

    def memory_info(self) -> tuple[int, int]:
        """(free bytes, total bytes) of the device, now.

        Raises:
            NotImplementedError: the device cannot tell; the user must give absolute sizes.
        """
        if self.torch_device.type == "cpu":
            raise NotImplementedError
        return torch.accelerator.get_memory_info(self.index)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device: once per program for the packed inputs, so keep it cheap."""
        return host.to(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to host memory, waiting for it: the one read of a step."""
        return tensor.cpu()

    def begin_read(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin what `to_host` does, after all that was launched so far; what is returned waits for it and gives the host tensor.

        Called when a step is launched, so that reading its results does not wait for the step after it. Never for a tensor that is
        written again before it was read.
        """
        return lambda: self.to_host(tensor)

    def place(self, name: str, tensor: torch.Tensor, shard: Literal["column", "row", "vocab", "expert", "none"]) -> torch.Tensor:
        """Put one weight on the device. `tensor` is this rank's part already; `shard` says along what, for SPMD devices."""
        return self.to_device(tensor)

    def verify(self) -> None:
        """Do a tiny real computation, so that a broken driver is found before a model is loaded.

        Raises:
            RuntimeError: the device computes nothing, or nonsense.
        """
        got = float(self.to_host((torch.arange(4, dtype=torch.float32, device=self.torch_device) * 2).sum()))
        if got != 12.0:
            raise RuntimeError(f"{self.torch_device} computed 2 * (0 + 1 + 2 + 3) = {got}")

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        """The padded shapes that programs are compiled for; {} (the default) leaves every step its exact shape.

        `max_blocks` is the width of a block table that holds the longest request. Keys, all of them or none, are the axes
        of core's bucket table, each an ascending tuple whose last entry is the most that fits in one step: "decode_rows"
        (a row each for a request that decodes), "chunk_rows", "chunk_tokens" (all chunks of a step together), "chunk_lens"
        (one chunk), "blocks", "out_rows" (one entry: prompt positions that are scored at once; decode_rows and chunk_rows
        together must fit). Every key that the axes multiply to is compiled at start-up, so keep them few. The scheduler cuts
        its steps to what fits.
        A device of dynamic shapes may give "decode_rows" and "blocks" alone: a step that only decodes, and fits, is padded to them, its `forward` is
        given to the graph runner, and everything else runs as it is. `max_blocks` is then no more than --max-seq-len-to-capture needs, and
        --enforce-eager leaves the question out.
        Must be given whole where capabilities.dynamic_shapes is False. Called at start-up, after activate(), perhaps more than once: the same
        arguments must give the same shapes, on every rank.
        """
        return {}

    def describe(self) -> str:
        """One line for people: the chip's name, threads, instruction sets."""
        return str(self.torch_device)


def few_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_blocks: int,
    *,
    decode_rows: Iterable[int] = (),
    chunk_tokens: Iterable[int],
    chunk_rows: int = 4,
) -> dict[str, tuple[int, ...]]:
    """What `Device.buckets` returns, its first three arguments cut down to a few programs.

    The sizes wanted of decodes, and of the chunks of a step (`chunk_tokens` in all, `chunk_rows` of them), are kept where they are within
    the limits. One length of chunk, and two widths of block table: a quarter and the whole, since many kernels read all of it.
    """
    rows = min(chunk_rows, max_num_seqs)
    tokens = tuple(sorted({min(size, max_num_batched_tokens) for size in chunk_tokens}))
    return {
        "decode_rows": tuple(sorted({*(size for size in decode_rows if size < max_num_seqs), max_num_seqs})),
        "chunk_rows": (rows,),
        "chunk_tokens": tokens,
        "chunk_lens": (tokens[-1],),
        "blocks": tuple(sorted({-(-max_blocks // 4), max_blocks})),
        "out_rows": (max_num_seqs + rows,),
    }


def decode_buckets(max_num_seqs: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
    """What `Device.buckets` returns where graphs of decodes are captured and all else runs as it is.

    A decode reads all weights whatever its rows are, so that padding costs little: powers of two to 32, then steps of 32, and of 64 from 256
    to 512. A quarter and the whole of the block tables: kernels that split a context do so by what may come.
    """
    sizes = (*(1 << n for n in range(5)), *range(32, 256, 32), *range(256, 512, 64), 512)
    return {
        "decode_rows": tuple(sorted({*(size for size in sizes if size < max_num_seqs), min(max_num_seqs, sizes[-1])})),
        "blocks": tuple(sorted({-(-max_blocks // 4), max_blocks})),
    }
