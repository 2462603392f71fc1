"""Turn what the user calls a model into a local path.

Owns: hub names and the files fetched for them.
Reads: `config`, `errors`.
Never: touches the network for a path that exists.
"""

from __future__ import annotations

from pathlib import Path

from oarlock.config.sections import ModelConfig
from oarlock.errors import ModelError


def resolve_model(config: ModelConfig) -> str:
    path = Path(config.model).expanduser()
    if path.exists():
        return str(path)
    raise ModelError(f"no such model: {config.model}")


def resolve_tokenizer(config: ModelConfig, model_path: str) -> str:
    return model_path if config.tokenizer is None else str(Path(config.tokenizer).expanduser())
