"""Which files of a model folder hold its weights.

Owns: the choice of files for each load format.
Reads: `errors`.
Never: opens a weight file.
"""

from __future__ import annotations

import json
from pathlib import Path

from oarlock.errors import ConfigError, ModelError, WeightMismatch

_INDEX = "model.safetensors.index.json"
# What training leaves beside the weights.
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.pt")
_TRAINING_PREFIXES = ("rng_state", "optimizer", "adapter_")
_PATTERNS = {"auto": ("*.safetensors", "*.bin", "*.pt"), "safetensors": ("*.safetensors",), "pt": ("*.pt",), "npcache": ("*.bin",)}


def weight_files(folder: str | Path, load_format: str = "auto") -> list[Path]:
    """The weight files of a folder, sorted; all of one suffix.

    Raises:
        ConfigError: the load format is not one that reads files of a folder.
        ModelError: no such file is there.
        WeightMismatch: the index of a sharded checkpoint names a file that is missing.
    """
    if load_format not in _PATTERNS:
        raise ConfigError(
            f"--load-format {load_format} does not read weight files of a folder; {', '.join(_PATTERNS)} do", option="--load-format"
        )
    folder = Path(folder)
    for pattern in _PATTERNS[load_format]:
        files = sorted(file for file in folder.glob(pattern) if not _is_training(file.name))
        if files:
            return _indexed(folder, files) if pattern == "*.safetensors" else files
    wanted = ", ".join(_PATTERNS[load_format])
    raise ModelError(f"{folder} has no weights for --load-format {load_format}: no file matches {wanted}")


def safetensors_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name of a sharded checkpoint, None when there is no index.

    Raises:
        ModelError: the index cannot be read.
    """
    path = folder / _INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}; is the file truncated?") from None


def _is_training(name: str) -> bool:
    return name in _TRAINING or name.startswith(_TRAINING_PREFIXES)


def _indexed(folder: Path, files: list[Path]) -> list[Path]:
    """Only what the index names: other files are duplicates in another layout."""
    index = safetensors_index(folder)
    if index is None:
        return files
    for tensor, file in index.items():
        if not (folder / file).is_file():
            raise WeightMismatch(f"{folder}: {_INDEX} says that tensor {tensor} is in {file}, but that file is missing; fetch it again")
    return sorted(folder / name for name in set(index.values()))
