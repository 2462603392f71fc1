"""The references as an oracle for a backend's own tests: the meaning of each op, quantised ones with weights to try, and the paged attention.

Owns: nothing.
Reads: `runtime.reference`, `runtime.quantization`.
Never: is imported while serving.
"""

from oarlock.runtime.quantization import schemes
from oarlock.runtime.quantization.definitions import weight_of
from oarlock.runtime.reference import layers, logits, moe, sampling
from oarlock.runtime.reference.attention import ReferenceAttention

__all__ = ["ReferenceAttention", "layers", "logits", "moe", "sampling", "schemes", "weight_of"]
