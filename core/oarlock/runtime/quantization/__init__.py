"""Quantised weights: how they lie in memory, what is computed with them, and how checkpoints are read into them.

Owns: the schemes and core's own quantization methods.
Reads: `backend_api.runtime`, `runtime.reference`.
Never: knows a device.
"""

import oarlock.runtime.reference  # noqa: F401  first, whichever module is wanted: it registers the schemes, which use its layers
