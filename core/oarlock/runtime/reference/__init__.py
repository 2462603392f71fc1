"""Plain-torch references: the meaning of every op, the fallback of every device, the oracle of the conformance kit.

Owns: the registering of core's ops (importing this package does it).
Reads: `backend_api.runtime`.
Never: uses `nonzero`, boolean indexing, `.item()` or a tensor-valued branch; names a device.
"""

from oarlock.runtime.layers import decoder, stack  # the coarse ops
from oarlock.runtime.quantization import definitions as quantized
from oarlock.runtime.reference import definitions
from oarlock.runtime.reference.attention import FunctionalReferenceAttention, ReferenceAttention

__all__ = ["FunctionalReferenceAttention", "ReferenceAttention", "decoder", "definitions", "quantized", "stack"]
