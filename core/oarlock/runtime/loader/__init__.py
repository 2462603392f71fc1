"""Reading checkpoints: one interface over every file format."""

from oarlock.runtime.loader.checkpoint import Checkpoint, progress
from oarlock.runtime.loader.open import LOAD_FORMATS, open_checkpoint

__all__ = ["LOAD_FORMATS", "Checkpoint", "open_checkpoint", "progress"]
