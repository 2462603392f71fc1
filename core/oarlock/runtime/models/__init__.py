"""Model families: one small file each, found by architecture name.

Owns: the table of architectures and the error for an unknown one.
Reads: `model_summary`.
Never: imports a family before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

from oarlock.errors import UnsupportedArchitecture
from oarlock.model_summary import ModelSummary

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
}


def family_of(summary: ModelSummary) -> ModuleType:
    """The module that describes this architecture: it has `model_spec(summary)` and `weight_specs(summary, spec)`.

    Raises:
        UnsupportedArchitecture: no file describes it.
    """
    name = FAMILIES.get(summary.architecture)
    if name is None:
        near = difflib.get_close_matches(summary.architecture, FAMILIES, n=3, cutoff=0.3) or sorted(FAMILIES)[:3]
        raise UnsupportedArchitecture(
            f"{summary.architecture} has no native model file; the nearest that do are {', '.join(near)}; supported are {', '.join(sorted(FAMILIES))}"
        )
    return importlib.import_module(f"oarlock.runtime.models.{name}")
