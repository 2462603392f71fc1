"""PyTorch's own files (*.bin, *.pt) as a checkpoint, and the numpy cache made from them.

Owns: `<folder>/np`, its format and lock.
Reads: `errors`.
Never: unpickles anything but tensors.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oarlock.errors import ModelError, WeightMismatch
from oarlock.runtime.loader.checkpoint import Checkpoint, cast

logger = logging.getLogger(__name__)


class TorchCheckpoint(Checkpoint):
    """State dicts, mapped from their files where the format allows it."""

    def __init__(self, files: list[Path]) -> None:
        """Raises ModelError for a broken file, or one that holds more than tensors."""
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self._tensors.update(_state_dict(file))

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return cast(self._tensor(name), dtype)

    def close(self) -> None:
        self._tensors.clear()

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightMismatch(f"the checkpoint has no tensor {name}") from None


def _state_dict(file: Path) -> dict[str, torch.Tensor]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        raise ModelError(
            f"{file} cannot be read as tensors alone: it is broken, or holds pickled Python objects, which Oarlock does not execute; "
            "fetch it again, or convert it to safetensors"
        ) from None
    except Exception as error:  # noqa: BLE001  torch raises whatever its parsers meet in broken bytes
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{file} cannot be read: {reason}; is it truncated?") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ModelError(f"{file} does not hold a state dict (names and tensors)")
    return {name: value.detach() for name, value in found.items() if isinstance(value, torch.Tensor)}


class NumpyCacheCheckpoint(Checkpoint):
    """`<folder>/np/<tensor name>`, each the bytes of a .npy file; written from the *.bin files by whoever comes first.

    numpy has no bfloat16 (nor 8-bit floats): such tensors are stored as integers of the same bits, and
    np/weight_names.json says what they are, together with size and time of the files they came from.
    """

    def __init__(self, folder: str | Path, files: list[Path]) -> None:
        """Raises ModelError when the cache cannot be written or the files cannot be read."""
        self._folder = Path(folder) / "np"
        sources = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
        try:
            self._folder.mkdir(exist_ok=True)
            with _locked(self._folder / ".lock"):
                self._dtypes = self._read_index(sources) or self._write(files, sources)
        except OSError as error:
            raise ModelError(f"--load-format npcache cannot write {self._folder}: {error.strerror}; use --load-format auto") from None

    def names(self) -> set[str]:
        return set(self._dtypes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._map(name).shape

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        array = np.array(self._map(name))
        return cast(torch.from_numpy(array).view(getattr(torch, self._dtypes[name])), dtype)

    def _map(self, name: str) -> np.ndarray:
        if name not in self._dtypes:
            raise WeightMismatch(f"the checkpoint has no tensor {name}")
        try:
            array: np.ndarray = np.load(self._folder / name, mmap_mode="r", allow_pickle=False)
            return array
        except (OSError, ValueError) as error:
            raise WeightMismatch(f"tensor {name} in {self._folder} cannot be read: {error}; delete that folder") from None

    def _read_index(self, sources: dict[str, list[int]]) -> dict[str, str] | None:
        """None when there is no cache yet, or it was made from other files."""
        try:
            index = json.loads((self._folder / "weight_names.json").read_text(encoding="utf-8"))
            return index["dtypes"] if index["sources"] == sources else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, files: list[Path], sources: dict[str, list[int]]) -> dict[str, str]:
        logger.info("writing the numpy cache %s", self._folder)
        dtypes: dict[str, str] = {}
        for file in files:
            for name, tensor in _state_dict(file).items():
                if name in (".lock", "weight_names.json") or os.sep in name or name.startswith("."):
                    raise ModelError(f"{file}: tensor name {name!r} cannot be a file name; use --load-format auto")
                dtypes[name] = str(tensor.dtype).removeprefix("torch.")
                with (self._folder / name).open("wb") as stream:
                    np.save(stream, _as_numpy(tensor), allow_pickle=False)
        # Last, and whole: its presence says that the cache is complete.
        partial = self._folder / ".weight_names.json"
        partial.write_text(json.dumps({"dtypes": dtypes, "sources": sources}), encoding="utf-8")
        partial.replace(self._folder / "weight_names.json")
        return dtypes


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
