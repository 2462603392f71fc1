"""Choose how a checkpoint is read.

Owns: the load formats.
Reads: `model_summary`, `config`, `weight_files`, `errors`.
Never: reads a tensor.
"""

from __future__ import annotations

from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError
from oarlock.model_summary import ModelSummary
from oarlock.runtime.loader.checkpoint import Checkpoint, DummyCheckpoint
from oarlock.runtime.loader.gguf_file import GGUFCheckpoint
from oarlock.runtime.loader.names import Renamed
from oarlock.runtime.loader.safetensors_files import SafetensorsCheckpoint
from oarlock.runtime.loader.torch_files import NumpyCacheCheckpoint, TorchCheckpoint
from oarlock.weight_files import weight_files

LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache", "dummy", "gguf")


def open_checkpoint(summary: ModelSummary, config: ModelConfig, *, keeps_codes: bool = False) -> Checkpoint:
    """The weights of a model, under the names of its text model. `keeps_codes`: those of a GGUF file may be left quantised.

    Raises:
        ConfigError: an unknown `--load-format`, or one that does not fit the file.
        ModelError, WeightMismatch: files are missing, truncated or broken.
    """
    kind = config.load_format
    if kind not in LOAD_FORMATS:
        raise ConfigError(f"--load-format {kind} is not supported; {', '.join(LOAD_FORMATS)} are", option="--load-format")
    if kind == "dummy":
        return DummyCheckpoint(config.seed)
    if summary.is_gguf:
        if kind not in ("auto", "gguf"):
            raise ConfigError(f"--load-format {kind} cannot read the GGUF file {summary.path}; use auto or gguf", option="--load-format")
        return GGUFCheckpoint(summary, keeps_codes=keeps_codes)
    if kind == "gguf":
        raise ConfigError(f"--load-format gguf needs a .gguf file, {summary.path} is a folder; use auto", option="--load-format")
    files = weight_files(summary.path, kind)
    if kind == "npcache":
        found: Checkpoint = NumpyCacheCheckpoint(summary.path, files)
    elif files[0].suffix == ".safetensors":
        found = SafetensorsCheckpoint(summary.path, files)
    else:
        found = TorchCheckpoint(files)
    return Renamed(found, summary)
