"""The names that a checkpoint's tensors should have had.

Owns: differences of prefix between checkpoints of the same model.
Reads: `model_summary`.
Never: changes a tensor.
"""

from __future__ import annotations

import torch

from oarlock.errors import WeightMismatch
from oarlock.model_summary import ModelSummary
from oarlock.runtime.loader.checkpoint import Checkpoint

# A checkpoint of the bare base model: this tensor is there -> this prefix is missing.
_BARE = {"embed_tokens.weight": "model.", "decoder.embed_tokens.weight": "model.", "wte.weight": "transformer."}
# A composite: the text part's prefix -> what it becomes. Tensors outside it belong to other parts and are left out.
_COMPOSITE = {"language_model.": "", "model.language_model.": "model."}


def text_names(names: set[str]) -> dict[str, str]:
    """Name in the text model -> name in the checkpoint; tensors of a composite's other parts are absent. O(names)."""
    for prefix, new in _COMPOSITE.items():
        inner = {name for name in names if name.startswith(prefix)}
        if inner:
            renamed = {new + name.removeprefix(prefix): name for name in inner}
            return renamed | {"lm_head.weight": "lm_head.weight"} if "lm_head.weight" in names else renamed
    for sign, prefix in _BARE.items():
        if sign in names:
            return {name if name.startswith("lm_head.") else prefix + name: name for name in names}
    return {name: name for name in names}


class Renamed(Checkpoint):
    """A checkpoint under the names of its text model. A head that repeats tied embeddings is left out."""

    def __init__(self, inner: Checkpoint, summary: ModelSummary) -> None:
        self._inner = inner
        self._names = text_names(inner.names())
        if summary.tie_word_embeddings:
            self._names.pop("lm_head.weight", None)

    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._old(name))

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._inner.get(self._old(name), dtype)

    def close(self) -> None:
        self._inner.close()

    def _old(self, name: str) -> str:
        try:
            return self._names[name]
        except KeyError:
            raise WeightMismatch(f"the checkpoint has no tensor {name}") from None
