"""What a checkpoint is to the model code: tensors by their Hugging Face names, read when asked for.

Owns: the `Checkpoint` interface, the dummy checkpoint, the progress bar.
Reads: `errors`.
Never: knows a model; keeps a tensor that it handed out.
"""

from __future__ import annotations

import abc
import sys
import zlib
from collections.abc import Iterable, Iterator, Sized
from math import prod
from typing import Self, TypeVar

import torch

from oarlock.backend_api.runtime import Quantization
from oarlock.errors import WeightMismatch

T = TypeVar("T")


class Checkpoint(abc.ABC):
    """Tensors by name. Not thread-safe. `close` it, or use it as a context manager."""

    is_dummy = False  # tensors are made up from the shape asked for, and `names` is empty
    quantization: Quantization | None = None  # that the file itself is, whatever its settings say

    @abc.abstractmethod
    def names(self) -> set[str]:
        """Every tensor, under the name that transformers' own class gives it. A new set."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor.

        Raises:
            WeightMismatch: no such tensor.
        """

    @abc.abstractmethod
    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, on the host; it may be a view of the mapped file, so do not write to it.

        `dtype` None: as stored (float32 for block-quantised GGUF tensors). Otherwise floating point tensors are cast.

        Raises:
            WeightMismatch: no such tensor, or it cannot be read; the message names it.
        """

    def get_shaped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """`get`, checked.

        Raises:
            WeightMismatch: also when the shape is another.
        """
        if self.shape(name) != tuple(shape):
            raise WeightMismatch(f"tensor {name} has shape {list(self.shape(name))}, the model needs {list(shape)}")
        return self.get(name, dtype)

    def close(self) -> None:
        """Let go of the files; tensors handed out stay valid. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


DRAWN = 1_000_003  # random numbers of one dummy tensor


class DummyCheckpoint(Checkpoint):
    """Small random numbers of any shape: uniform in ±1e-3, the same for a name and seed on every rank. Drawing each of billions takes minutes, so
    a tensor repeats its first million; a prime number of them, so that no two rows are alike."""

    is_dummy = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def names(self) -> set[str]:
        return set()

    def shape(self, name: str) -> tuple[int, ...]:
        raise WeightMismatch(f"a dummy checkpoint does not know the shape of {name}; use get_shaped")

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise WeightMismatch(f"a dummy checkpoint does not know the shape of {name}; use get_shaped")

    def get_shaped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or torch.float32
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (self._seed & 0xFFFFFFFF))
        # Types of less than 16 bits have no random numbers of their own, and integers no range this small.
        drawn = dtype if dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16) else torch.float16
        numbers = torch.empty(prod(shape), dtype=drawn)
        done = numbers[:DRAWN].uniform_(-1e-3, 1e-3, generator=generator).numel()
        while 0 < done < numbers.numel():
            more = numbers[done : 2 * done]
            more.copy_(numbers[: more.numel()])
            done += more.numel()
        return numbers.view(shape).to(dtype)


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """To `dtype`, where that is asked for and the tensor holds numbers of 16 bits and more."""
    if dtype is None or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor
    return tensor.to(dtype)


def progress(items: Iterable[T], text: str = "loading weights", unit: str = "tensor") -> Iterator[T]:
    """The same items; a bar on stderr while they pass, when that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from tqdm import tqdm

    yield from tqdm(items, desc=text, unit=unit, total=len(items) if isinstance(items, Sized) else None, file=sys.stderr, leave=False)
