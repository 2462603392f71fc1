"""Real launches to compile ahead of time: the models whose shapes count, and the record of one launch.

Owns: `Model`, the three models, `Launch`.
Reads: torch (tensors of the meta device only).
Never: computes; holds a kernel's shapes (each module here has those of one kernel file).

A launch calls a launcher with tensors of the meta device, as a step would call it. tests/kernel_compile.py catches what it launches and
compiles it for a described chip, through the specialisation that a real launch takes (alignment, divisibility, the value 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model on one device, from its config.json."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the gated feed-forward; of one expert where there are experts
    vocab: int
    layers: int
    experts: int = 0
    top_k: int = 0
    window: int | None = None  # of its window layers
    activation: str = "silu"


LLAMA = Model("Llama-3-8B", 4096, 32, 8, 128, 14336, 128256, 32)
QWEN = Model("Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151936, 48, experts=128, top_k=8)
GEMMA = Model("Gemma3-12B", 3840, 16, 8, 256, 15360, 262208, 48, window=1024, activation="gelu_tanh")
MODELS = (LLAMA, QWEN, GEMMA)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a launcher. Everything that it launches is compiled; `kernel` of its chapter must be among it."""

    model: str  # Model.name
    text: str  # what the call is, for the table: "64 decodes of 4k"
    call: Callable[[], object]
    quick: bool = False  # compiled by every test run; the rest by --full and by tools/gen_kernels_doc.py
    chips: tuple[str, ...] = CHIPS
    spills: str = ""  # why this launch may spill registers; "": it may not
    no_products: str = ""  # why it has no matrix instruction though its chapter's kernel has


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
