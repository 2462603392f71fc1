"""Oarlock: an LLM inference server whose core knows no hardware.

Owns: the public names of the offline API, imported only when used.
Reads: nothing at import time.
Never: imports torch at import time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oarlock.llm import LLM, AsyncLLM
    from oarlock.pooling_params import PoolingParams
    from oarlock.sampling_params import SamplingParams

_LAZY = {"LLM": "oarlock.llm", "AsyncLLM": "oarlock.llm", "PoolingParams": "oarlock.pooling_params", "SamplingParams": "oarlock.sampling_params"}

__all__ = ["LLM", "AsyncLLM", "PoolingParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'oarlock' has no attribute {name!r}")
