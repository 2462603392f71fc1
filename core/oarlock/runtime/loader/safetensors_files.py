"""Safetensors files, one or several shards, as a checkpoint.

Owns: the check of headers before anything is read.
Reads: `weight_files`, `errors`.
Never: reads a whole file; executes anything.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oarlock.errors import ModelError, WeightMismatch
from oarlock.runtime.loader.checkpoint import Checkpoint, cast
from oarlock.weight_files import safetensors_index

_MAX_HEADER_BYTES = 100_000_000


class SafetensorsCheckpoint(Checkpoint):
    """Shards stay mapped until `close`."""

    def __init__(self, folder: str | Path, files: list[Path]) -> None:
        """Raises ModelError for a broken file, WeightMismatch for a truncated one or a tensor that the index names in vain."""
        self._home: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            for name, shape in read_shapes(file).items():
                if name in self._home:
                    raise WeightMismatch(
                        f"tensor {name} is in both {self._home[name].name} and {file.name} of {folder}; remove one of them"
                    )
                self._home[name], self._shapes[name] = file, shape
        for name, shard in (safetensors_index(Path(folder)) or {}).items():
            if self._home.get(name, Path()).name != Path(shard).name:
                raise WeightMismatch(
                    f"{folder}: the index says that tensor {name} is in {shard}, but it is not there; fetch the model again"
                )
        self._open: dict[Path, Any] = {}

    def names(self) -> set[str]:
        return set(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        self._file(name)
        return self._shapes[name]

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        file = self._file(name)
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            return cast(self._open[file].get_tensor(name), dtype)
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise WeightMismatch(f"tensor {name} of {file} cannot be read: {error}") from None

    def close(self) -> None:
        self._open.clear()

    def _file(self, name: str) -> Path:
        try:
            return self._home[name]
        except KeyError:
            raise WeightMismatch(f"the checkpoint has no tensor {name}") from None


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, from the header, with the file's length checked against it.

    Raises:
        ModelError: this is no safetensors file.
        WeightMismatch: the file ends before a tensor does; the message names it.
    """
    total = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > min(total - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header is said to take {size} bytes of {total}")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        spans = {name: (tuple(entry["shape"]), entry["data_offsets"][1]) for name, entry in header.items()}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}; is it truncated, or a pointer of Git LFS?") from None
    for name, (_, end) in spans.items():
        if 8 + size + end > total:
            raise WeightMismatch(f"{file} is truncated: tensor {name} ends at byte {8 + size + end}, the file at {total}; fetch it again")
    return {name: shape for name, (shape, _) in spans.items()}
