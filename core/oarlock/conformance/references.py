"""The references as an oracle for a backend's own tests: the meaning of each op, and the paged attention.

Owns: nothing.
Reads: `runtime.reference`.
Never: is imported while serving.
"""

from oarlock.runtime.reference import layers, logits, moe, sampling
from oarlock.runtime.reference.attention import ReferenceAttention

__all__ = ["ReferenceAttention", "layers", "logits", "moe", "sampling"]
