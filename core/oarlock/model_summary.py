"""What core needs to know of a checkpoint, read from config.json or a GGUF header. No torch, no weights.

Owns: `ModelSummary` and how it is derived.
Reads: `config`, `errors`.
Never: opens a weight file beyond its header; imports torch or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Frozen facts about one checkpoint, after overrides."""

    path: str  # local folder or .gguf file
    architecture: str  # "LlamaForCausalLM"
    hf_config: dict[str, Any] = field(default_factory=dict)  # config.json (text part for composite models), or the same keys made from a GGUF header
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_model_len: int = 0  # after --max-model-len, rope scaling and --disable-sliding-window
    derived_max_model_len: int = 0  # what the checkpoint allows
    dtype: str = "float32"  # the checkpoint's
    sliding_window: int | None = None  # tokens; None when no layer has one, or it is disabled
    layer_windows: tuple[int | None, ...] = ()  # per layer
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()  # config and generation_config together
    bos_token_id: int | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)  # sampling defaults of the checkpoint
    quantization_config: dict[str, Any] | None = None
    is_gguf: bool = False
